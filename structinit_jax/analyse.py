r"""Analyzes what attention does in a model: maps, measures by layer and head, stable rank, CKA.

    python -m structinit_jax.analyse --workdir=DIR --out=analysis

compares the newest checkpoint of a run (or that of --step=best or --step=N) with its start values,
on training images. --other_workdir adds a second run of the same image size, at the same --step.
Without a run, it compares the start values of schemes:

    python -m structinit_jax.analyse --config=configs/vit_fashion_mnist.py \
        --schemes=default,mimetic,impulse --out=analysis

The models are those that `structinit_jax.compare` trains with the same flags.

It writes to the directory --out:

- `analysis.json`: all measures by layer and head, and the CKA.
- `maps.npz`: the maps [h, N, N] of each model and layer, averaged over the images.
- `maps_by_offset.png`: every head as a convolution kernel; for a ConvMixer its filters.
- `maps_full.png`: the N×N maps of some layers and heads, with a zoom into the first rows.
- `by_layer.png`: every measure against the layer.
- `cka.png`: the similarity of the layers of every two models.

`analysis.measures` defines the measures. In Swin they describe maps within windows, in MLP-Mixer
the derivatives of token mixing (`analysis.collect.comparable_maps`). ConvMixer has no maps, so it
gets only stable rank, CKA and the cosine between its filters and their start values.
"""

# isort: split
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from absl import flags

from structinit_jax import command_line, evaluate
from structinit_jax import config as config_lib
from structinit_jax.analysis import figures, measures
from structinit_jax.analysis.collect import (
    Snapshot,
    StackSize,
    layer_names,
    observe_run,
    observe_start,
    one_device,
    read_images,
    stack_sizes,
)
from structinit_jax.attention_init import ConvSite, TokenMixingSite
from structinit_jax.command_line import STEP, TRUST, WORKDIR
from structinit_jax.compare import grid
from structinit_jax.errors import InputError
from structinit_jax.training.state import abstract_model

USES = (*config_lib.EVALUATED, "attention_init.name")  # the scheme has the targets of a run's heads
_SCHEMES = flags.DEFINE_list("schemes", [], "Initializations to compare, without --workdir.")
_OTHER_WORKDIR = flags.DEFINE_string(
    "other_workdir", None, "Another run, on the same images and at the same --step."
)
_NUM_IMAGES = flags.DEFINE_integer("num_images", 64, "Number of training images.")
_LAYERS = flags.DEFINE_list(
    "layers", [], "Layers of maps_full.png, or 'all'. By default the first, middle and last."
)
_HEADS = flags.DEFINE_list("heads", [], "Heads of maps_full.png, or 'all'; by default the first 3.")


def to_json(snapshots: list[Snapshot]) -> dict:
    """Returns all numbers as a JSON object."""
    models = [
        dict(
            name=snapshot.name,
            input_stable_rank=_round(snapshot.embedding_rank),
            layers=[_layer_to_json(layer) for layer in snapshot.layers],
        )
        for snapshot in snapshots
    ]
    pairs = itertools.combinations(snapshots, 2)
    similarities = [
        dict(rows=a.name, columns=b.name, cka=_round(measures.cka(a.grams, b.grams)))
        for a, b in pairs
    ]
    return dict(models=models, cka=similarities)


def _layer_to_json(layer):
    values = {name: _round(value) for name, value in layer.measures.items()}
    if layer.maps is not None and layer.token_size:
        values["distance_in_pixels"] = _round(layer.token_size * layer.measures["distance"])
    uniform = {name: _round(value) for name, value in layer.uniform.items()}
    return dict(
        layer=layer.name,
        grid=layer.grid,
        stable_rank=_round(layer.stable_rank),
        measures=values,
        uniform=uniform,
    )


def _round(values):
    return np.round(np.asarray(values, np.float64), 5).tolist()


def write(
    snapshots: list[Snapshot],
    subject: str,
    out: Path,
    *,
    layers: list[int],
    heads: list[int],
) -> list[str]:
    """Writes the numbers and draws the figures.

    Args:
      snapshots: Results of `observe_run` or `observe_start`.
      subject: What was observed, for the titles.
      out: Directory to write to.
      layers: Indices of the layers of maps_full.png.
      heads: Indices of the heads of maps_full.png.

    Returns:
      The names of the files.
    """
    names = ["analysis.json", "by_layer.png", "maps_by_offset.png"]
    numbers = dict(subject=subject, **to_json(snapshots))
    (out / "analysis.json").write_text(json.dumps(numbers, indent=1) + "\n")
    figures.draw_by_layer(snapshots, f"Measures by layer: {subject}", out / "by_layer.png")
    if len(snapshots) > 1:
        figures.draw_cka(snapshots, f"Similarity of layers: {subject}", out / "cka.png")
        names.append("cka.png")
    title = figures.title_by_offset(snapshots, subject)
    figures.draw_by_offset(snapshots, title, out / "maps_by_offset.png")
    if snapshots[0].layers[0].maps is None:
        return names
    maps = {f"{s.name}/layer {layer.name}": layer.maps for s in snapshots for layer in s.layers}
    np.savez_compressed(out / "maps.npz", **maps)
    quantity = figures.name_quantity(snapshots).capitalize()
    title = f"{quantity} maps and their first rows: {subject}"
    figures.draw_full(snapshots, layers, heads, title, out / "maps_full.png")
    return [*names, "maps.npz", "maps_full.png"]


def choose(flag: str, chosen: list[str], names: list[str], default: list[int]) -> list[int]:
    """Returns the indices of the chosen names; raises `InputError` for others."""
    if chosen == ["all"]:
        return list(range(len(names)))
    for name in chosen:
        if name not in names:
            raise InputError(
                f"--{flag}={','.join(chosen)}: the model has no {name!r}; choose from "
                f"{', '.join(names)}, or 'all'"
            )
    return [names.index(name) for name in chosen] or default


def head_names(sizes: list[StackSize], layers: list[int]) -> list[str]:
    """Returns the names of the heads that at least one of these layers has."""
    heads = [size.num_heads for size in sizes for _ in range(size.num_layers)]
    return [str(head + 1) for head in range(max(heads[layer] for layer in layers))]


def name_models(sizes: Mapping[str, list[StackSize]]) -> str:
    """Names the models and, of an MLP-Mixer, what is observed, for titles.

    Args:
      sizes: Stacks of the models, by the name of the family.
    """
    names = [
        f"token mixing of {name}" if stacks[0].site_type is TokenMixingSite else name
        for name, stacks in sizes.items()
    ]
    return " and ".join(names)


def name_runs(workdirs: list[str]) -> list[str]:
    """Returns the shortest ends of different paths that tell them apart, such as 'h4/seed_0'."""
    parts = [Path(workdir).resolve().parts for workdir in workdirs]
    lengths = range(1, 1 + max(map(len, parts)))
    ends = ([str(Path(*path[-length:])) for path in parts] for length in lengths)
    return next(names for names in ends if len({*names}) == len(names))


def main(overrides: command_line.Overrides) -> None:
    """Runs the command."""
    config = command_line.read_config(overrides, USES)
    _check_flags()
    config_lib.validate(config)
    other = None
    if _OTHER_WORKDIR.value:
        with _of_the_other_run():
            other = config_lib.load_run_config(_OTHER_WORKDIR.value, TRUST.value, USES)
            config_lib.validate(other)
        _check_same_images(config, other)
    sizes = stack_sizes(abstract_model(config, one_device()))
    if not sizes:
        raise InputError(
            f"config.model.name={config.model.name!r} has nothing to analyze: its sites() is empty"
        )
    every_size = {config.model.name: sizes}
    if other:
        other_sizes = stack_sizes(abstract_model(other, one_device()))
        _check_same_kind(sizes, other_sizes)
        every_size[other.model.name] = other_sizes
    names = layer_names(sizes)
    # The 2024 paper shows layers 1, 6 and 12 of 12.
    few = sorted({0, (len(names) - 1) // 2, len(names) - 1})
    layers = choose("layers", _LAYERS.value, names, few)
    all_heads = head_names(sizes, layers)
    heads = choose("heads", _HEADS.value, all_heads, list(range(min(3, len(all_heads)))))
    out = command_line.out_path("analysis")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out={out} cannot be created: {error.strerror}") from error

    images = read_images(config, _NUM_IMAGES.value)
    if WORKDIR.value:
        snapshots = _observe_runs(config, other, images)
    else:
        schemes = _SCHEMES.value or [config.attention_init.name]
        snapshots = [observe_start(grid.with_scheme(config, scheme), images) for scheme in schemes]
    subject = f"{name_models(every_size)}, {len(images)} training images of {config.data.name}"
    written = write(snapshots, subject, out, layers=layers, heads=heads)
    _print_summary(snapshots)
    print(f"wrote {', '.join(sorted(written))} to {out}")


def _check_flags():
    if _SCHEMES.value and WORKDIR.value:
        raise InputError("--schemes compares start values and cannot be used with --workdir")
    for name, value in (("step", STEP.value), ("other_workdir", _OTHER_WORKDIR.value)):
        if value and not WORKDIR.value:
            raise InputError(f"--{name}={value} needs --workdir, the output directory of the run")
    other = _OTHER_WORKDIR.value
    if other and Path(other).resolve() == Path(WORKDIR.value).resolve():
        raise InputError(f"--other_workdir={other} is the same as --workdir: choose another run")
    command_line.check_schemes(_SCHEMES.value)


@contextlib.contextmanager
def _of_the_other_run() -> Iterator[None]:
    """Gives messages about the other run its flag: all functions speak of --workdir."""
    try:
        yield
    except InputError as error:
        text = str(error).replace("--workdir=", "--other_workdir=")
        if "--other_workdir=" not in text:
            text = f"--other_workdir={_OTHER_WORKDIR.value}: {text}"
        raise InputError(text) from error


def _check_same_images(config, other):
    for field in ("image_size", "channels"):
        if config.data[field] != other.data[field]:
            raise InputError(
                f"--other_workdir={_OTHER_WORKDIR.value} was trained with config.data.{field}="
                f"{other.data[field]}, but --workdir with {config.data[field]}: choose a run that "
                "takes the same images"
            )


def _check_same_kind(sizes, others):
    if (sizes[0].site_type is ConvSite) != (others[0].site_type is ConvSite):
        raise InputError(
            f"--other_workdir={_OTHER_WORKDIR.value}: only one of the two runs trained a "
            "ConvMixer, which has filters instead of maps: choose two with maps or two with filters"
        )


def _observe_runs(config, other, images):
    """Observes the run of --workdir and, if its config is given, that of --other_workdir."""
    device, step = jax.local_devices()[:1], STEP.value or "newest"
    restored = evaluate.restore_model(config, WORKDIR.value, device, step)
    if not other:
        return observe_run(config, restored, images)
    with _of_the_other_run():
        other_restored = evaluate.restore_model(other, _OTHER_WORKDIR.value, device, step)
    runs = observe_run(config, restored, images), observe_run(other, other_restored, images)
    names = name_runs([WORKDIR.value, _OTHER_WORKDIR.value])
    pairs = zip(names, runs, strict=True)
    return [s._replace(name=f"{name}: {s.name}") for name, run in pairs for s in run]


def _print_summary(snapshots):
    for snapshot in snapshots:
        print(f"{snapshot.name}: mean over heads")
        for layer in snapshot.layers:
            values = {k: v.mean() for k, v in layer.measures.items() if k in figures.PANELS}
            values["stable_rank"] = layer.stable_rank
            text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            print(f"  layer {layer.name}: {text}")


if __name__ == "__main__":
    command_line.run(main)
