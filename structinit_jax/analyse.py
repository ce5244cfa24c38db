r"""Analyzes the attention of a model: maps, and measures by layer and head.

    python -m structinit_jax.analyse --workdir=DIR --out=analysis

This compares the newest checkpoint of a run (or the one that --step=best or --step=N selects) with
the initial weights, on training images. Without a run, it compares the initial weights of schemes:

    python -m structinit_jax.analyse --config=configs/vit_fashion_mnist.py \
        --schemes=default,mimetic,impulse --out=analysis

These are the models that `structinit_jax.compare` trains with the same flags.

Files written to the --out directory:

- `analysis.json`: all measures by layer and head.
- `maps.npz`: the maps [h, N, N] of each model and layer, averaged over the images.
- `maps.png`: the maps of the first layer, with queries as rows and keys as columns, and their upper
  left corners (two rows of tokens); every head of all layers as a convolution kernel.
- `by_layer.png`: every measure plotted by layer.

`analysis.measures` defines the measures. In Swin, they describe the maps within windows. ConvMixer
has no maps, so the map files are not written; its measure is the stable rank of each layer's input.
MLP-Mixer is not supported.
"""

import io
import json
from pathlib import Path

import jax
import numpy as np
from absl import flags

from structinit_jax import command_line
from structinit_jax.analysis import collect, figures
from structinit_jax.command_line import FLAGS
from structinit_jax.compare.settings import expand
from structinit_jax.data.folder import display_name
from structinit_jax.errors import require
from structinit_jax.files import write_atomically
from structinit_jax.training.evaluation import restore_model
from structinit_jax.training.workdir import START


def define_flags() -> None:
    """Defines the flags specific to this command."""
    flags.DEFINE_list("schemes", [], "Initializations to compare, instead of a checkpoint.")
    text = "Number of training images, rounded down to a multiple of 8."
    flags.DEFINE_integer("num_images", 64, text, lower_bound=collect.BATCH_SIZE)


def write(snapshots: list[collect.Snapshot], subject: str, out: Path) -> None:
    """Writes the numbers and draws the figures, with `subject` in their titles."""
    models = []
    for name, layers in snapshots:
        numbers = [dict(name=x.name, grid=x.grid, measures=x.measures) for x in layers]
        models.append(dict(name=name, layers=numbers))
    content = dict(subject=subject, models=models)
    text = json.dumps(content, indent=1, default=np.ndarray.tolist)
    write_atomically(out / "analysis.json", f"{text}\n")
    figures.draw_by_layer(snapshots, f"Measures by layer: {subject}", out / "by_layer.png")
    if snapshots[0].layers[0].maps is not None:
        figures.draw_snapshots(snapshots, f"Attention maps: {subject}", out / "maps.png")
        named = [(name, layer) for name, layers in snapshots for layer in layers]
        maps = io.BytesIO()
        arrays = {f"{name}/layer {layer.name}": layer.maps for name, layer in named}
        np.savez_compressed(maps, **arrays)
        write_atomically(out / "maps.npz", maps.getvalue())
    else:
        for name in ("maps.npz", "maps.png"):  # left over from another model
            (out / name).unlink(missing_ok=True)


def main(overrides: command_line.Overrides) -> None:
    """Runs the command."""
    has_run = bool(FLAGS.workdir) and not FLAGS.schemes
    needs = "left out with --schemes or without --workdir: there is no checkpoint"
    require("--step", FLAGS.step, needs, has_run or not FLAGS.step)
    config = command_line.read_config(overrides)
    out = command_line.out_folder("analysis")
    images = collect.read_images(config, FLAGS.num_images)
    if has_run:
        device = jax.local_devices()[:1]
        step = FLAGS.step or "newest"
        model, state, _ = restore_model(config, FLAGS.workdir, device, step, level=START)
        snapshots = collect.observe_run(config, model, state, images)
        when = ""
    else:
        settings = expand(config, FLAGS.schemes or [config.attention_init.name], {})
        snapshots = [collect.observe_start(setting, images) for setting in settings.values()]
        when = " before training"
    data = display_name(config.data.name, config.data.data_dir)
    subject = f"{config.model.name}{when}, {len(images)} training images of {data}"
    write(snapshots, subject, out)
    print(f"wrote analysis.json and figures to {out}")


if __name__ == "__main__":
    command_line.run(main, define_flags)
