"""Convolution kernels and the attention maps that act like them."""

import numpy as np
from jaxtyping import Float, Int

from structinit_jax.errors import InputError


def check_kernel_size(kernel_size: int, grid: tuple[int, int] | None = None) -> None:
    """Raises `InputError` unless the kernel size is odd, positive and fits the grid."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise InputError(
            f"attention_init.kernel_size={kernel_size}: an attention map has a centre, so the "
            "kernel size must be odd and positive, such as 3 or 5"
        )
    if grid is not None and kernel_size > min(grid):
        raise InputError(
            f"attention_init.kernel_size={kernel_size} is larger than the token grid "
            f"{grid[0]}x{grid[1]}: use a smaller kernel or a smaller model.patch_size"
        )


def kernel_offsets(kernel_size: int) -> Int[np.ndarray, "F 2"]:
    """All offsets (dy, dx) of a kernel, row-major: (-1, -1), (-1, 0), … for size 3."""
    reach = np.arange(kernel_size) - kernel_size // 2
    return np.stack(np.meshgrid(reach, reach, indexing="ij"), axis=-1).reshape(-1, 2)


def impulse_kernels(kernel_size: int) -> Float[np.ndarray, "F f f"]:
    """The f² impulse kernels: kernel k is 1 at the k-th of `kernel_offsets`, else 0."""
    f = kernel_size
    return np.eye(f * f, dtype=np.float32).reshape(f * f, f, f)


def convolution_maps(
    kernels: Float[np.ndarray, "F f f"], grid: tuple[int, int]
) -> Float[np.ndarray, "F N N"]:
    """Target maps H: H[i, j] is the kernel's value at the offset from token i to token j.

    Neighbours that fall off the grid are left out (zero padding): the row of an impulse whose
    neighbour is missing is all zero, and its best softmax row is uniform.
    """
    reach = kernels.shape[-1] // 2
    tokens = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), axis=-1).reshape(-1, 2)
    offset = tokens[None, :] - tokens[:, None]
    inside = np.all(np.abs(offset) <= reach, axis=-1)
    dy, dx = np.moveaxis(np.clip(offset + reach, 0, 2 * reach), -1, 0)
    return np.where(inside, kernels[:, dy, dx], 0).astype(np.float32)
