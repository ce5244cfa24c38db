"""The device mesh and how arrays lie on it."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.errors import InputError
from structinit_jax.training.state import TrainState

# Smaller arrays are not worth a gather: norms, biases, class token.
MIN_SHARDED_SIZE = 2**14


def make_mesh(fsdp: int = 1) -> Mesh:
    """Every device of every process, on two axes, 'data' and 'fsdp'.

    Batches are split over both axes. The state is split over 'fsdp' and repeated over 'data'; the
    devices along 'fsdp' are neighbours.

    Args:
      fsdp: devices that share one copy of the state.

    Raises:
      InputError: if it does not divide the number of devices.
    """
    # The devices of a process in a row: it holds one stretch of every batch.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(devices) % fsdp:
        raise InputError(
            f"config.fsdp={fsdp} does not divide the {len(devices)} devices: choose a number that "
            "does, or 1 for a whole copy of the weights on each"
        )
    grid = np.asarray(devices).reshape(-1, fsdp)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shard_state(mesh: Mesh, abstract_state: TrainState) -> TrainState:
    """Adds to each array's shape and type how it lies on the mesh: one rule for all.

    Parameters, optimizer and averages are split over 'fsdp' along their longest axis that divides;
    arrays of fewer than `MIN_SHARDED_SIZE` elements are whole on every device, and so is the model
    state, averaged or not.
    """
    whole, fsdp = replicated(mesh), mesh.shape["fsdp"]

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        axes = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
        if fsdp == 1 or not axes or np.prod(shape) < MIN_SHARDED_SIZE:
            return whole
        longest = max(axes, key=lambda axis: shape[axis])
        return NamedSharding(mesh, PartitionSpec(*(None,) * longest, "fsdp"))

    def place(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        lies = whole if "model_state" in names[:2] else sharding(leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies)

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def check_batch_size(batch_size: int, num_devices: int, accumulate_steps: int) -> None:
    """Raises `InputError` unless devices and parts can share a batch evenly."""
    shares = num_devices * accumulate_steps
    if batch_size % shares:
        lower = batch_size // shares * shares
        parts = f", in config.accumulate_steps={accumulate_steps}" if accumulate_steps > 1 else ""
        raise InputError(
            f"config.batch_size={batch_size} is the global batch and must be divisible by the "
            f"{num_devices} devices{parts}: for example {lower or shares} or {lower + shares}"
        )


def describe(mesh: Mesh) -> str:
    """Such as '8 × TPU v4 (2 hosts), each copy of the state on 4'."""
    devices = mesh.devices.flatten()
    hosts = f" ({jax.process_count()} hosts)" if jax.process_count() > 1 else ""
    fsdp = mesh.shape["fsdp"]
    copies = f", each copy of the state on {fsdp}" if fsdp > 1 else ""
    return f"{len(devices)} × {devices[0].device_kind}{hosts}{copies}"
