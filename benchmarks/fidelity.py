"""Compares our configs with the authors' programs: recipes and initial weights.

    python benchmarks/fidelity.py 2024 CHECKOUT    # github.com/osiriszjq/structured_init
    python benchmarks/fidelity.py 2025 CHECKOUT    # .../structured_initialization
    python benchmarks/fidelity.py                  # the tables of benchmarks/results/fidelity.md

CHECKOUT is the timm folder inside the repository, at commit 48b59c3 or 2623dcc; this needs torch.
Each distinct initialization in configs/papers.csv is compared once and appended to
benchmarks/results/fidelity.csv; those already there are skipped. The recipes of the programs are
in tests/references/programs.json, recorded by tests/references/make_programs.py.
"""

import contextlib
import csv
import inspect
import io
import json
import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from structinit_jax.attention_init import SCHEMES
from structinit_jax.attention_init.positions import layer_norm, sincos_positions
from structinit_jax.attention_init.published import PSEUDO_INPUT_EPSILON
from structinit_jax.attention_init.targets import filter_maps
from structinit_jax.augment import AugmentFields
from structinit_jax.config import load_config, make_attention_init, set_fields
from structinit_jax.data.datasets import CATALOG
from structinit_jax.data.source import split_size
from structinit_jax.models.timm import to_timm
from structinit_jax.rngs import split_seed
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh

ROOT = Path(__file__).parent.parent
REFERENCES = ROOT / "tests" / "references"
PROGRAMS = REFERENCES / "programs.json"
RESULTS = ROOT / "benchmarks" / "results" / "fidelity.csv"
MIN_VALUES = 100  # Weights with fewer values are left out.
STEPS = 101  # of `impulse_2024`'s 10,000, just after the second rescaling of Q and K
PSEUDO_INPUTS = {"positions": "P", "uniform": "U", "positions+uniform": "A"}


# -- recipes ---------------------------------------------------------------------------------------


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
            if value != getattr(AugmentFields, field)
        },
    }


def decayed(config) -> list[str]:
    """Returns timm's names of the weights that weight decay applies to, without block numbers."""
    config = config.copy_and_resolve_references()
    config.model.depth = 1  # the names of all blocks are alike
    model = build.make_model(config, make_mesh(devices=jax.devices()[:1]))
    marks = jax.tree.map(
        lambda leaf, mark: np.full(leaf.shape, mark, np.float32),
        model.params,
        model.decayed,
    )
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), model.model_state)
    names = to_timm(nnx.merge(model.graphdef, marks, zeros))
    return sorted({kind(name) for name, marks in names.items() if marks.all()})


def kind(name: str) -> str:
    """Returns a weight's name without its block number."""
    return re.sub(r"blocks\.\d+\.", "blocks.", name)


def compare_recipes(programs: dict) -> list[str]:
    """Returns a table: a row for each field, a column for each recipe."""
    columns = {}
    for name, reference in programs["recipes"].items():
        columns[name] = {}
        for field, ours in recipe(load_config(str(ROOT / "configs" / reference["config"]))).items():
            wanted = reference[field]
            same = ours == wanted
            if field == "learning_rate":
                same = max(abs(ours[epoch] / wanted[epoch] - 1) for epoch in wanted) < 1e-5
            ours, wanted = (_as_text(value, field) for value in (ours, wanted))
            columns[name][field] = ours if same else f"DIFFERS: program {wanted}, ours {ours}"
    rows = [["field", *columns], ["---"] * (1 + len(columns))]
    rows += [[field, *(column[field] for column in columns.values())] for field in columns[name]]
    return [f"| {' | '.join(row)} |" for row in rows]


def _as_text(value, field):
    if field == "learning_rate":
        return ", ".join(f"{rate:.3g}" for rate in list(value.values())[::3])
    if isinstance(value, dict):
        value = [f"{name}={x}" for name, x in sorted(value.items())]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# -- initial weights -------------------------------------------------------------------------------


def distinct_initializations() -> list[tuple]:
    """Returns a config for each distinct initialization in papers.csv, with its rows there.

    All have 1,000 classes, enough to compare the head's bias. ViTs and ConvMixers have three
    layers, because the programs only distinguish the first, the second and all later ones. The
    scheme `default` is the same for any number of heads.
    """
    found = {}
    for row in csv.DictReader((ROOT / "configs" / "papers.csv").read_text().splitlines()):
        config = load_config(str(ROOT / row["config"]))
        set_fields(config, [tuple(field.split("=", 1)) for field in row["fields"].split()])
        config.model.num_classes = 1000
        if config.model.name in ("vit", "convmixer"):
            config.model.depth = 3
        init = config.attention_init
        options = inspect.signature(SCHEMES[init.name]).parameters.values()
        config.attention_init = {option.name: option.default for option in options} | init.to_dict()
        ignored = ["dtype", "drop_path", "spatial_filters"]
        ignored += ["num_heads"] if init.name == "default" else []
        model = {k: v for k, v in config.model.items() if k not in ignored}
        parts = [model, config.attention_init.to_dict(), config.data.image_size, config.start_from]
        found.setdefault(json.dumps(parts, sort_keys=True), (config, []))[1].append(row)
    return list(found.values())


def program_model(config, row: dict) -> tuple[str, dict] | None:
    """Returns the name and arguments of the authors' model, or None if no program has it."""
    model = config.model
    init = config.attention_init
    size = config.data.image_size
    if config.start_from or (model.name in ("swin", "mixer") and init.name != "default"):
        return None
    if row["table"].startswith("2025"):
        name = re.search(r"[:,](\w+_224)", row["config"])[1]
        if model.name != "vit":
            return name, {}
        post = init.name.removesuffix("_2025")
        sizes = dict(depth=model.depth, img_size=size)
        return name, sizes | dict(weight_init="skip", post_weight_init=post)
    if model.name == "convmixer":
        filters = "random" if init.name == "default" else f"box{init.taps}"
        sizes = dict(dim=model.width, kernel_size=model.kernel_size, patch_size=model.patch_size)
        return "convmixer", sizes | dict(depth=model.depth, init=filters)
    arguments = dict(
        img_size=(size, size),
        embed_dim=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        sin_pe=model.positions == "sincos",
        no_embed_class=model.positions == "sincos",
        class_token=model.pool == "class_token",
        global_pool="token" if model.pool == "class_token" else "avg",
        weight_init={"timm": "", "pytorch": "skip"}[model.base_init],
    )
    if init.name == "mimetic":
        arguments["weight_init"] = "mimetic0.7_0.7"
    if init.name == "impulse_2024":
        arguments["weight_init"] = f"impulse{init.kernel_size}"
        arguments["pseudo_input1"] = PSEUDO_INPUTS[init.first_input]
        arguments["pseudo_input2"] = PSEUDO_INPUTS[init.following_input]
        arguments["init_once"] = init.same_layers
    return f"vit_tiny_patch{model.patch_size}_{size}", arguments


class Program:
    """The authors' program for one paper, on a CPU."""

    def __init__(self, checkout: str):
        runpy.run_path(str(REFERENCES / "import_torchvision.py"))
        sys.path.insert(0, checkout)
        import torch
        from timm.models import vision_transformer

        torch.set_printoptions(precision=8)
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
        encode = getattr(vision_transformer, "build_sincos2d_pos_embed", None)  # only in 2024
        vision_transformer.build_sincos2d_pos_embed = lambda *a, device, **k: encode(*a, **k)
        self.torch = torch
        self.module = vision_transformer
        self.source = inspect.getsource(vision_transformer.impulse_init)

    def initialize(self, name, arguments, seed, steps, offsets):
        """Returns the weights and the losses that the 2024 program's `impulse_init` prints.

        Its heads use `offsets` [L, h] instead of drawing them.
        """
        from timm import create_model

        assert "num_epoch = 10000" in self.source
        exec(self.source.replace("num_epoch = 10000", f"num_epoch = {steps}"), vars(self.module))
        offsets = map(self.torch.tensor, offsets)
        self.torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        draw = self.torch.randint
        self.torch.randint = lambda *_: next(offsets)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            model = create_model(name, num_classes=1000, **arguments)
        self.torch.randint = draw
        weights = {name: value.numpy() for name, value in model.state_dict().items()}
        if arguments.get("sin_pe"):
            weights["pos_embed"] = model.pos_embed.numpy()
        return weights, [float(loss) for loss in re.findall(r"tensor\((.*)\)", printed.getvalue())]


def statistics(weights: dict, heads: int) -> dict[str, tuple[float, float, int]]:
    """Returns the root mean square of each weight over all layers, its standard error and size.

    Attention weights are listed by head, along with the mean diagonals of Q Kᵀ and of projection
    times V. The standard errors assume independent values; identical layers count once.
    """
    layers = {}
    for name, value in weights.items():
        parts = {kind(name): value}
        if heads and ".qkv." in name:
            chunks = zip("qkv", np.split(value, 3), strict=True)
            parts = {kind(name).replace("qkv", part): chunk for part, chunk in chunks}
        for part, chunk in parts.items():
            layers.setdefault(part, {})[chunk.tobytes()] = chunk.astype(np.float64)
    stacks = {name: np.stack(list(values.values())) for name, values in layers.items()}
    diagonals = {}
    if heads:
        q, k, v, out = (stacks.pop(f"blocks.attn.{part}.weight") for part in (*"qkv", "proj"))
        diagonals["diagonal of proj v"] = np.einsum("lij,lji->li", out, v)
        shape = (heads, -1, q.shape[2])
        q, k, v, out = (x.reshape(len(x), *shape) for x in (q, k, v, out.swapaxes(1, 2)))
        diagonals["diagonal of q k"] = np.einsum("lhdi,lhdi->lhi", q, k)
        for name, stack in zip(("q", "k", "v", "proj"), (q, k, v, out), strict=True):
            stacks |= {f"attn.{name}.weight, head {i}": stack[:, i] for i in range(heads)}
    result = {}
    for name, values in stacks.items():
        square = values**2
        size = square.mean() ** 0.5
        result[name] = size, square.std() / (2 * size or 1) / square.size**0.5, square.size
    for name, values in diagonals.items():
        result[name] = values.mean(), values.std() / values.size**0.5, values.size
    return {name: numbers for name, numbers in result.items() if numbers[2] >= MIN_VALUES}


def compare(config, rows, seed, program: Program) -> dict:
    """Returns one row of the results: how far our weights are from the program's."""
    row = rows[0]
    heads = config.model.num_heads if config.model.name == "vit" else 0
    steps = num_steps(config)
    if steps:
        config.attention_init.max_steps = steps
    model = build.make_model(config, make_mesh(devices=jax.devices()[:1]))
    params_rng, attention_rng, _ = split_seed(np.uint32(seed))
    network = model.create(params_rng)
    new = network.initialize_attention(make_attention_init(config), attention_rng)
    ours = to_timm(network)
    solved = new["blocks"] if heads and "impulse" in config.attention_init.name else None
    offsets = np.asarray(solved.filter_index) if solved else ()
    theirs, losses = program.initialize(*program_model(config, row), seed, steps, offsets)
    if config.model.get("positions") == "sincos":
        side = config.data.image_size // config.model.patch_size
        ours["pos_embed"] = sincos_positions((side, side), config.model.width)
        np.testing.assert_allclose(ours["pos_embed"], theirs["pos_embed"], atol=1e-5)
    if solved and not losses:
        targets = filter_maps(solved.filters, network.sites()["blocks"].grid)
        losses = [map_loss(theirs, targets[index], i) for i, index in enumerate(offsets)]
    shapes = [{name: value.shape for name, value in w.items()} for w in (theirs, ours)]
    assert shapes[0] == shapes[1], set(shapes[0].items()) ^ set(shapes[1].items())
    sizes = [statistics(w, heads) for w in (theirs, ours)]
    errors = {}
    for name, (wanted, error, size) in sizes[0].items():
        value, own_error, own_size = sizes[1][name]
        assert size == own_size, f"{name} is the same in a different number of layers"
        rounding = 1e-6 * abs(wanted) + 1e-12
        errors[name] = (value - wanted) / (np.hypot(error, own_error) + rounding)
    worst = max(errors, key=lambda name: abs(errors[name]))
    return {
        "initialization": initialization(row),
        "rows": "; ".join(f"{r['table']} {r['row']}" for r in rows),
        "compared": len(errors),
        "beyond 2": sum(abs(error) > 2 for error in errors.values()),
        "worst": worst,
        "program": f"{sizes[0][worst][0]:.5g}",
        "ours": f"{sizes[1][worst][0]:.5g}",
        "standard errors": f"{errors[worst]:.2f}",
        "steps": steps or "",
        "program's loss": f"{np.mean(losses):.6f}" if losses else "",
        "our loss": f"{solved.report.loss:.6f}" if losses else "",
    }


def map_loss(weights: dict, targets: np.ndarray, layer: int) -> float:
    """Returns the mean squared difference between a layer's maps of positions and its targets."""
    heads, num_tokens, _ = targets.shape
    x = layer_norm(weights["pos_embed"][0, -num_tokens:], PSEUDO_INPUT_EPSILON)
    qkv = weights[f"blocks.{layer}.attn.qkv.weight"]
    query, key, _ = qkv.reshape(3, heads, -1, qkv.shape[1])
    logits = query.shape[1] ** -0.5 * (x @ query.mT) @ (x @ key.mT).mT
    return np.mean((targets - jax.nn.softmax(logits)) ** 2)


def compare_weights(paper: str, checkout: str):
    """Adds a row to the results for each distinct initialization of a paper's tables."""
    program = Program(checkout)
    results = read_results()
    done = {result["initialization"] for result in results}
    todo = [
        (seed, config, rows)
        for seed, (config, rows) in enumerate(distinct_initializations())
        if rows[0]["table"].startswith(paper) and program_model(config, rows[0])
    ]
    todo.sort(key=lambda item: num_steps(item[1]))  # the cheap ones first
    for seed, config, rows in todo:
        if initialization(rows[0]) not in done:
            results.append(compare(config, rows, seed, program))
            with RESULTS.open("w", newline="") as file:
                writer = csv.DictWriter(file, results[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(results)


def num_steps(config) -> int:
    """Returns the number of Adam steps that both programs take, or 0 if the scheme takes none."""
    is_iterative = config.attention_init.name == "impulse_2024" and config.model.name == "vit"
    return STEPS if is_iterative else 0


def read_results() -> list[dict]:
    """Returns the results so far."""
    return list(csv.DictReader(RESULTS.read_text().splitlines())) if RESULTS.exists() else []


def initialization(row: dict) -> str:
    """Returns the config and the fields of a row of papers.csv."""
    return f"{Path(row['config']).name} {row['fields']}".strip()


# -- page ------------------------------------------------------------------------------------------


def summarize(results: list[dict]) -> list[str]:
    """Returns a table: for each scheme and set of the papers' tables, the worst weight."""
    groups = {}
    for result in results:
        tables = dict.fromkeys(row.split()[0] for row in result["rows"].split("; "))
        scheme = re.search(r"[:,]([a-z]\w*(,5)?)$", result["initialization"].split()[0])[1]
        groups.setdefault((", ".join(tables), scheme), []).append(result)
    header = "tables", "init", "rows", "distinct", "compared", "worst", "errors", "program", "ours"
    lines = [[*header, "loss"], ["---"] * 10]
    for (tables, scheme), group in sorted(groups.items()):
        num_rows = sum(result["rows"].count("; ") + 1 for result in group)
        compared = sum(int(result["compared"]) for result in group)
        worst = max(group, key=lambda result: abs(float(result["standard errors"])))
        values = [worst[field] for field in ("worst", "standard errors", "program", "ours")]
        ratios = [float(r["our loss"]) / float(r["program's loss"]) for r in group if r["our loss"]]
        loss = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else ""
        lines.append([tables, scheme, num_rows, len(group), compared, *values, loss])
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def main():
    """Compares with one program, or prints the tables."""
    if sys.argv[1:]:
        compare_weights(*sys.argv[1:])
    else:
        print(*compare_recipes(json.loads(PROGRAMS.read_text())), sep="\n", end="\n\n")
        print(*summarize(read_results()), sep="\n")


if __name__ == "__main__":
    main()
