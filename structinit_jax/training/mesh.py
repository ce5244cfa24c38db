"""The device mesh and the placement of arrays on it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.errors import InputError
from structinit_jax.models.model import FSDP_AXIS, is_stacked, weight_spec


def make_mesh(fsdp: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """Arranges devices on two axes, 'data' and 'fsdp'. Devices along 'fsdp' are neighbors.

    Batches are sharded over both axes, the training state over 'fsdp' only, so that `fsdp` devices
    share one copy of it. By default, all devices of all processes are used. Raises `InputError` if
    `fsdp` does not divide their number.
    """
    # Sorted, so that the devices of a process hold one contiguous part of every batch.
    devices = sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))
    if len(devices) % fsdp:
        raise InputError(
            f"config.fsdp={fsdp} does not divide the {len(devices)} devices: choose a number that "
            "does, or 1 to replicate the weights on every device"
        )
    grid = np.asarray(devices).reshape(-1, fsdp)
    return Mesh(grid, ("data", FSDP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Shards the leading axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """Places a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shard(mesh: Mesh, abstract_state: Any, stacks: Sequence[str]) -> Any:
    """Adds a sharding to each `ShapeDtypeStruct` of a `TrainState` or a dict of some of its fields.

    Arrays are sharded over 'fsdp' by `models.model.weight_spec`; an array of the model's `stacks`
    is sharded like that of one block. The model state is replicated.
    """

    def place(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "model_state" in names[:2]:  # the first name may be 'ema'
            sharding = replicated(mesh)
        else:
            layer_axes = 1 if is_stacked(path, stacks) else 0
            spec = weight_spec(leaf.shape[layer_axes:], mesh.shape[FSDP_AXIS])
            sharding = NamedSharding(mesh, PartitionSpec(*(None,) * layer_axes, *spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def describe(mesh: Mesh) -> str:
    """Formats a mesh, for example '8 × TPU v4 (2 hosts), each copy of the state on 4'."""
    devices = mesh.devices.flatten()
    num_hosts = len({device.process_index for device in devices})
    hosts = f" ({num_hosts} hosts)" if num_hosts > 1 else ""
    fsdp = mesh.shape[FSDP_AXIS]
    copies = f", each copy of the state on {fsdp}" if fsdp > 1 else ""
    return f"{len(devices)} × {devices[0].device_kind}{hosts}{copies}"
