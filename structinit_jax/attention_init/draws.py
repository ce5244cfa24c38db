"""Weights that are drawn, not solved for: the baselines, and value and projection of `impulse`.

`mimetic_weights` are those of Trockman & Kolter (2023) as in the papers' programs, from singular
vectors; `append_similar_heads` and `value_and_projection`, which `impulse` uses, are cheaper.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.sites import AttentionSizes, AttentionWeights
from structinit_jax.errors import require
from structinit_jax.rngs import draw_flat

# -- the baselines ---------------------------------------------------------------------------------


def baseline(
    rng: PRNGKeyArray,
    site: AttentionSizes,
    *,
    draw: Callable[[PRNGKeyArray, AttentionSizes], AttentionWeights],
    query_key_scale: float,
    value_scale: float,
) -> AttentionWeights:
    """Draws weights and scales them by factors."""
    weights = draw(rng, site.sizes)
    return AttentionWeights(
        query_key_scale * weights.query,
        query_key_scale * weights.key,
        value_scale * weights.value,
        value_scale * weights.out,
    )


@functools.partial(jax.jit, static_argnames="sizes")
def base_weights(rng: PRNGKeyArray, sizes: AttentionSizes) -> AttentionWeights:
    """Draws like timm (truncated normal, std 0.02) or PyTorch (uniform ±(fan-in)^-1/2)."""
    heads = (sizes.num_heads, sizes.head_dim)
    draw = functools.partial(trunc_normal, std=0.02)
    if sizes.base_init == "pytorch":
        draw = functools.partial(uniform, bound=1.0)
    rngs = jax.random.split(rng, 4)
    inputs = [draw(each, (sizes.num_layers, sizes.width, *heads)) for each in rngs[:3]]
    out = draw(rngs[3], (sizes.num_layers, *heads, sizes.width))
    if sizes.base_init == "pytorch":
        inputs = [sizes.width**-0.5 * kernel for kernel in inputs]
        out = math.prod(heads) ** -0.5 * out
    return AttentionWeights(*inputs, out)


def mimetic_weights(rng: PRNGKeyArray, sizes: AttentionSizes) -> AttentionWeights:
    """Trockman & Kolter (2023), by SVD.

    In each head, Q Kᵀ is the best approximation of 0.7 U + 0.7 I of rank d. V Proj is -0.4 I plus
    noise.
    """
    qk_rng, vo_rng = jax.random.split(rng)
    value, out = mimetic_vo(vo_rng, sizes, sort_heads=False)
    shape = (sizes.num_layers, sizes.num_heads, sizes.width)
    products = near_identity(qk_rng, shape, noise=0.7, identity=0.7)
    query, key = (jnp.moveaxis(f, 1, 2) for f in split_product(products, sizes.head_dim))
    return AttentionWeights(query, key, value, out)


def mimetic_vo(
    rng: PRNGKeyArray, sizes: AttentionSizes, *, sort_heads: bool
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V and projection from the factors of A Bᵀ = 0.4 U - 0.4 I over all heads of a layer.

    If `sort_heads`, V = A and Proj = Bᵀ, so heads are sorted by singular values, strongest first
    (the 2025 program). Otherwise V = Aᵀ and Proj = B, so heads are equally strong (`mimetic`).
    """
    layers = sizes.num_layers
    width = sizes.width
    heads = (sizes.num_heads, sizes.head_dim)
    inner = heads[0] * heads[1]
    needs = f"at most width / head_dim = {width} / {heads[1]} with 'mimetic' and 'impulse_2025'"
    require("num_heads", heads[0], needs, inner <= width)
    product = near_identity(rng, (layers, width), noise=0.4, identity=-0.4)
    a, b = split_product(product, width)
    if not sort_heads:
        a = jnp.swapaxes(a, -1, -2)
        b = jnp.swapaxes(b, -1, -2)
    out = jnp.swapaxes(b[..., :inner], -1, -2).reshape(layers, *heads, width)
    return a[..., :inner].reshape(layers, width, *heads), out


@functools.partial(jax.jit, static_argnames="rank")
def split_product(
    product: Float[Array, "*batch D D"], rank: int
) -> tuple[Float[Array, "*batch D k"], Float[Array, "*batch D k"]]:
    """Returns A and B with A Bᵀ closest to the product and the singular values split evenly."""
    if rank == product.shape[-1]:  # A Gram matrix would lose the smallest singular values.
        u, s, vt = map_matrices(jnp.linalg.svd, product)
        root = jnp.sqrt(s[..., None, :])
        return u * root, jnp.swapaxes(vt, -1, -2) * root

    def leading_vectors(matrix):
        _, vectors = jnp.linalg.eigh(matrix.T @ matrix)  # from the smallest singular value up
        return vectors[:, ::-1][:, :rank]

    # For the largest ones, it is accurate enough, and on CPUs twice as fast as an SVD.
    v = map_matrices(leading_vectors, product)
    scaled = product @ v  # U S
    root = jnp.sqrt(jnp.linalg.norm(scaled, axis=-2, keepdims=True))
    return scaled / root, v * root


# -- the same without SVDs -------------------------------------------------------------------------


def append_similar_heads(
    rng: PRNGKeyArray,
    sizes: AttentionSizes,
    query: Float[Array, "l D h d"],
    key: Float[Array, "l D h d"],
) -> tuple[Float[Array, "L D h d"], Float[Array, "L D h d"]]:
    """Appends Q and K of heads that attend to similar tokens, up to the L layers of `sizes`.

    Like `mimetic`, but without its SVD: Q Kᵀ = W Wᵀ A projects A = 0.7 U + 0.7 I onto d
    orthonormal columns W close to its leading singular vectors. These columns come from four
    subspace iterations, which keep 93 to 98 % of the energy that the SVD keeps at widths 96 to 768.
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
        if 2 * sizes.head_dim > sizes.width:  # Wᵀ W may have no Cholesky factor in float32
            return map_matrices(lambda x: jnp.linalg.qr(x)[0], w)
        # On CPUs, a QR decomposition of this shape takes a hundred times as long as a Cholesky one.
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
    rng: PRNGKeyArray, sizes: AttentionSizes
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """Returns V = c (I - U / 2) Π and Proj = -c Πᵀ (I - U' / 2); V Proj is -0.4 I plus noise.

    U and U' are uniform noise as in `mimetic`, and the permutation Π assigns channels to heads.
    c² = 0.4, or 0.4 D / (h d) if h d > D and channels are repeated; if h d < D, some are left out.
    """
    layers = sizes.num_layers
    width = sizes.width
    heads = (sizes.num_heads, sizes.head_dim)
    noise_rng, channel_rng = jax.random.split(rng)
    inner = heads[0] * heads[1]
    bound = (3 / width) ** 0.5
    channels = permutations(jax.random.split(channel_rng, layers), width)
    channels = jnp.tile(channels, (1, -(-inner // width)))[:, :inner]
    identity = jax.nn.one_hot(channels, width, dtype=jnp.float32)  # [L, inner, D], the rows of Πᵀ
    # 16 random bits are enough for noise and take half the memory of 32.
    bits = draw_flat(jax.random.bits, noise_rng, (2, *identity.shape), "uint16")
    half_noise = bound * ((bits.astype(jnp.float32) + 0.5) / 2**16 - 0.5)
    scale = (0.4 * min(1, width / inner)) ** 0.5
    value, out = scale * (identity[None] - half_noise)
    shape = (layers, *heads, width)
    return jnp.moveaxis(value.reshape(shape), -1, 1), -out.reshape(shape)


# -- random matrices -------------------------------------------------------------------------------


def near_identity(
    rng: PRNGKeyArray, shape: tuple[int, ...], *, noise: float, identity: float
) -> Float[Array, "*batch D D"]:
    """Draws matrices noise · U + identity · I of shape [*shape, D], where D = shape[-1].

    U is uniform between ±(3 / D)^1/2, so that its entries have variance 1 / D.
    """
    width = shape[-1]
    bound = (3 / width) ** 0.5
    drawn = uniform(rng, (*shape, width), bound=bound)
    eye = jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), drawn.shape)
    return noise * drawn + identity * eye


def random_rotations(rng: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "*batch m n"]:
    """Draws matrices with orthonormal columns (m ≥ n), which make heads with equal maps differ."""
    return map_matrices(lambda x: jnp.linalg.qr(x)[0], draw_flat(jax.random.normal, rng, shape))


def map_matrices(function: Callable[[Array], Any], matrices: Float[Array, "*batch m n"]) -> Any:
    """Applies a function, such as a decomposition, to the matrices of a batch one at a time.

    On CPUs, batched decompositions that run at the same time in several programs or on several
    devices wait for each other's threads, for a long time or forever.
    """
    found = jax.lax.map(function, matrices.reshape(-1, *matrices.shape[-2:]))
    return jax.tree.map(lambda x: x.reshape(*matrices.shape[:-2], *x.shape[1:]), found)


def permutations(rngs: Array, size: int) -> Int[Array, "n size"]:
    """Returns a permutation of 0 … size - 1 for each key (without vmap, which compiles slower)."""
    return jax.lax.map(lambda rng: jax.random.permutation(rng, size), rngs)


def uniform(
    rng: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, *, bound: float
) -> Array:
    """Draws uniformly between ±bound."""
    draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
    return draw_flat(draw, rng, shape, dtype)


def trunc_normal(
    rng: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, *, std: float
) -> Array:
    """Draws like timm's `trunc_normal_(std=std)`, which cuts at ±2, not ±2 standard deviations."""

    def draw(rng, shape, dtype):
        return jax.random.truncated_normal(rng, -2 / std, 2 / std, shape, dtype)

    return std * draw_flat(draw, rng, shape, dtype)
