"""Start values of value and projection, for all kinds of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.draw import draw_flat
from structinit_jax.attention_init.sites import AttentionSite
from structinit_jax.attention_init.solve import split_product
from structinit_jax.errors import InputError


def mimetic_vo(
    rng: PRNGKeyArray, site: AttentionSite
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V and projection with V Proj = 0.4 U - 0.4 I over all heads of a layer, U uniform.

    Heads are sorted by singular values, the strongest first.
    """
    require_narrow_heads(site)
    layers, width, heads = site.num_layers, site.width, (site.num_heads, site.head_dim)
    inner = heads[0] * heads[1]
    value, out = factors_near_identity(rng, (layers, width), inner, noise=0.4, identity=-0.4)
    out = jnp.swapaxes(out, -1, -2).reshape(layers, *heads, width)
    return value.reshape(layers, width, *heads), out


def balanced_vo(
    rng: PRNGKeyArray, site: AttentionSite
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V = c (I - U / 2) Π and Proj = -c Πᵀ (I - U' / 2), so V Proj ≈ -0.4 (I - noise).

    c² = 0.4, U and U' are uniform noise as in `mimetic`, and the permutation Π distributes the
    channels over the heads: some are left out or used twice unless h d = D.
    """
    noise_rng, channel_rng = jax.random.split(rng)
    layers, width = site.num_layers, site.width
    inner, bound = site.num_heads * site.head_dim, (3 / width) ** 0.5
    rngs = jax.random.split(channel_rng, layers)
    channels = jax.vmap(lambda rng: jax.random.permutation(rng, width))(rngs)
    channels = jnp.tile(channels, (1, -(-inner // width)))[:, :inner]
    identity = jax.nn.one_hot(channels, width)  # [L, inner, D], the rows of Πᵀ
    # 16 random bits are plenty for noise, and half the cost of 32.
    draw = functools.partial(jax.random.bits, dtype="uint16")
    bits = draw_flat(draw, noise_rng, (2, *identity.shape))
    half_noise = bound * ((bits.astype(jnp.float32) + 0.5) / 2**16 - 0.5)
    value, out = 0.4**0.5 * (identity[None] - half_noise)
    heads = (layers, site.num_heads, site.head_dim, width)
    return jnp.moveaxis(value.reshape(heads), -1, 1), -out.reshape(heads)


def remove_inputs(
    kernel: Float[Array, "L D h d"], v: Float[Array | np.ndarray, "D r"]
) -> Float[Array, "L D h d"]:
    """Removes the part of a kernel that acts on inputs in the span of the orthonormal V."""
    return kernel - jnp.einsum("Dr,Lrhd->LDhd", v, jnp.einsum("Er,LEhd->Lrhd", v, kernel))


def remove_outputs(
    kernel: Float[Array, "L h d D"], v: Float[Array | np.ndarray, "D r"]
) -> Float[Array, "L h d D"]:
    """Removes the outputs of a kernel in the span of the orthonormal V."""
    return kernel - jnp.einsum("Dr,Lhdr->LhdD", v, jnp.einsum("LhdE,Er->Lhdr", kernel, v))


VO_INITS = {
    "balanced": balanced_vo,
    "mimetic": mimetic_vo,
    "default": lambda rng, site: (None, None),
}


def require_narrow_heads(site: AttentionSite) -> None:
    """Raises `InputError` if the heads have more channels than the model."""
    inner = site.num_heads * site.head_dim
    if inner > site.width:
        raise InputError(
            f"num_heads={site.num_heads} × head_dim={site.head_dim} = {inner} channels are more "
            f"than width={site.width}, but mimetic factors of a [{site.width}, {site.width}] "
            "matrix have no more: use vo_init='balanced' of 'impulse', or 'default'"
        )


def factors_near_identity(
    rng: PRNGKeyArray, shape: tuple[int, ...], rank: int, *, noise: float, identity: float
) -> tuple[Float[Array, "*batch D k"], Float[Array, "*batch D k"]]:
    """Returns A, B [*shape, rank] with A Bᵀ closest to noise · U + identity · I.

    U is uniform between ±(3 / D)^1/2, D = shape[-1], so that its entries have variance 1 / D.
    """
    width = shape[-1]
    bound = (3 / width) ** 0.5
    draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
    uniform = draw_flat(draw, rng, (*shape, width))
    eye = jnp.broadcast_to(jnp.eye(width), uniform.shape)
    return split_product(noise * uniform + identity * eye, rank)
