"""Checks the attention maps of timm's ViTs after `initialize`.

    python benchmarks/timm_models.py --out=timm_models.md

Applies `impulse` to every ViT, DeiT, BEiT and EVA-02 of timm with at most 100 million parameters
and 600 image tokens, built with random weights. The maps are right if the strongest offsets of the
first nine heads, averaged over crops of photographs, are those of the 3×3 kernel, each once. Needs
torch, timm, torchvision, transformers and scikit-learn.
"""

import argparse
import itertools
import math
import textwrap

import hits
import jax
import timm
import torch

from structinit_jax.analysis.measures import strongest_offsets
from structinit_jax.attention_init import impulse
from structinit_jax.errors import InputError
from structinit_jax.interop import initialize, torch_maps

FAMILIES = ["vit_*", "deit_*", "deit3_*", "beit_*", "beitv2_*", "eva02_*", "flexivit_*"]
MAX_PARAMETERS = 100e6
MAX_TOKENS = 600
OFFSETS = set(itertools.product((-1, 0, 1), repeat=2))


def is_small(name: str) -> bool:
    """Whether a model is within the limits on its size, found without allocating its weights."""
    with torch.device("meta"):
        model = timm.create_model(name)
    has_grid = hasattr(model.patch_embed, "grid_size")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    small = parameters <= MAX_PARAMETERS
    return small and has_grid and math.prod(model.patch_embed.grid_size) <= MAX_TOKENS


def check(name: str) -> str:
    """Returns 'right', 'wrong' and the offsets, or the error of `initialize`."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    grid = model.patch_embed.grid_size
    num_tokens = math.prod(grid)
    # The module is the attention layer or, in some models, the block.
    module = next(module for module in model.modules() if hasattr(module, "num_heads"))
    given = dict(num_heads=module.num_heads)
    if getattr(model, "rope", None) is not None:
        given["rotations"] = model.rope.get_embed(shape=grid)
    try:
        params = initialize(model.state_dict(), impulse(), jax.random.key(0), **given)
    except InputError as error:
        return textwrap.shorten(f"refused: {error}", 120, placeholder=" …")
    model.load_state_dict(params)
    hits.SIZE = model.patch_embed.img_size[0]
    found = []
    for maps in torch_maps(model, hits.photographs()):
        maps = maps[..., -num_tokens:, -num_tokens:].mean(axis=0)
        found += map(tuple, strongest_offsets(maps, grid).tolist())
    first = found[: len(OFFSETS)]
    return "right" if set(first) == OFFSETS else f"wrong: {first}"


def main() -> None:
    """Checks all models and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="timm_models.md", help="Markdown file")
    out = parser.parse_args().out
    results = {}
    for name in filter(is_small, timm.list_models(FAMILIES)):
        results[name] = check(name)
        print(f"{name}: {results[name]}", flush=True)
    right = [name for name, result in results.items() if result == "right"]
    lines = [
        f"After `impulse`, the maps of {len(right)} of {len(results)} models of timm "
        f"{timm.__version__} are right (`benchmarks/timm_models.py`).",
        "",
        *(f"- `{name}`: {result}" for name, result in results.items() if result != "right"),
        "",
        f"Right: {', '.join(right)}.",
    ]
    with open(out, "w") as file:
        file.write("\n".join(lines) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
