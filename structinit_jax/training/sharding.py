"""The device mesh, the placement of arrays on it, and fully sharded data parallelism (FSDP).

With FSDP the weights and the optimizer state are sharded over a group of devices. A step gathers
the weights of one block of a stack at a time, and all others at its start.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.errors import InputError

FSDP_AXIS = "fsdp"  # axis of the mesh over which weights are sharded
# Smaller arrays (norms, biases, the class token) are not worth an all-gather.
MIN_SIZE_TO_SHARD = 2**14


# -- mesh ------------------------------------------------------------------------------------------


def make_mesh(fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arranges devices on two axes, 'data' and 'fsdp'. Devices along 'fsdp' are neighbors.

    Batches are sharded over both axes, the training state over 'fsdp' only, so that `fsdp` devices
    share one copy of it. By default, all devices of all processes are used. Raises `InputError` if
    `fsdp` does not divide their number.
    """
    # Sorted, so that the devices of a process hold one contiguous part of every batch.
    devices = sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))
    if len(devices) % fsdp:
        raise InputError(
            f"fsdp={fsdp} does not divide the {len(devices)} devices: choose a number that does, "
            "or 1 to replicate the weights on every device"
        )
    grid = np.asarray(devices).reshape(-1, fsdp)
    return Mesh(grid, ("data", FSDP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Shards the leading axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """Places a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def describe(mesh: Mesh) -> str:
    """Formats a mesh, for example '8 × TPU v4 (2 hosts), each copy of the state on 4'."""
    devices = mesh.devices.flatten()
    num_hosts = len({device.process_index for device in devices})
    hosts = f" ({num_hosts} hosts)" if num_hosts > 1 else ""
    fsdp = mesh.shape[FSDP_AXIS]
    copies = f", each copy of the state on {fsdp}" if fsdp > 1 else ""
    return f"{len(devices)} × {devices[0].device_kind}{hosts}{copies}"


# -- placement of the state ------------------------------------------------------------------------


def shard(mesh: Mesh, abstract_state: Any, stacks: Sequence[str]) -> Any:
    """Adds a sharding to each `ShapeDtypeStruct` of a `TrainState` or a dict of some of its fields.

    Arrays are sharded over 'fsdp' by `_weight_spec`; an array of the model's `stacks` is sharded
    like that of one block. The model state is replicated.
    """

    def place(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "model_state" in names[:2]:  # the first name may be 'ema'
            sharding = replicated(mesh)
        else:
            layer_axes = 1 if is_stacked(path, stacks) else 0
            spec = _weight_spec(leaf.shape[layer_axes:], mesh)
            sharding = NamedSharding(mesh, PartitionSpec(*(None,) * layer_axes, *spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def is_stacked(path: jax.tree_util.KeyPath, stacks: Sequence[str]) -> bool:
    """Whether an array of a training state has a layer axis, given `Model.stacks`.

    An array has none if a number follows the stack in its path: it belongs to a list of layers
    (`optimizer.by_layer`).
    """
    name = "/" + jax.tree_util.keystr(path, simple=True, separator="/")
    return any(re.search(rf"/{re.escape(stack)}/(?!\d)", name) for stack in stacks)


def _weight_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the spec that shards an array along its longest axis that `fsdp` divides.

    Small arrays, and those without such an axis, are replicated.
    """
    parts = mesh.shape[FSDP_AXIS]
    axes = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if parts == 1 or not axes or math.prod(shape) < MIN_SIZE_TO_SHARD:
        return PartitionSpec()
    longest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*(None,) * longest, FSDP_AXIS)


# -- weights in a step -----------------------------------------------------------------------------


def gather_by_block(model: nnx.Module, mesh: Mesh) -> None:
    """Makes the stacks of a model gather the sharded weights of a block when they run it.

    The weights of the other blocks stay sharded.
    """
    if mesh.shape[FSDP_AXIS] == 1:
        return
    for _, module in nnx.iter_modules(model):
        if hasattr(module, "is_stack"):
            module.block_hook = functools.partial(_gather_block, mesh)


def _gather_block(mesh, block):
    def gather(weight):
        # Pin to the sharded layout first; otherwise XLA keeps the full copy for the gradient.
        spec = _weight_spec(weight.shape, mesh)
        weight = jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, spec))
        return jax.lax.with_sharding_constraint(weight, replicated(mesh))

    return jax.tree.map(gather, block)


def gather_outside_stacks(
    params: dict[str, Any], mesh: Mesh, stacks: Sequence[str]
) -> dict[str, Any]:
    """Returns parameters of which those outside the model's `stacks` are whole on every device.

    Without this, XLA would shard activations along the channels like the weights.
    """

    def gather(path, leaf):
        if is_stacked(path, stacks):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, replicated(mesh))

    return jax.tree_util.tree_map_with_path(gather, params)
