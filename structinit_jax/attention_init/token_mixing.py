"""Schemes for layers that mix tokens without attention: MLPs and depthwise convolutions.

The 2025 paper has results for MLP-Mixer, but does not say how its token-mixing MLPs are
initialized; `impulse` and `mimetic` for them (`TokenMixingSite`) are our own. Neither has been
ahead of the model's own initialization, which is the default, by more than noise (docs/results.md),
probably because all channels share the token mixing, and equal shifts of all tokens do not tell
positions apart.

Token mixing computes y = A gelu(B u), biases aside, for the N values u of each channel. Since
gelu(z) - gelu(-z) = z, B = [B'; -B'] and A = [A', -A'] give y = A' B' u exactly. Every linear map
M = A' B' of the tokens thus fits into twice as many hidden units as its rank. The two units of a
pair have different gradients, so training makes them nonlinear from the first step. A layer has one
filter: the block returns x + M norm(x).

With k < N pairs, the map is U Uᵀ M, where U [N, k] holds the first k principal components of M
applied to tokens whose correlation falls with distance: the lowest spatial frequencies of the
output. On a 14×14 grid, 128 pairs keep 97 % of the output for shifts of photographs; a truncated
SVD of M keeps only 72 % because the singular values of a shift are all equal. A random rotation R
of the pairs, A' = U Rᵀ and B' = R Uᵀ M with Rᵀ R = I, keeps the map and makes layers differ.

The 2024 paper keeps the filters of depthwise convolutions (`ConvSite`), as in ConvMixer, fixed at
their initial values (section 5.5, table 4). GELU comes between the convolution and BatchNorm, so
the scale of the filters matters: it determines how nonlinear a layer is. The filters of
`impulse_2024` have the program's scale, a squared norm of 1/f. The scale in `impulse` is our own:
impulses have the value 1, and custom filters keep their scale.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from structinit_jax.attention_init import draws
from structinit_jax.attention_init.sites import (
    ConvSite,
    ConvWeights,
    TokenMixingSite,
    TokenMixingWeights,
)
from structinit_jax.attention_init.targets import FilterArray, assign, impulse_filters, target_maps
from structinit_jax.errors import require
from structinit_jax.rngs import draw_flat

CORRELATION = 0.9  # The exact value hardly matters.


def mlp_mimetic(rng: PRNGKeyArray, site: TokenMixingSite) -> TokenMixingWeights:
    """Uses mimetic attention's logits, 0.7 U + 0.7 I with uniform noise U, as the map itself."""
    noise_rng, rotation_rng = jax.random.split(rng)
    shape = (site.num_layers, site.num_tokens)
    maps = draws.near_identity(noise_rng, shape, noise=0.7, identity=0.7)
    # All layers share the basis of the identity, because their maps are close to the identity.
    basis = output_basis(np.eye(site.num_tokens)[None], site)
    return TokenMixingWeights(*_factor_maps(rotation_rng, maps, jnp.asarray(basis), site.hidden))


def mlp_impulse(
    rng: PRNGKeyArray,
    site: TokenMixingSite,
    *,
    kernel_size: int,
    filters: FilterArray | None,
    dilation: int,
) -> TokenMixingWeights:
    """Gives each layer one filter, exactly or at the rank that its hidden units allow."""
    targets = target_maps(site.grid, kernel_size, filters, dilation)
    bases = output_basis(targets, site)
    order_rng, rotation_rng = jax.random.split(rng)
    index = assign(order_rng, (site.num_layers, 1), len(targets))[:, 0]
    maps = jnp.asarray(targets)[index]
    bases = jnp.asarray(bases)[index]
    return TokenMixingWeights(*_factor_maps(rotation_rng, maps, bases, site.hidden))


def output_basis(
    maps: Float[np.ndarray, "F N N"], site: TokenMixingSite
) -> Float[np.ndarray, "F N k"]:
    """Returns an orthonormal U for each map M so that U Uᵀ M fits into the hidden units.

    Its columns are the first k = min(N, hidden // 2) principal components of M u over tokens u
    whose correlation is `CORRELATION` to the power of their distance, rows plus columns.
    """
    count = min(site.num_tokens, site.hidden // 2)
    if count == site.num_tokens:
        return np.broadcast_to(np.eye(count, dtype=np.float32), (len(maps), count, count))
    y, x = np.divmod(np.arange(site.num_tokens), site.grid[1])
    distance = np.abs(y[:, None] - y) + np.abs(x[:, None] - x)
    covariance = maps.astype(np.float64) @ CORRELATION**distance @ maps.swapaxes(1, 2)
    return np.linalg.eigh(covariance)[1][..., ::-1][..., :count].astype(np.float32)


@functools.partial(jax.jit, static_argnames="hidden")
def _factor_maps(rng, maps, bases, hidden):
    """Returns fc1 and fc2 that map u to U Uᵀ M u; M [L, N, N], U [#L, N, k]."""
    layers = len(maps)
    rank = bases.shape[-1]
    rotations = draws.random_rotations(rng, (layers, hidden // 2, rank))
    bases = jnp.broadcast_to(bases, (layers, *bases.shape[1:]))
    second = jnp.einsum("Lmk,Lpk->Lpm", bases, rotations)
    first = jnp.einsum("Lpm,Lmn->Lnp", second, maps)
    odd = hidden % 2  # an unpaired unit copies the first pair's input weights and outputs nothing
    return (
        jnp.concatenate([first, -first, first[:, :, :odd]], axis=2),
        jnp.concatenate([second, -second, jnp.zeros_like(second[:, :odd])], axis=1),
    )


# -- depthwise convolutions ------------------------------------------------------------------------


def conv_default(rng: PRNGKeyArray, site: ConvSite) -> ConvWeights:
    """Draws uniformly between ±1/f, PyTorch's default for a filter that sees one channel."""
    shape = (site.num_layers, site.kernel_size, site.kernel_size, site.width)
    return ConvWeights(draws.uniform(rng, shape, bound=1 / site.kernel_size))


def conv_impulse(rng: PRNGKeyArray, site: ConvSite, *, filters: FilterArray | None) -> ConvWeights:
    """Gives each channel an impulse at one of the f² places of the kernel, or one of `filters`."""
    size = site.kernel_size
    bank = impulse_filters(size, size) if filters is None else np.asarray(filters, np.float32)
    needs = f"of shape [F, {size}, {size}] for this ConvSite"
    require("filters", filters, needs, bank.shape[1:] == (size, size))
    filter_index = assign(rng, (site.num_layers, site.width), len(bank))
    return ConvWeights(jnp.moveaxis(jnp.asarray(bank)[filter_index], 1, -1))


def conv_impulse_2024(rng: PRNGKeyArray, site: ConvSite, *, taps: int) -> ConvWeights:
    """Draws the filters of the 2024 program: `taps` equal entries at random places per channel."""
    size = site.kernel_size
    require("taps", taps, f"at most {size**2} for this ConvSite", taps <= size**2)
    filter_rng, _ = jax.random.split(rng)  # `rng` itself would change the filters of a seed
    shape = (site.num_layers, site.width, size**2)
    uniform = draw_flat(jax.random.uniform, filter_rng, shape)
    chosen = jnp.argsort(uniform, axis=-1) < taps
    filters = (taps * size) ** -0.5 * chosen.astype(jnp.float32)
    return ConvWeights(jnp.moveaxis(filters, 1, -1).reshape(-1, size, size, site.width))
