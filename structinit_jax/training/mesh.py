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
    """Such as '8 × TPU v4 (2 hosts)'."""
    devices = mesh.devices.flatten()
    hosts = f" ({jax.process_count()} hosts)" if jax.process_count() > 1 else ""
    return f"{len(devices)} × {devices[0].device_kind}{hosts}"
