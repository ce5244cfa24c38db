"""The device mesh, the placement of arrays on it, and fully sharded data parallelism (FSDP).

With FSDP, the weights and the optimizer state are sharded over a group of devices. A step gathers
the weights of stacks one block at a time, and all other weights at its start.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.errors import require
from structinit_jax.models.model import Model

FSDP_AXIS = "fsdp"  # axis of the mesh over which weights are sharded
# Smaller arrays (norms, biases, the class token) are not worth an all-gather.
MIN_SIZE_TO_SHARD = 2**14


# -- mesh ------------------------------------------------------------------------------------------


def make_mesh(fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arranges devices on two axes, 'data' and 'fsdp'. Devices along 'fsdp' are neighbors.

    Batches are sharded over both axes, the training state over 'fsdp' only, so that `fsdp` devices
    share one copy of it. By default, all devices of all processes are used.
    """
    # Sorted so that each process's devices hold one contiguous part of every batch.
    devices = sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))
    needs = f"a divisor of {len(devices)}, the number of devices; 1 replicates the weights"
    require("fsdp", fsdp, needs, len(devices) % fsdp == 0)
    grid = np.asarray(devices).reshape(-1, fsdp)
    return Mesh(grid, ("data", FSDP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Shards the leading axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """Places a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def describe(mesh: Mesh) -> str:
    """Formats a mesh, for example '8 × TPU v4 (2 processes), each copy of the state on 4'."""
    devices = mesh.devices.flatten()
    num_processes = len({device.process_index for device in devices})
    processes = f" ({num_processes} processes)" if num_processes > 1 else ""
    fsdp = mesh.shape[FSDP_AXIS]
    copies = f", each copy of the state on {fsdp}" if fsdp > 1 else ""
    return f"{len(devices)} × {devices[0].device_kind}{processes}{copies}"


# -- placement of the state ------------------------------------------------------------------------


def shard_params(params: Any, mesh: Mesh, stacks: Sequence[str]) -> Any:
    """Adds a sharding over 'fsdp' to each `ShapeDtypeStruct` of a model's parameters.

    Arrays in the model's `stacks` have a leading layer axis and are sharded like those of a single
    block.
    """

    def place(path, leaf):
        layer_axes = 1 if _is_in_stack(path, stacks) else 0
        spec = _weight_spec(leaf.shape[layer_axes:], mesh)
        spec = PartitionSpec(*(None,) * layer_axes, *spec)
        return leaf.update(sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, params)


def shard_opt_state(opt_state: Any, mesh: Mesh, params: Any, stacks: Sequence[str]) -> Any:
    """Adds a sharding over 'fsdp' to each `ShapeDtypeStruct` of an optimizer's state.

    Parts with the same structure as the parameters, such as the moments of AdamW, are sharded like
    the parameters. Other optimizers see stacks as lists of layers (`optimizer.by_layer`), so none
    of their arrays has a layer axis.
    """
    structure = jax.tree.structure(params)

    def is_like_params(tree):
        return jax.tree.structure(tree) == structure

    def place(tree):
        return shard_params(tree, mesh, stacks if is_like_params(tree) else ())

    return jax.tree.map(place, opt_state, is_leaf=is_like_params)


def _is_in_stack(path, stacks):
    """Whether the path of a parameter is inside one of the model's stacks."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.startswith(tuple(f"{stack}/" for stack in stacks))


def _weight_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the spec that shards an array along its longest axis divisible by `fsdp`.

    Small arrays and arrays without such an axis are replicated.
    """
    parts = mesh.shape[FSDP_AXIS]
    axes = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if parts == 1 or not axes or math.prod(shape) < MIN_SIZE_TO_SHARD:
        return PartitionSpec()
    longest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*(None,) * longest, FSDP_AXIS)


# -- weights in a step -----------------------------------------------------------------------------


def place_stacks(model: Model, mesh: Mesh) -> None:
    """Prepares a model's stacks to run on the devices of a mesh; see `StackedBlock`.

    With FSDP, they gather the sharded weights of each block when it runs. The weights of the other
    blocks stay sharded.
    """
    spec = PartitionSpec(mesh.axis_names)
    on_shards = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    gather = functools.partial(jax.tree.map, functools.partial(_gather, mesh=mesh))
    for stack in model.stacks().values():
        if mesh.size > 1:
            stack.on_shards = on_shards
        if mesh.shape[FSDP_AXIS] > 1:
            stack.gather = gather


def _gather(weight, mesh):
    """Gathers a weight on every device, and shards the gradient of a sharded one like the weight.

    Without `custom_vjp`, every device would get the whole gradient first, twice as many bytes.
    """
    everywhere = functools.partial(jax.lax.with_sharding_constraint, shardings=replicated(mesh))
    spec = _weight_spec(weight.shape, mesh)
    if spec == PartitionSpec():
        return everywhere(weight)
    sharded = NamedSharding(mesh, spec)
    shard = functools.partial(jax.lax.with_sharding_constraint, shardings=sharded)

    @jax.custom_vjp
    def gather(weight):
        # Without the sharded constraint first, XLA would keep the full copy for the gradient.
        return everywhere(shard(weight))

    gather.defvjp(lambda weight: (gather(weight), None), lambda _, grad: (shard(grad),))
    return gather(weight)


def gather_outside_stacks(
    params: dict[str, Any], mesh: Mesh, stacks: Sequence[str]
) -> dict[str, Any]:
    """Gathers the parameters outside the model's `stacks` on every device.

    Without this, XLA would shard activations along the channels, like the weights.
    """

    def gather(path, leaf):
        return leaf if _is_in_stack(path, stacks) else _gather(leaf, mesh)

    return jax.tree_util.tree_map_with_path(gather, params)
