"""Draws a model's attention on real images: every head of every layer, as a convolution kernel.

    python -m structinit_jax.show_attention --config=configs/vit_t_digits.py --out=attention.png

Each cell shows attention by offset: its centre is a token's attention to itself, the place right
of it that to its right neighbour. With --workdir the model comes from the newest checkpoint there,
else it is freshly initialized; --schemes=default,mimetic,impulse draws several initializations side
by side.
"""

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
from structinit_jax.command_line import OUT, WORKDIR
from structinit_jax.data.loader import decode_all
from structinit_jax.errors import InputError
from structinit_jax.program import build_program, initialize, make_plan

_SCHEMES = flags.DEFINE_list("schemes", [], "Initializations to draw side by side.")
NUM_IMAGES = 64


def head_kernels(config: ConfigDict, workdir: str | Path | None) -> tuple[np.ndarray, Measures]:
    """Attention on the config's test images of its model, fresh or from the newest checkpoint.

    Returns:
      Attention by offset [L, h, 2 rows - 1, 2 cols - 1], averaged over images, and the measures.
    """
    config_lib.validate(config)
    if config.model.name != "vit":
        raise InputError(f"model.name={config.model.name!r}: show_attention draws a 'vit'")
    dataset = evaluate.open_data(config)
    source = dataset.split(config.data.eval_split, field="data.eval_split")
    program = build_program(config, make_plan(config, dataset.info, len(source)))
    if workdir is None:
        state = initialize(config, program)
    else:
        _, state = evaluate.restore_newest(program, workdir)
    data = config.data
    shape = (min(NUM_IMAGES, len(source)), data.image_size, data.image_size, data.channels)
    images, _ = decode_all(source, shape, data.crop_fraction)

    @jax.jit
    def compute(params, model_state, images):
        model = nnx.merge(program.graphdef, params, model_state)
        images = normalize(images, config.data.mean, config.data.std)
        maps = model(images, with_maps=True)[1]["blocks"]["attention_maps"]
        tokens = model.grid[0] * model.grid[1]
        mean = maps.mean(axis=1)[..., -tokens:, -tokens:]
        return attention_by_offset(mean, model.grid), measure_maps(maps, model.grid)

    return jax.device_get(compute(state.params, state.model_state, images))


def draw(panels: dict[str, tuple[np.ndarray, Measures]], path: Path) -> None:
    """Writes one panel a model: layers downwards, heads to the right."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("drawing needs matplotlib: pip install 'structinit-jax[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers, heads = next(iter(panels.values()))[0].shape[:2]
    cell = 0.62
    brightest = max(_centre(kernels).max() for kernels, _ in panels.values())
    figure = plt.figure(
        figsize=(len(panels) * (heads * cell + 0.6), layers * cell + 0.7), layout="constrained"
    )
    subfigures = figure.subfigures(1, len(panels), squeeze=False)[0]
    for subfigure, (name, (kernels, measures)) in zip(subfigures, panels.items(), strict=True):
        subfigure.suptitle(
            f"{name}\n{100 * measures.target_mass.mean():.0f} % on one neighbour", size=9
        )
        axes = subfigure.subplots(layers, heads, squeeze=False)
        for (layer, head), axis in np.ndenumerate(axes):
            axis.imshow(_centre(kernels[layer, head]), cmap="magma", vmin=0, vmax=brightest)
            axis.set(xticks=[], yticks=[])
            if head == 0:
                axis.set_ylabel(f"{layer + 1}", size=7, rotation=0, labelpad=8, va="center")
            if layer == 0:
                axis.set_title(f"head {head + 1}", size=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _centre(kernels: np.ndarray, reach: int = 4) -> np.ndarray:
    """The part around the centre: an impulse on a large grid would be a dot too small to see."""
    row, col = (size // 2 for size in kernels.shape[-2:])
    rows, cols = (slice(max(at - reach, 0), at + reach + 1) for at in (row, col))
    return kernels[..., rows, cols]


def main(config: ConfigDict) -> None:
    """Draws what the flags ask for and prints the measures by layer."""
    if _SCHEMES.value and WORKDIR.value:
        raise InputError("--schemes draws fresh initializations: leave out --workdir")
    panels = {}
    for scheme in _SCHEMES.value or [config.attention_init.name]:
        if _SCHEMES.value:
            config.attention_init = ConfigDict(dict(name=scheme))
        name = scheme if WORKDIR.value is None else f"{scheme}, trained"
        panels[name] = head_kernels(config, WORKDIR.value)
        print(f"{name}: layer, attention on the strongest of 9 neighbours, distance, entropy")
        measures = panels[name][1]
        for layer in range(len(measures.target_mass)):
            print(
                f"  {layer + 1:2}  {100 * measures.target_mass[layer].mean():5.1f} %"
                f"  {measures.distance[layer].mean():5.2f} tokens"
                f"  {measures.entropy[layer].mean():5.2f} nats"
            )
    path = Path(OUT.value or "attention.png")
    draw(panels, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    command_line.run(main)
