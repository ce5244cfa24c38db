"""Schemes for the filters of depthwise convolutions (`ConvSite`), as in ConvMixer.

The 2024 paper keeps such filters fixed at their initial values (section 5.5, table 4). It calls box
filters "all ones" and gives no scale for the others; here the largest value of every filter is 1,
except for random ones. The BatchNorm after the filters makes the scale irrelevant.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from structinit_jax.attention_init.kernels import assign, kernel_offsets
from structinit_jax.attention_init.registry import register
from structinit_jax.attention_init.sites import ConvSite, ConvWeights
from structinit_jax.errors import InputError

FILTERS = ("impulse", "gaussian", "box")


@register("default", ConvSite)
@register("kaiming_uniform", ConvSite)
def random_filters(rng: PRNGKeyArray, site: ConvSite) -> ConvWeights:
    """Uniform between ±1/f, PyTorch's default for a filter that sees one channel."""
    shape = (site.num_layers, site.kernel_size, site.kernel_size, site.width)
    bound = 1 / site.kernel_size
    return ConvWeights(jax.random.uniform(rng, shape, minval=-bound, maxval=bound))


@register("impulse", ConvSite)
def impulse(
    rng: PRNGKeyArray,
    site: ConvSite,
    *,
    filters: str | np.ndarray = "impulse",
    sigma: float = 0.7,
    offsets: str = "even",
    same_layers: bool = False,
) -> ConvWeights:
    """Gives each channel a filter centered at one of the f² places of the kernel.

    For the options see `tokens.impulse`.
    """
    bank = _filter_bank(filters, site.kernel_size, sigma)
    if offsets == "center_first" and site.kernel_size % 2 == 0:
        raise InputError(
            f"offsets='center_first': the kernel of a ConvSite with kernel_size={site.kernel_size} "
            "is even and has no center: use 'even' or 'random'"
        )
    shape = (site.num_layers, site.width)
    filter_index = assign(rng, shape, len(bank), order=offsets, same_layers=same_layers)
    return ConvWeights(jnp.moveaxis(jnp.asarray(bank)[filter_index], 1, -1))


@register("impulse_2024", ConvSite)
def impulse_2024(rng: PRNGKeyArray, site: ConvSite) -> ConvWeights:
    """The impulses of the 2024 paper's table 4, each channel's place drawn independently."""
    return impulse(rng, site, offsets="random")


def _filter_bank(filters, size, sigma):
    if not isinstance(filters, str):
        bank = np.asarray(filters, np.float32)
        if bank.shape[1:] != (size, size):
            raise InputError(
                f"filters has shape {bank.shape}: a ConvSite with kernel_size={size} needs kernels "
                f"[F, {size}, {size}]"
            )
        return bank
    if filters not in FILTERS:
        raise InputError(f"filters={filters!r}: a ConvSite takes {', '.join(FILTERS)}")
    if filters == "box":
        return np.ones((1, size, size), np.float32)
    bank = np.eye(size**2, dtype=np.float32)
    if filters == "gaussian":
        places = kernel_offsets(size)
        squared = np.sum((places[:, None] - places) ** 2, axis=-1)
        bank = np.exp(-squared / (2 * sigma**2)).astype(np.float32)
    return bank.reshape(-1, size, size)
