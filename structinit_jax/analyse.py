r"""Analyzes what attention does in a model: maps, measures by layer and head, shift equivariance.

    python -m structinit_jax.analyse --workdir=DIR --out=analysis

compares the newest checkpoint of a run, or another with --step=best or --step=N, with its initial
weights, on training images. Without a run, it compares the initial weights of schemes:

    python -m structinit_jax.analyse --config=configs/vit_fashion_mnist.py \
        --schemes=default,mimetic,impulse --out=analysis

The models are those that `structinit_jax.compare` trains with the same flags.

It writes to the directory --out:

- `analysis.json`: all measures by layer and head.
- `maps.npz`: the maps [h, N, N] of each model and layer, averaged over the images.
- `maps_by_offset.png`: every head as a convolution kernel.
- `by_layer.png`: every measure against the layer. The distance from shift equivariance tells how
  far each layer's output is from moving with an image that is shifted by one patch (in Swin by one
  token of the last stage): 0 for a convolution, 1 for unrelated features.

`analysis.measures` defines the measures. In Swin they describe maps within windows.
"""

import json
from pathlib import Path

import jax
import numpy as np
from absl import flags

from structinit_jax import command_line, evaluate
from structinit_jax.analysis import figures
from structinit_jax.analysis.collect import Snapshot, observe_run, observe_start, read_images
from structinit_jax.command_line import STEP, WORKDIR
from structinit_jax.compare import train_grid
from structinit_jax.data.folder import title
from structinit_jax.errors import InputError
from structinit_jax.training import resume

_SCHEMES = flags.DEFINE_list("schemes", [], "Initializations to compare, without --workdir.")
_NUM_IMAGES = flags.DEFINE_integer("num_images", 64, "Number of training images.")


def write(snapshots: list[Snapshot], subject: str, out: Path) -> None:
    """Writes the numbers and draws the figures; `subject` is for their titles."""
    fields = ("name", "grid", "measures")
    models = [
        dict(name=s.name, layers=[{k: getattr(layer, k) for k in fields} for layer in s.layers])
        for s in snapshots
    ]

    def rounded(x):
        return np.round(x, 5).tolist() if isinstance(x, float | np.ndarray) else x

    text = json.dumps(dict(subject=subject, models=jax.tree.map(rounded, models)), indent=1)
    (out / "analysis.json").write_text(text + "\n", encoding="utf-8")
    figures.draw_by_layer(snapshots, f"Measures by layer: {subject}", out / "by_layer.png")
    figures.draw_by_offset(snapshots, f"Heads by offset: {subject}", out / "maps_by_offset.png")
    maps = {f"{s.name}/layer {layer.name}": layer.maps for s in snapshots for layer in s.layers}
    np.savez_compressed(out / "maps.npz", **maps)


def main(overrides: command_line.Overrides) -> None:
    """Runs the command."""
    config = command_line.read_config(overrides)
    if _SCHEMES.value and WORKDIR.value:
        raise InputError("--schemes compares initial weights and cannot be used with --workdir")
    if STEP.value and not WORKDIR.value:
        raise InputError("--step needs --workdir, the directory of a run")
    out = command_line.out_path("analysis")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out={out} is no folder to write to: {error}") from error
    images = read_images(config, _NUM_IMAGES.value)
    if WORKDIR.value:
        step, devices = STEP.value or "newest", jax.local_devices()[:1]
        fixed = (*resume.OF_WEIGHTS, "attention_init", "start_from", "seed")  # started like this
        restored = evaluate.restore_model(config, WORKDIR.value, devices, step, fixed)
        snapshots = observe_run(config, restored, images)
    else:
        settings = train_grid.expand(config, _SCHEMES.value or [config.attention_init.name], {})
        snapshots = [observe_start(setting, images) for setting in settings.values()]
    data = title(config.data.name, config.data.data_dir)
    subject = f"{config.model.name}, {len(images)} training images of {data}"
    write(snapshots, subject, out)
    print(f"wrote analysis.json, by_layer.png, maps.npz and maps_by_offset.png to {out}")


if __name__ == "__main__":
    command_line.run(main)
