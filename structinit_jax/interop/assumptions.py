"""Refuses models whose parameters contradict what schemes assume."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init.sites import is_at_hand
from structinit_jax.errors import InputError
from structinit_jax.interop.blocks import find_blocks
from structinit_jax.interop.host import Host

BIAS = (
    "adds a bias to the logits instead of positions to the tokens: no scheme for positions sets "
    "such maps"
)
# Parts of an attention layer beside its four projections, and what they do to a scheme's maps.
PARTS = {
    r"(q|k|query|key)_?(norm|ln|layer_?norm)|(norm|ln)_?(q|k|query|key)\b": (
        "normalizes queries or keys, so no scheme can set their attention maps: build the model "
        "without it"
    ),
    r"rel_pos|relative|attention_bias": BIAS,
    r"temperature|tau\b": (
        "rescales the logits of cosine or channel attention, whose maps no scheme sets"
    ),
    r"proj_l|proj_w|talking": "mixes the maps of the heads, so none is what a scheme makes it",
    r"norm|ln\b": (
        "normalizes what the output projection gets, so value and projection are not what a scheme "
        "makes them: build the model without it"
    ),
    r"": "is a part of the attention that schemes do not know: its maps would be others",
}
RELATIVE = r"(?:.*[._])?(?:rel_pos|relative_pos|relative_att|position_bias|attention_bias)"
WORDS = (
    r"(?:.*[._])?(?:tok(?:en)?_?emb\w*|word_?emb\w*|embed_?tokens|Embed_\d+)\.(?:weight|embedding)"
)
ROTARY = r"(?:.*[._])?(?:rope|rotary|freqs)"


def require_assumptions(host: Host, own: Sequence[str] = ()) -> None:
    """Raises `InputError` if the parameters show that a scheme's maps would not be the model's.

    Args:
      host: The model.
      own: Names of parameters beside the projections that the scheme sets or knows.
    """
    _require_images(host)
    own = {entry.name for entry in host.entries} | set(own)
    for attention in host.stack.attentions:
        for name in _floating(host, re.escape(attention) + r"\." if attention else ""):
            if name not in own:
                part = name.removeprefix(attention)
                reason = next(why for what, why in PARTS.items() if re.search(what, part))
                raise InputError(f"params: {name} {reason}")
    for name in set(_floating(host, re.escape(host.stack.stem) + RELATIVE)) - own:
        raise InputError(f"params: {name} {BIAS}")
    _require_fresh_norms(host)


def _require_images(host: Host) -> None:
    patches = host.patch_kernels()
    for name in patches:
        if host.leaves[name].ndim == 5:
            raise InputError(
                f"params: {name} has shape {host.leaves[name].shape}, a patch embedding of videos: "
                "schemes set the maps of the tokens of one image; use a model of images"
            )
    for name in _floating(host, re.escape(host.stack.stem) + WORDS + "$"):
        if not patches and host.leaves[name].shape[1:] == (host.width,):
            raise InputError(
                f"params: {name} embeds words, and there is no patch embedding: this looks like a "
                "text model, whose tokens have no grid; pass the parameters of the image model"
            )


def _require_fresh_norms(host: Host) -> None:
    for block in find_blocks(host):
        for module in block.norms:
            for leaf, start in (("weight", 1), ("scale", 1), ("bias", 0)):
                name = f"{module}.{leaf}"
                if name in host.leaves and _differs(host.leaves[name], start):
                    raise InputError(
                        f"params: {name} is not {start}: schemes need a freshly built model, whose "
                        "norms before attention and MLP start with scale 1 and bias 0"
                    )


def rotary_positions(host: Host) -> str | None:
    """Returns the name of a parameter of rotary positions, or None if no name shows them."""
    return next(_floating(host, re.escape(host.stack.stem) + ROTARY), None)


def _floating(host: Host, start: str) -> Iterator[str]:
    """Yields the names of floating-point arrays that start with a pattern."""
    pattern = re.compile(start)
    for name, leaf in host.leaves.items():
        if pattern.match(name) and jnp.issubdtype(getattr(leaf, "dtype", np.int8), np.floating):
            yield name


def _differs(array: Any, value: int) -> bool:
    """Whether an array has another value; False for one whose values are not at hand."""
    return is_at_hand(array) and bool(np.any(np.asarray(array) != value))
