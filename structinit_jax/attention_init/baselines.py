"""The schemes that impulse initialization is compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init import token_mixing
from structinit_jax.attention_init.convolution import random_filters
from structinit_jax.attention_init.sites import (
    AttentionInit,
    AttentionWeights,
    ConvSite,
    Site,
    TokenMixingSite,
    TokenMixingWeights,
    Weights,
    require_attention,
)


def default() -> AttentionInit:
    """Truncated normal of standard deviation 0.02 on query, key, value and projection (timm).

    Convolutions get PyTorch's default (`convolution.random_filters`), which timm leaves in place.
    Token-mixing MLPs keep their model's start values, which are timm's too.
    """

    def init(key: PRNGKeyArray, site: Site) -> Weights:
        if isinstance(site, ConvSite):
            return random_filters(key, site)
        if isinstance(site, TokenMixingSite):
            return TokenMixingWeights()
        std = 0.02
        # timm cuts at ±2 in absolute terms, so 100 deviations away.
        return _draw_all(
            key,
            site,
            lambda k, shape: std * jax.random.truncated_normal(k, -2 / std, 2 / std, shape),
        )

    return init


def kaiming_uniform() -> AttentionInit:
    """Uniform between ±D^-1/2 on query, key, value and projection: PyTorch's Linear default.

    PyTorch's call is He et al.'s Kaiming uniform with a = 5^1/2, which comes to this bound; for the
    filters of a depthwise convolution to ±1/f.
    """

    def init(key: PRNGKeyArray, site: Site) -> Weights:
        if isinstance(site, ConvSite):
            return random_filters(key, site)
        if isinstance(site, TokenMixingSite):
            return token_mixing.kaiming_uniform(key, site)
        inner = site.num_heads * site.head_dim
        weights = _draw_all(
            key, site, lambda k, shape: jax.random.uniform(k, shape, minval=-1.0, maxval=1.0)
        )
        return AttentionWeights(
            *(site.width**-0.5 * w for w in weights[:3]), out=inner**-0.5 * weights.out
        )

    return init


def _draw_all(key, site, draw) -> AttentionWeights:
    layers, width, heads, dim = site.num_layers, site.width, site.num_heads, site.head_dim
    keys = jax.random.split(key, 4)
    query, key_, value = (draw(k, (layers, width, heads, dim)) for k in keys[:3])
    return AttentionWeights(query, key_, value, draw(keys[3], (layers, heads, dim, width)))


def mimetic() -> AttentionInit:
    """Mimetic initialization (Trockman & Kolter 2023, arXiv:2305.09828).

    Each head's Q Kᵀ is close to 0.7 I plus noise, and V Proj close to -0.4 I plus noise, both
    factored by singular value decomposition. Token-mixing MLPs: see `token_mixing.mimetic`.
    """

    def init(key: PRNGKeyArray, site: Site) -> Weights:
        if isinstance(site, TokenMixingSite):
            return token_mixing.mimetic(key, site)
        require_attention(site, "mimetic")
        qk_key, vo_key = jax.random.split(key)
        query, key_ = _factors_near_identity(
            qk_key,
            (site.num_layers, site.num_heads, site.width),
            site.head_dim,
            noise=0.7,
            identity=0.7,
        )
        value, out = mimetic_vo(vo_key, site.num_layers, site.width, site.num_heads, site.head_dim)
        return AttentionWeights(jnp.moveaxis(query, 1, 2), jnp.moveaxis(key_, 1, 2), value, out)

    return init


def mimetic_vo(
    key: PRNGKeyArray, layers: int, width: int, num_heads: int, head_dim: int
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """V and projection with V Proj = 0.4 U - 0.4 I across the heads of a layer, U uniform noise."""
    value, out = _factors_near_identity(
        key, (layers, width), num_heads * head_dim, noise=0.4, identity=-0.4
    )
    heads = (num_heads, head_dim)
    return (
        value.reshape(layers, width, *heads),
        jnp.swapaxes(out, -1, -2).reshape(layers, *heads, width),
    )


def balanced_vo(
    key: PRNGKeyArray, layers: int, width: int, num_heads: int, head_dim: int
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """V = c (I - U / 2) Π and Proj = -c Πᵀ (I - U' / 2), c² = 0.4, so V Proj ≈ -0.4 (I - noise).

    U and U' are uniform noise as in `mimetic`; the permutation Π deals the channels to the heads.
    Heads that are together narrower than the model leave channels out, wider ones take some twice.
    """
    noise_key, deal_key = jax.random.split(key)
    inner, bound = num_heads * head_dim, (3 / width) ** 0.5
    dealt = jax.vmap(lambda k: jax.random.permutation(k, width))(jax.random.split(deal_key, layers))
    dealt = jnp.tile(dealt, (1, -(-inner // width)))[:, :inner]
    identity = jax.nn.one_hot(dealt, width)  # [L, inner, D], the rows of Πᵀ
    # Sixteen random bits are plenty for noise, and cost half of what thirty-two do.
    bits = jax.random.bits(noise_key, (2, *identity.shape), "uint16")
    half_noise = bound * ((bits.astype(jnp.float32) + 0.5) / 2**16 - 0.5)
    value, out = 0.4**0.5 * (identity[None] - half_noise)
    heads = (layers, num_heads, head_dim, width)
    return jnp.moveaxis(value.reshape(heads), -1, 1), -out.reshape(heads)


def _factors_near_identity(key, shape, rank, *, noise, identity):
    """Factors A, B [*shape, rank] with A Bᵀ closest to noise · U + identity · I.

    U is uniform between ±(3 / D)^1/2, D = shape[-1], so that its entries have variance 1 / D.
    """
    width = shape[-1]
    bound = (3 / width) ** 0.5
    uniform = jax.random.uniform(key, (*shape, width), minval=-bound, maxval=bound)
    eye = jnp.broadcast_to(jnp.eye(width), uniform.shape)
    return split_product(noise * uniform + identity * eye, rank)


def split_product(
    product: Float[Array, "*batch D D"], rank: int
) -> tuple[Float[Array, "*batch D k"], Float[Array, "*batch D k"]]:
    """Factors A, B with A Bᵀ the best approximation of that rank, singular values shared evenly."""
    u, s, vt = jnp.linalg.svd(product, full_matrices=False)
    root = jnp.sqrt(s[..., None, :rank])
    return u[..., :rank] * root, jnp.swapaxes(vt, -1, -2)[..., :rank] * root
