"""Weights whose products are near a multiple of the identity, as in mimetic initialization.

`mimetic` (Trockman & Kolter 2023) factors such products by SVD. `append_similar_heads`
and `value_and_projection` are cheaper forms of the same, for `impulse_mimetic` and `impulse`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from structinit_jax.attention_init.draws import (
    draw_flat,
    map_matrices,
    permutations,
    random_rotations,
)
from structinit_jax.attention_init.sites import AttentionStack, AttentionWeights
from structinit_jax.checks import require


def near_identity(
    rng: PRNGKeyArray, shape: tuple[int, ...], *, noise: float, identity: float
) -> Float[Array, "*batch D D"]:
    """Draws matrices noise · U + identity · I of shape [*shape, D], where D = shape[-1].

    U is uniform between ±(3 / D)^1/2, so that its entries have variance 1 / D.
    """
    width = shape[-1]
    bound = (3 / width) ** 0.5
    draw = functools.partial(jax.random.uniform, dtype="float32", minval=-bound, maxval=bound)
    uniform = draw_flat(draw, rng, (*shape, width))
    eye = jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), uniform.shape)
    return noise * uniform + identity * eye


def mimetic(rng: PRNGKeyArray, site: AttentionStack) -> AttentionWeights:
    """Trockman & Kolter (2023): Q Kᵀ = 0.7 U + 0.7 I per head and V Proj ≈ -0.4 I, by SVD.

    The programs of 2024 and 2025 store the factors of V Proj untransposed as PyTorch weights, which
    makes heads equally strong; so does this function.
    """
    qk_rng, vo_rng = jax.random.split(rng)
    value, out = mimetic_vo(vo_rng, site, transposed=True)
    shape = (site.num_layers, site.num_heads, site.width)
    products = near_identity(qk_rng, shape, noise=0.7, identity=0.7)
    query, key = (jnp.moveaxis(f, 1, 2) for f in split_product(products, site.head_dim))
    return AttentionWeights(query, key, value, out)


def mimetic_vo(
    rng: PRNGKeyArray, site: AttentionStack, *, transposed: bool
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V and projection from the factors of A Bᵀ = 0.4 U - 0.4 I over all heads of a layer.

    V = A and Proj = Bᵀ, in which heads are sorted by singular values, the strongest first. If
    `transposed`, V = Aᵀ and Proj = B, in which heads are equally strong. Raises `InputError` if the
    heads together have more channels than the model.
    """
    layers = site.num_layers
    width = site.width
    heads = (site.num_heads, site.head_dim)
    inner = heads[0] * heads[1]
    needs = (
        f"at most width / head_dim = {width} / {site.head_dim} for mimetic weights: use 'default' "
        "or 'impulse'"
    )
    require("num_heads", site.num_heads, needs, lambda _: inner <= width)
    product = near_identity(rng, (layers, width), noise=0.4, identity=-0.4)
    a, b = split_product(product, width)
    if transposed:
        a = jnp.swapaxes(a, -1, -2)
        b = jnp.swapaxes(b, -1, -2)
    out = jnp.swapaxes(b[..., :inner], -1, -2).reshape(layers, *heads, width)
    return a[..., :inner].reshape(layers, width, *heads), out


@functools.partial(jax.jit, static_argnames="rank")
def split_product(
    product: Float[Array, "*batch D D"], rank: int
) -> tuple[Float[Array, "*batch D k"], Float[Array, "*batch D k"]]:
    """Returns A, B with A Bᵀ closest to the product, singular values split evenly."""
    u, s, vt = map_matrices(jnp.linalg.svd, product)
    root = jnp.sqrt(s[..., None, :rank])
    return u[..., :rank] * root, jnp.swapaxes(vt, -1, -2)[..., :rank] * root


# -- without SVDs ----------------------------------------------------------------------------------


def append_similar_heads(
    rng: PRNGKeyArray,
    sizes: AttentionStack,
    query: Float[Array, "l D h d"],
    key: Float[Array, "l D h d"],
) -> tuple[Float[Array, "L D h d"], Float[Array, "L D h d"]]:
    """Appends Q and K of heads that attend to similar tokens, up to the L layers of `sizes`.

    As in `mimetic`, but without its SVD: Q Kᵀ = W Wᵀ A projects A = 0.7 U + 0.7 I onto d
    orthonormal columns W close to its leading singular vectors. These columns come from four
    subspace iterations, which keep 93 to 98 % of the energy that the SVD keeps at widths 96 to 768;
    the SVDs of half of ViT-B take half a minute on a CPU.
    """
    num_similar = sizes.num_layers - len(query)
    if not num_similar:
        return query, key
    noise_rng, start_rng = jax.random.split(rng)
    heads = (num_similar, sizes.num_heads, sizes.width)
    a = near_identity(noise_rng, heads, noise=0.7, identity=0.7)

    def invert_factor(gram):
        lower = jnp.linalg.cholesky(gram)
        identity = jnp.eye(len(gram), dtype=gram.dtype)
        return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)

    def iterate(_, w):
        w = a @ (jnp.swapaxes(a, -1, -2) @ w)
        # A QR decomposition of this shape takes a hundred times as long on CPUs as Cholesky's.
        inverse = map_matrices(invert_factor, jnp.swapaxes(w, -1, -2) @ w)
        return w @ jnp.swapaxes(inverse, -1, -2)

    if sizes.head_dim < sizes.width:
        start = draw_flat(jax.random.normal, start_rng, (*heads, sizes.head_dim))
        w = jax.lax.fori_loop(0, 4, iterate, start)
    else:  # W Wᵀ = I keeps all of A; Wᵀ W would have no Cholesky factor
        rotations = random_rotations(start_rng, (*heads[:2], sizes.head_dim, sizes.width))
        w = jnp.swapaxes(rotations, 2, 3)
    projected = jnp.swapaxes(a, -1, -2) @ w
    length = jnp.linalg.norm(projected, axis=(-2, -1), keepdims=True)
    balance = (length / sizes.head_dim**0.5) ** 0.5
    similar_query = jnp.moveaxis(balance * w, 1, 2)
    similar_key = jnp.moveaxis(projected / balance, 1, 2)
    return jnp.concatenate([query, similar_query]), jnp.concatenate([key, similar_key])


def value_and_projection(
    rng: PRNGKeyArray, sizes: AttentionStack
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V = c (I - U / 2) Π and Proj = -c Πᵀ (I - U' / 2), so V Proj ≈ -0.4 (I - noise).

    c² = 0.4, U and U' are uniform noise as in `mimetic`, and the permutation Π distributes the
    channels over the heads: some are left out or used twice unless h d = D.
    """
    layers = sizes.num_layers
    width = sizes.width
    heads = (sizes.num_heads, sizes.head_dim)
    noise_rng, channel_rng = jax.random.split(rng)
    inner = heads[0] * heads[1]
    bound = (3 / width) ** 0.5
    channels = permutations(jax.random.split(channel_rng, layers), width)
    channels = jnp.tile(channels, (1, -(-inner // width)))[:, :inner]
    identity = jax.nn.one_hot(channels, width)  # [L, inner, D], the rows of Πᵀ
    # 16 random bits are plenty for noise, and take half of the memory of 32.
    draw = functools.partial(jax.random.bits, dtype="uint16")
    bits = draw_flat(draw, noise_rng, (2, *identity.shape))
    half_noise = bound * ((bits.astype(jnp.float32) + 0.5) / 2**16 - 0.5)
    value, out = 0.4**0.5 * (identity[None] - half_noise)
    shape = (layers, *heads, width)
    return jnp.moveaxis(value.reshape(shape), -1, 1), -out.reshape(shape)
