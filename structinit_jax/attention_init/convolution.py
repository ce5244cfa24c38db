"""Schemes for the filters of depthwise convolutions (`ConvSite`), as in ConvMixer.

The 2024 paper keeps such filters fixed at their initial values (section 5.5, table 4). GELU comes
between them and BatchNorm, so their scale matters: it decides how nonlinear a layer is. The filters
of `impulse_2024` have the program's scale, a squared norm of 1/f. `impulse` is our own: its
impulses have the value 1, and filters of your own keep their scale.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from structinit_jax.attention_init.sites import ConvSite, ConvWeights
from structinit_jax.attention_init.targets import FilterArray, assign, impulse_kernels
from structinit_jax.errors import InputError


def default(rng: PRNGKeyArray, site: ConvSite) -> ConvWeights:
    """Draws uniformly between ±1/f, PyTorch's default for a filter that sees one channel."""
    shape = (site.num_layers, site.kernel_size, site.kernel_size, site.width)
    bound = 1 / site.kernel_size
    return ConvWeights(jax.random.uniform(rng, shape, minval=-bound, maxval=bound))


def impulse(rng: PRNGKeyArray, site: ConvSite, *, filters: FilterArray | None) -> ConvWeights:
    """Gives each channel an impulse at one of the f² places of the kernel, or one of `filters`."""
    size = site.kernel_size
    bank = impulse_kernels(size) if filters is None else filters
    bank = np.asarray(bank, np.float32)
    if bank.shape[1:] != (size, size):
        raise InputError(
            f"filters has shape {bank.shape}: a ConvSite with kernel_size={size} needs kernels "
            f"[F, {size}, {size}]"
        )
    filter_index = assign(rng, (site.num_layers, site.width), len(bank))
    return ConvWeights(jnp.moveaxis(jnp.asarray(bank)[filter_index], 1, -1))


def impulse_2024(rng: PRNGKeyArray, site: ConvSite, *, taps: int) -> ConvWeights:
    """Draws the filters of the 2024 program: `taps` equal entries at random places, by channel."""
    size = site.kernel_size
    if taps > size**2:
        raise InputError(f"taps={taps} must be at most {size**2} for this ConvSite")
    filter_rng, _ = jax.random.split(rng)  # not `rng`, which would change the filters of a seed
    uniform = jax.random.uniform(filter_rng, (site.num_layers, site.width, size**2))
    filters = jnp.where(jnp.argsort(uniform, axis=-1) < taps, (taps * size) ** -0.5, 0.0)
    return ConvWeights(jnp.moveaxis(filters, 1, -1).reshape(-1, size, size, site.width))
