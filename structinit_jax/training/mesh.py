"""The device mesh and how arrays lie on it."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax.errors import InputError


def make_mesh() -> Mesh:
    """One axis, 'data', over every device of every process."""
    devices = np.asarray(jax.devices())
    return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch_size(batch_size: int, num_devices: int) -> None:
    """Raises `InputError` unless the devices can share a batch evenly."""
    if batch_size % num_devices:
        lower = batch_size // num_devices * num_devices
        raise InputError(
            f"config.batch_size={batch_size} is the global batch and must be divisible by the "
            f"{num_devices} devices: for example {lower or num_devices} or {lower + num_devices}"
        )


def describe(mesh: Mesh) -> str:
    """Such as '8 × TPU v4 (2 hosts)'."""
    devices = mesh.devices.flatten()
    hosts = f" ({jax.process_count()} hosts)" if jax.process_count() > 1 else ""
    return f"{len(devices)} × {devices[0].device_kind}{hosts}"
