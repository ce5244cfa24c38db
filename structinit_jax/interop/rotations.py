"""The rotary positions (RoPE) of another project's model, as its own code computes them."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from structinit_jax.attention_init import RotarySite
from structinit_jax.errors import InputError
from structinit_jax.interop.entries import check_array
from structinit_jax.interop.host import Grid, Host, square

HOW = (
    "rotations=model.rope.get_embed(shape=model.patch_embed.grid_size).detach().numpy() for timm, "
    "rotations=tuple(x.numpy() for x in model.rope_embeddings(pixel_values)) for Hugging Face"
)


class Rotations(NamedTuple):
    """Rotations of queries and keys; `angles` and `pairs` as in `RotarySite`."""

    grid: Grid
    angles: Float[np.ndarray, "L h N p"]
    pairs: str

    def apply(self, x: Float[np.ndarray, "B T h d"], layer: int) -> Float[np.ndarray, "B T h d"]:
        """Rotates the queries or keys of a layer; the tokens before the last N keep theirs."""
        angles = np.moveaxis(self.angles[min(layer, len(self.angles) - 1)], 0, 1)
        prefix, tokens = np.split(x, [x.shape[1] - angles.shape[0]], axis=1)
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = split_pairs(tokens, self.pairs)
        turned = np.stack([a * cos - b * sin, b * cos + a * sin], axis=_pair_axis(self.pairs))
        return np.concatenate([prefix, turned.reshape(tokens.shape)], axis=1)


def split_pairs(x: np.ndarray, pairs: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and the second channels of the pairs along the last axis."""
    if pairs == "halves":
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x[..., ::2], x[..., 1::2]


def _pair_axis(pairs):
    return -2 if pairs == "halves" else -1


def read_rotations(host: Host, given: Any, grid: Grid | None) -> Rotations:
    """Reads `rotations` of `initialize`.

    Raises:
      InputError: They do not fit the model, or the model adds positions to its tokens too.
    """
    table = host.position_table(grid)
    if table is not None:
        raise InputError(
            f"rotations: the model adds the positions {table.name} to its tokens too, which "
            "schemes then use: leave out rotations, and measure the maps"
        )
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    for part in parts:
        check_array("rotations", "the table", part)
    shapes, d, is_pair = [part.shape for part in parts], host.head_dim, len(parts) == 2
    shape = shapes[0] if shapes else ()
    lead = (1,) * (4 - len(shape)) + shape[:-2]
    heads = (host.num_layers, host.num_heads)
    fits = len(lead) == 2 and all(n in (1, m) for n, m in zip(lead, heads, strict=True))
    equal = len(set(shapes)) == 1 and len(shapes) <= 2
    if not fits or not equal or shape[-1] != (d if is_pair else 2 * d):
        raise InputError(
            f"rotations has shape {' and '.join(map(str, shapes))}, but the model needs sines and "
            f"cosines [N, {2 * d}], or with leading axes for {host.num_layers} layers and "
            f"{host.num_heads} heads, or a pair (cosines, sines) of [N, {d}]: pass {HOW}"
        )
    parts = [np.asarray(part, np.float64) for part in parts]
    cos, sin = parts if is_pair else (parts[0][..., d:], parts[0][..., :d])
    for pairs in ("interleaved", "halves"):
        if all(np.array_equal(*split_pairs(part, pairs)) for part in (sin, cos)):
            break
    else:
        raise InputError(
            "rotations: neither neighboring channels nor the two halves of a head have equal "
            f"sines: pass {HOW}"
        )
    tokens = sin.shape[-2]
    grid = grid or square(tokens)
    if grid is None or math.prod(grid) != tokens:
        raise InputError(
            f"grid: rotations have {tokens} tokens: pass grid=(rows, cols) of the image tokens, "
            "and no rotations of class and register tokens"
        )
    angles = np.arctan2(split_pairs(sin, pairs)[0], split_pairs(cos, pairs)[0])
    return Rotations(grid, angles.reshape(*lead, *angles.shape[-2:]).astype(np.float32), pairs)


def rotary_site(host: Host, rotations: Rotations) -> RotarySite:
    """Describes attention layers with rotary positions for a scheme."""
    return RotarySite(
        grid=rotations.grid,
        **host.sizes(),
        angles=rotations.angles,
        pairs=rotations.pairs,
    )
