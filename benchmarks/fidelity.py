"""Compares our configs with the authors' programs: recipes, and the size of all initial weights.

    python benchmarks/fidelity.py --out=fidelity.md

`tests/references/programs.json` holds what the programs do; `tests/references/make_programs.py`
recorded it. A recipe is compared field by field. Initial weights are compared by their root mean
square, for each kind of weight, averaged over the layers. --rows selects rows: the solves of
`impulse_2024` take 10,000 steps each.
"""

import argparse
import json
import re
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from structinit_jax.augment import AugmentConfig
from structinit_jax.config import load_config, make_attention_init
from structinit_jax.data.datasets import CATALOG
from structinit_jax.data.source import split_size
from structinit_jax.models.timm import to_timm
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh
from structinit_jax.training.state import initialize_model

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "references" / "programs.json"


def recipe(config) -> dict:
    """Returns what `make_programs.record_recipe` records, for one of our configs."""
    data = config.data
    num_examples = split_size(data.train_split, CATALOG[data.name])
    schedule = build.make_schedule(config, num_examples)
    num_epochs = round(config.num_epochs)
    epochs = np.linspace(0, num_epochs - 1, 10).round().astype(int).tolist()
    rates = schedule.learning_rate(np.array(epochs) * round(schedule.steps_per_epoch))
    return {
        "batch_size": config.batch_size,
        "num_epochs": num_epochs,
        "learning_rate": dict(zip(map(str, epochs), map(float, rates), strict=True)),
        "weight_decay": config.weight_decay,
        "adam": [0.9, config.adam_b2, config.adam_epsilon],
        "clip_norm": config.clip_norm,
        "decayed": decayed(config),
        "mean": list(data.mean),
        "std": list(data.std),
        "crop_fraction": data.crop_fraction,
        "drop_path": config.model.drop_path,
        "repeats": data.repeats,
        "label_smoothing": config.label_smoothing,
        "augmentation": {
            field: value
            for field, value in config.augment.items()
            if value != getattr(AugmentConfig, field)
        },
    }


def decayed(config) -> list[str]:
    """Returns timm's names of the weights that weight decay applies to, without block numbers."""
    model = build.make_model(config, make_mesh(devices=jax.devices()[:1]))
    marks = jax.tree.map(
        lambda leaf, mark: np.full(leaf.shape, mark, np.float32),
        model.params,
        model.decayed,
    )
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), model.model_state)
    names = to_timm(nnx.merge(model.graphdef, marks, zeros))
    return sorted({kind(name) for name, marks in names.items() if marks.all()})


def initial_weights(config) -> dict[str, list[float]]:
    """Returns what `make_programs.statistics` records, for one of our configs."""
    model = build.make_model(config, make_mesh(devices=jax.devices()[:1]))
    sizes = {}
    initial = initialize_model(model, make_attention_init(config), config.seed)
    for name, value in to_timm(nnx.merge(model.graphdef, *initial.weights)).items():
        parts = {name: value}
        if ".qkv." in name:
            chunks = zip("qkv", np.split(value, 3), strict=True)
            parts = {name.replace("qkv", part): chunk for part, chunk in chunks}
        for part, chunk in parts.items():
            sizes.setdefault(kind(part), []).append(float(np.sqrt(np.mean(chunk**2.0))))
    return sizes


def kind(name: str) -> str:
    """Returns a weight's name without the number of its block."""
    return re.sub(r"^blocks\.\d+\.", "blocks.", name)


def compare_recipes(programs: dict) -> list[str]:
    """Returns one table row for each field of each recipe."""
    rows = []
    for name, reference in programs["recipes"].items():
        ours = recipe(load_config(str(ROOT / "configs" / reference["config"])))
        for field, value in ours.items():
            wanted = reference[field]
            if field == "learning_rate":
                worst = max(abs(value[e] / wanted[e] - 1) for e in wanted)
                same, value = worst < 1e-5, ", ".join(f"{x:.3g}" for x in value.values())
                wanted = ", ".join(f"{x:.3g}" for x in wanted.values())
            else:
                same = value == wanted
                value, wanted = (_as_text(x) for x in (value, wanted))
            rows.append(
                f"| {name} | {field} | {wanted} | {value} | {'same' if same else 'DIFFERS'} |"
            )
    return rows


def _as_text(value):
    if isinstance(value, dict):
        value = [f"{field}={x}" for field, x in sorted(value.items())]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def compare_weights(programs: dict, chosen: str) -> list[str]:
    """Returns one table row for each kind of weight of each row of the configs."""
    rows = []
    for model, inits in programs["models"].items():
        for init, reference in inits.items():
            row = f"{model},{init}".replace(":,", ":")
            if not re.search(chosen, row):
                continue
            ours = initial_weights(load_config(str(ROOT / "configs" / row)))
            for name, wanted in reference.items():
                values, wanted = np.array(ours[name]), np.array(wanted)
                if not wanted.any():
                    ratio = "1.000" if not values.any() else "DIFFERS"
                else:
                    ratio = f"{values.mean() / wanted.mean():.3f}"
                rows.append(
                    f"| {row} | {name} | {wanted.mean():.4g} | {values.mean():.4g} | {ratio} |"
                )
            print(*rows[-len(reference) :], sep="\n", flush=True)
    return rows


def main():
    """Prints the tables and writes them to --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="file for the tables, in Markdown")
    parser.add_argument(
        "--rows", default="", help="only rows of the configs that match this pattern"
    )
    args = parser.parse_args()
    programs = json.loads(PROGRAMS.read_text())
    recipes = compare_recipes(programs)
    print(*recipes, sep="\n")
    weights = compare_weights(programs, args.rows)
    if args.out:
        text = [
            "# Recipes\n",
            "Our configs against the authors' programs; `ours` is the value of our config.\n",
            "| recipe | field | program | ours | |",
            "|---|---|---|---|---|",
            *recipes,
            "\n# Initial weights\n",
            "Root mean square, averaged over the layers.\n",
            "| config and row | weight | program | ours | ratio |",
            "|---|---|---|---|---|",
            *weights,
        ]
        Path(args.out).write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
