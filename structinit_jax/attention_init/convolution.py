"""Start values for the filters of depthwise convolutions, such as ConvMixer's.

The 2024 paper keeps such filters fixed at what they start with (section 5.5, table 4). It calls
box filters "all ones"; of the rest it says no scale. Here every filter but the random ones has 1
as its largest value: an impulse, and a Gaussian, which lies between impulse and box. The BatchNorm
behind a filter scales by itself.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from structinit_jax.attention_init.kernels import assign_filters
from structinit_jax.attention_init.sites import ConvSite, ConvWeights
from structinit_jax.errors import InputError

FILTERS = ("impulse", "gaussian", "box")


def random_filters(key: PRNGKeyArray, site: ConvSite) -> ConvWeights:
    """Uniform between ±1/f: PyTorch's default for a filter that sees one channel."""
    shape = (site.num_layers, site.kernel_size, site.kernel_size, site.width)
    bound = 1 / site.kernel_size
    return ConvWeights(jax.random.uniform(key, shape, minval=-bound, maxval=bound))


def placed_filters(
    key: PRNGKeyArray,
    site: ConvSite,
    *,
    kernel_size: int | Sequence[int],
    filters: str | np.ndarray = "impulse",
    sigma: float = 0.7,
    order: str = "random",
    same_layers: bool = False,
) -> ConvWeights:
    """One filter of a bank for each channel: at each of the kernel's f² places one filter.

    Args:
      key: deals the filters to the channels.
      site: f, even or odd, channels and layers.
      kernel_size: the scheme's. The places are those of the site's own kernel; a scheme that asks
        for a larger one is refused.
      filters: 'impulse'; 'gaussian', a bump of deviation `sigma` cut at the kernel's edge; 'box',
        all ones, one filter in all; or an array of kernels [F, f, f].
      sigma: deviation of Gaussians.
      order: how filters go to channels, see `kernels.assign_filters`.
      same_layers: whether all layers have equal filters.

    Raises:
      InputError: for what does not fit the site.
    """
    if np.max(kernel_size) > site.kernel_size:
        raise InputError(
            f"attention_init.kernel_size={kernel_size} is larger than model.kernel_size="
            f"{site.kernel_size}: filters spread over the model's own kernel, so leave it out"
        )
    bank = _bank(filters, site.kernel_size, sigma)
    if order == "centre_first" and site.kernel_size % 2 == 0:
        raise InputError(
            f"attention_init.offsets='centre_first': model.kernel_size={site.kernel_size} is even "
            "and has no centre: use 'even' or 'random'"
        )
    shape = (1 if same_layers else site.num_layers, site.width)
    chosen = assign_filters(key, shape, len(bank), order=order)
    chosen = jnp.broadcast_to(chosen, (site.num_layers, site.width))
    return ConvWeights(jnp.moveaxis(jnp.asarray(bank)[chosen], 1, -1))


def _bank(filters, kernel_size: int, sigma: float) -> Float[np.ndarray, "F f f"]:
    if not isinstance(filters, str):
        bank = np.asarray(filters, np.float32)
        if bank.shape[1:] != (kernel_size, kernel_size):
            raise InputError(
                f"attention_init.filters has shape {bank.shape}: model.kernel_size={kernel_size} "
                f"needs kernels [F, {kernel_size}, {kernel_size}]"
            )
        return bank
    if filters not in FILTERS:
        raise InputError(
            f"attention_init.filters={filters!r}: a convolution takes {', '.join(FILTERS)}"
        )
    if filters == "box":
        return np.ones((1, kernel_size, kernel_size), np.float32)
    bank = np.eye(kernel_size**2, dtype=np.float32)
    if filters == "gaussian":
        places = np.stack(np.divmod(np.arange(kernel_size**2), kernel_size), axis=-1)
        squared = np.sum((places[:, None] - places[None]) ** 2, axis=-1)
        bank = np.exp(-squared / (2 * sigma**2)).astype(np.float32)
    return bank.reshape(-1, kernel_size, kernel_size)
