"""Finds what the blocks of another project's model hold beside attention, by name and shape."""

import re
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from structinit_jax.errors import InputError
from structinit_jax.interop.host import Host

_NORM = re.compile(r"norm|[._]ln", re.IGNORECASE)
_OUTPUT = re.compile(r"down|out|c_proj")
_NUMBERED = re.compile(r"(?P<stem>.*\D)(?P<number>\d+)[^.\d]*")


class Block(NamedTuple):
    """The modules beside an attention layer, in alphabetical order within each kind.

    Attributes:
      attention: Name of the attention layer.
      norms: Normalizations over the model's channels.
      mlp_in: Linear layers from the model's channels to those of an MLP.
      mlp_out: Linear layers from an MLP's channels to the model's.
      square: Linear layers from the model's channels to as many, of unknown purpose.
      scales: Names of factors of the model's channels (LayerScale).
      unknown: Names of all other arrays.
    """

    attention: str
    norms: list[str]
    mlp_in: list[str]
    mlp_out: list[str]
    square: list[str]
    scales: list[str]
    unknown: list[str]


def find_blocks(host: Host) -> list[Block]:
    """Sorts the modules of every block; of a single one if the layers are stacked."""
    return [_find_block(host, attention) for attention in host.stack.attentions]


def may_be_rms_norm(host: Host) -> bool:
    """Returns whether a norm has no bias: an RMSNorm, or a LayerNorm without bias."""
    return any(f"{n}.bias" not in host.leaves for b in find_blocks(host) for n in b.norms)


def mlp_outputs(host: Host) -> list[str]:
    """Returns the names of the kernels of the MLPs' output layers.

    Raises:
      InputError: A block does not have exactly one.
    """
    names = []
    for block in find_blocks(host):
        if block.square and not block.mlp_out:
            raise InputError(
                f"params: cannot tell which of {', '.join(block.square)}, if any, is the output "
                "layer of an MLP: build the scheme with mlp_scale=1 and multiply its kernel "
                "yourself"
            )
        if len(block.mlp_out) != 1:
            raise InputError(
                f"params: beside {block.attention or 'the attention layer'} there is "
                f"{', '.join(block.mlp_out) or 'nothing'} where the output layer of an MLP, from "
                f"hidden channels to {host.width}, is needed: build the scheme with mlp_scale=1 "
                "and multiply its kernel yourself"
            )
        names.append(f"{block.mlp_out[0]}.{host.stack.layout.leaf}")
    return names


def _find_block(host: Host, attention: str) -> Block:
    block = Block(attention, [], [], [], [], [], [])
    prefix = attention.rpartition(".")[0]
    leaf, lead = host.stack.layout.leaf, int(host.stack.stacked)
    shapes = {
        name: array.shape[lead:]
        for name, array in host.leaves.items()
        if prefix and name.startswith(f"{prefix}.") and not name.startswith(f"{attention}.")
        if jnp.issubdtype(getattr(array, "dtype", np.int8), np.floating)
    }
    for name, shape in sorted(shapes.items()):
        module = name.rpartition(".")[0]
        kernel = shapes.get(f"{module}.{leaf}", ())
        inputs, outputs = (
            kernel[:: -1 if host.stack.layout.torch else 1] if len(kernel) == 2 else (0, 0)
        )
        if inputs == outputs == host.width:
            kind, found = block.square, module
        elif host.width in (inputs, outputs):
            kind, found = (block.mlp_in if inputs == host.width else block.mlp_out), module
        elif shape != (host.width,):
            kind, found = block.unknown, name
        elif _NORM.search(module.removeprefix(prefix)):
            kind, found = block.norms, module
        else:
            kind, found = block.scales, name
        if found not in kind:
            kind.append(found)
    return _sort_square(block, prefix)


def _sort_square(block: Block, prefix: str) -> Block:
    """Tells apart, by name, the layers of an MLP that is as wide as the model."""
    if block.mlp_out or len(block.mlp_in + block.square) < 2:
        return block
    outputs = [module for module in block.square if _OUTPUT.search(module.removeprefix(prefix))]
    numbered = [_NUMBERED.fullmatch(module) for module in block.square]
    if not outputs and all(numbered) and len({match["stem"] for match in numbered}) == 1:
        last = max(int(match["number"]) for match in numbered)  # fc2 of fc1 and fc2
        outputs = [match[0] for match in numbered if int(match["number"]) == last]
    if len(outputs) != 1:
        return block
    inputs = [module for module in block.square if module not in outputs]
    return block._replace(mlp_in=sorted(block.mlp_in + inputs), mlp_out=outputs, square=[])
