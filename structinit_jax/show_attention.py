"""Draws the attention maps of a model on real images, one convolution kernel per head.

    python -m structinit_jax.show_attention --config=configs/vit_t_digits.py --out=attention.png

Each cell shows the attention by offset: the center is a token's attention to itself, the pixel to
its right the attention to its right neighbor. With --workdir the model is restored from the newest
checkpoint (or that of --step=best or --step=N), otherwise it is freshly initialized.
--schemes=default,mimetic,impulse draws several initializations side by side.
"""

import io
import types
from pathlib import Path

import jax
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import ConfigDict

from structinit_jax import command_line, evaluate
from structinit_jax import config as config_lib
from structinit_jax.attention_init.measure import Measures, attention_by_offset, measure_maps
from structinit_jax.augment import normalize
from structinit_jax.command_line import OUT, STEP, WORKDIR
from structinit_jax.data.loader import decode_all
from structinit_jax.errors import InputError
from structinit_jax.training.mesh import make_mesh
from structinit_jax.training.state import abstract_model, initialize_model

SCHEMES = flags.DEFINE_list("schemes", [], "Initializations to compare.")
NUM_IMAGES = 64


def head_kernels(
    config: ConfigDict, workdir: str | Path | None, step: str = "newest"
) -> tuple[np.ndarray, Measures]:
    """Computes the attention of a ViT on test images.

    Args:
      config: Config of the model and its data.
      workdir: Output directory of the run to restore, or None for a fresh initialization.
      step: 'newest', 'best' or a number; see `checkpoint.find_step`.

    Returns:
      Attention by offset [L, h, 2 rows - 1, 2 cols - 1], averaged over images, and measures of it.
    """
    config_lib.validate(config)
    if config.model.name != "vit":
        raise InputError(f"config.model.name={config.model.name!r}: show_attention needs a 'vit'")
    data = config.data
    source = evaluate.open_data(config).split(data.eval_split, field="data.eval_split")
    device = jax.devices()[:1]
    if workdir is None:
        model = abstract_model(config, make_mesh(devices=device))
        params, model_state = initialize_model(config, model)
    else:
        model, state = evaluate.restore_model(config, workdir, device, step)
        params, model_state = state.params, state.model_state
    shape = (min(NUM_IMAGES, len(source)), data.image_size, data.image_size, data.channels)
    images, _ = decode_all(source, shape, data.crop_fraction)

    @jax.jit
    def compute(params, model_state, images):
        vit = nnx.merge(model.graphdef, params, model_state)
        images = normalize(images, tuple(data.mean), tuple(data.std))
        maps = vit(images, with_maps=True)[1]["blocks"]["attention_maps"]
        num_tokens = vit.grid[0] * vit.grid[1]
        mean = maps.mean(axis=1)[..., -num_tokens:, -num_tokens:]
        return attention_by_offset(mean, vit.grid), measure_maps(maps, vit.grid)

    return jax.device_get(compute(params, model_state, images))


def import_pyplot() -> types.ModuleType:
    """Returns `matplotlib.pyplot`, which draws to files; raises `InputError` without it."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("drawing needs matplotlib: pip install 'structinit-jax[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(panels: dict[str, tuple[np.ndarray, Measures]], path: Path | io.BytesIO) -> None:
    """Draws results of `head_kernels`, by title, with layers as rows and heads as columns."""
    plt = import_pyplot()
    num_layers, num_heads = next(iter(panels.values()))[0].shape[:2]
    brightest = max(_crop_center(kernels).max() for kernels, _ in panels.values())
    size = (len(panels) * (num_heads * 0.62 + 0.6), num_layers * 0.62 + 0.7)  # inches
    figure = plt.figure(figsize=size, layout="constrained")
    subfigures = figure.subfigures(1, len(panels), squeeze=False)[0]
    for subfigure, (name, (kernels, measures)) in zip(subfigures, panels.items(), strict=True):
        percent = 100 * measures.target_mass.mean()
        subfigure.suptitle(f"{name}\n{percent:.0f} % on one neighbor", size=9)
        axes = subfigure.subplots(num_layers, num_heads, squeeze=False)
        for (layer, head), axis in np.ndenumerate(axes):
            axis.imshow(_crop_center(kernels[layer, head]), cmap="magma", vmin=0, vmax=brightest)
            axis.set(xticks=[], yticks=[])
            if head == 0:
                axis.set_ylabel(f"{layer + 1}", size=7, rotation=0, labelpad=8, va="center")
            if layer == 0:
                axis.set_title(f"head {head + 1}", size=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _crop_center(kernels, reach=4):
    """Crops kernels to offsets up to `reach`; on a large grid an impulse would be too small."""
    row, col = (size // 2 for size in kernels.shape[-2:])
    rows, cols = (slice(max(at - reach, 0), at + reach + 1) for at in (row, col))
    return kernels[..., rows, cols]


def main(config: ConfigDict) -> None:
    """Runs the command and prints the measures of each layer."""
    if SCHEMES.value and WORKDIR.value:
        raise InputError("--schemes draws fresh initializations and cannot be used with --workdir")
    if STEP.value and not WORKDIR.value:
        raise InputError(f"--step={STEP.value} needs --workdir, the output directory of the run")
    panels = {}
    for scheme in SCHEMES.value or [config.attention_init.name]:
        if SCHEMES.value:
            config.attention_init = ConfigDict(dict(name=scheme))
        name = scheme if WORKDIR.value is None else f"{scheme}, trained"
        panels[name] = head_kernels(config, WORKDIR.value, STEP.value or "newest")
        print(f"{name}: layer, attention on the strongest of 9 neighbors, distance, entropy")
        measures = panels[name][1]
        columns = (measures.target_mass, measures.distance, measures.entropy)
        rows = zip(*(column.mean(axis=1) for column in columns), strict=True)
        for layer, (mass, distance, entropy) in enumerate(rows, start=1):
            print(f"  {layer:2}  {100 * mass:5.1f} %  {distance:5.2f} tokens  {entropy:5.2f} nats")
    path = Path(OUT.value or "attention.png")
    draw(panels, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    command_line.run(main)
