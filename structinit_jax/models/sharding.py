"""Splits weights over devices and gathers them where they are used (FSDP)."""

import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXIS = "fsdp"  # of the mesh
# Smaller arrays (norms, biases, the class token) are not worth an all-gather.
MIN_SPLIT_SIZE = 2**14


def weight_spec(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    """Splits an array along its longest axis that is divisible by `parts`, unless it is small."""
    axes = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if parts == 1 or not axes or math.prod(shape) < MIN_SPLIT_SIZE:
        return PartitionSpec()
    longest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*(None,) * longest, AXIS)


def gather(block: Any) -> Any:
    """Returns one block of a stack with all of its weights on every device.

    If the weights are split, the training and evaluation steps set the mesh that this uses. Without
    a mesh, or on a mesh of yours, the block is returned as it is. Call it for one block at a time,
    so that the others stay split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(AXIS) is not AxisType.Auto:
        return block

    def gather_weight(weight):
        return _gather_weight(
            weight, NamedSharding(mesh, weight_spec(weight.shape, mesh.shape[AXIS]))
        )

    return jax.tree.map(gather_weight, block)


def _gather_split(weight, split):
    # Pinned first, since XLA would else keep the full copy for the gradient.
    weight = jax.lax.with_sharding_constraint(weight, split)
    return jax.lax.with_sharding_constraint(weight, NamedSharding(split.mesh, PartitionSpec()))


def _gather_weight_forward(weight, split):
    # Not `_gather_weight`, since second derivatives differentiate this function too.
    return _gather_split(weight, split), None


def _gather_weight_backward(split, _, gradient):
    # That of the constraints would sum the whole gradient on every device before it is split.
    return (jax.lax.with_sharding_constraint(gradient, split),)


_gather_weight = jax.custom_vjp(_gather_split, nondiff_argnums=(1,))
_gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)
