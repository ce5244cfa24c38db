"""Schemes for token-mixing MLPs, such as MLP-Mixer's: a spatial filter through a hidden layer.

Token mixing computes y = A gelu(B u) for the N values u of each channel. GELU is z Φ(z), so that
gelu(z) - gelu(-z) = z: a pair of hidden units with opposite weights in both layers is linear. With
B = [B'; -B'] and A = [A', -A'], y = A' B' u exactly: every linear map M = A' B' of the tokens, and
so every convolution, fits into twice as many hidden units as its rank. The two units of a pair have
different gradients, gelu'(z) and gelu'(-z): training makes them nonlinear from the first step.

Mixing is shared by all channels, so a layer has one filter, where an attention layer has one for
each head; different offsets go to different layers. What is filtered is the block's normalized
input: the block puts out x + M norm(x).

Fewer units than that. A shift of the tokens has equal singular values, so that its truncated
singular value decomposition would keep an arbitrary part. But neighbouring tokens are alike, and
smooth patterns are most of what there is to mix. So with k pairs the map is U Uᵀ M, where U [N, k]
are the k first principal components of what M makes of tokens whose correlation falls with
distance (`CORRELATION` to the power of the distance in rows plus in columns): the lowest spatial
frequencies of the filter's output. In mean square over such tokens no map of rank k is closer. Of
the tokens of two photographs on a 14×14 grid, 128 pairs keep 97 % of what shifts put out, where a
plain singular value decomposition keeps 72 %.

Any rotation R of the pairs, with Rᵀ R = I, leaves the map as it is: A' = U Rᵀ, B' = R Uᵀ M. It is
random, so that layers and hidden units are independent, and no unit stands for one frequency.

The gain is 1: mixing adds a neighbour as strong as normalized tokens are, which is what the patch
embedding makes of normalized pixels; the same branch of timm's start values puts out 0.6 of that.
The columns of B' and the rows of A' then have norms near 1, as timm's have (0.93). Neighbours are
alike and so add up: over the 8 blocks of Mixer-S/16 the tokens of photographs grow from 1 to 8 in
root mean square, where with timm's start values they grow to 2.5. LayerNorm takes that out again.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.kernels import assign_filters
from structinit_jax.attention_init.sites import TokenMixingSite, TokenMixingWeights
from structinit_jax.errors import InputError

# Between neighbours. Its value hardly matters: it shapes the spectrum, not the order in it.
CORRELATION = 0.9
MIMETIC_NOISE = MIMETIC_IDENTITY = 0.7  # those of query and key in mimetic attention


def kaiming_uniform(key: PRNGKeyArray, site: TokenMixingSite) -> TokenMixingWeights:
    """PyTorch's Linear default: uniform between ±(inputs)^-1/2."""
    shape = (site.num_layers, site.num_tokens, site.hidden)
    keys = jax.random.split(key)

    def draw(key, shape):
        bound = shape[1] ** -0.5
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    return TokenMixingWeights(draw(keys[0], shape), draw(keys[1], (shape[0], shape[2], shape[1])))


def mimetic(key: PRNGKeyArray, site: TokenMixingSite) -> TokenMixingWeights:
    """The map 0.7 U + 0.7 I, U uniform noise: mimetic attention's logits taken as the map itself.

    Trockman & Kolter (2023) do not speak of token-mixing MLPs; tokens keep to themselves here as
    they do in mimetic attention.
    """
    noise_key, turn_key = jax.random.split(key)
    tokens = site.num_tokens
    bound = (3 / tokens) ** 0.5
    noise = jax.random.uniform(
        noise_key, (site.num_layers, tokens, tokens), minval=-bound, maxval=bound
    )
    maps = MIMETIC_NOISE * noise + MIMETIC_IDENTITY * jnp.eye(tokens)[None]
    # One basis for all layers, that of a map which is nearly the identity.
    basis = output_basis(np.eye(tokens)[None], site)
    return TokenMixingWeights(*_carry(turn_key, maps, jnp.asarray(basis), site.hidden))


def carry_filters(
    key: PRNGKeyArray,
    site: TokenMixingSite,
    maps: Float[np.ndarray, "F N N"],
    ranges: Sequence[tuple[int, int]],
    *,
    order: str,
    same_layers: bool,
) -> TokenMixingWeights:
    """One filter in each layer, dealt as `kernels.assign_filters` deals them to heads.

    Args:
      key: draws filters and rotations.
      site: the MLPs.
      maps: the distinct filters as maps of the tokens.
      ranges: each layer's (start, stop) among them.
      order: 'even', 'random' or 'centre_first', which walks outwards from layer to layer.
      same_layers: whether all layers have equal weights.

    Raises:
      InputError: if there are too few hidden units for one pair.
    """
    order_key, turn_key = jax.random.split(key)
    bases = jnp.asarray(output_basis(maps, site))
    chosen = jnp.zeros(site.num_layers, jnp.int32)
    for start, stop in dict.fromkeys(ranges):
        layers = np.array([i for i, pair in enumerate(ranges) if pair == (start, stop)])
        shape = (1, 1 if same_layers else len(layers))
        dealt = assign_filters(
            jax.random.fold_in(order_key, start), shape, stop - start, order=order
        )
        chosen = chosen.at[layers].set(start + dealt[0].astype(jnp.int32))
    fc1, fc2 = _carry(
        turn_key, jnp.asarray(maps)[chosen], bases[chosen], site.hidden, same_turn=same_layers
    )
    return TokenMixingWeights(fc1, fc2, chosen)


def output_basis(
    maps: Float[np.ndarray, "F N N"], site: TokenMixingSite
) -> Float[np.ndarray, "F N k"]:
    """Orthonormal U, such that U Uᵀ M is what a site's hidden units hold of each map M.

    The k = min(N, hidden // 2) first principal components of M u over tokens u whose correlation is
    `CORRELATION` to the power of their distance in rows plus in columns.

    Raises:
      InputError: if there are too few hidden units for one pair.
    """
    if site.hidden < 2:
        raise InputError(
            f"model.token_mlp_ratio leaves {site.hidden} hidden units for token mixing: a filter "
            "needs two at least, so raise it"
        )
    count = min(site.num_tokens, site.hidden // 2)
    if count == site.num_tokens:
        return np.broadcast_to(np.eye(count, dtype=np.float32), (len(maps), count, count))
    y, x = np.divmod(np.arange(site.num_tokens), site.grid[1])
    distance = np.abs(y[:, None] - y) + np.abs(x[:, None] - x)
    covariance = maps.astype(np.float64) @ CORRELATION**distance @ maps.swapaxes(1, 2)
    return np.linalg.eigh(covariance)[1][..., ::-1][..., :count].astype(np.float32)


@functools.partial(jax.jit, static_argnames=("hidden", "same_turn"))
def _carry(
    key: PRNGKeyArray,
    maps: Float[Array, "L N N"],
    bases: Float[Array, "#L N k"],
    hidden: int,
    *,
    same_turn: bool = False,
) -> tuple[Float[Array, "L N hidden"], Float[Array, "L hidden N"]]:
    """Both layers, so that they map tokens u to U Uᵀ M u."""
    layers, pairs, rank = len(maps), hidden // 2, bases.shape[-1]
    shape = (1 if same_turn else layers, pairs, rank)
    turns, _ = jnp.linalg.qr(jax.random.normal(key, shape))
    turns = jnp.broadcast_to(turns, (layers, pairs, rank))
    bases = jnp.broadcast_to(bases, (layers, *bases.shape[1:]))
    second = jnp.einsum("Lmk,Lpk->Lpm", bases, turns)
    first = jnp.einsum("Lpm,Lmn->Lnp", second, maps)
    spare = hidden % 2  # an odd unit reads like the first pair and puts out nothing yet
    return (
        jnp.concatenate([first, -first, first[:, :, :spare]], axis=2),
        jnp.concatenate([second, -second, jnp.zeros_like(second[:, :spare])], axis=1),
    )
