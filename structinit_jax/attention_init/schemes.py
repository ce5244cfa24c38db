"""The initialization schemes, as plain callables `(key, site) -> AttentionWeights`."""

import difflib
import functools
import inspect

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from structinit_jax.attention_init.filters import (
    check_kernel_size,
    convolution_maps,
    impulse_kernels,
)
from structinit_jax.attention_init.pseudo_input import layer_norm, sincos_positions
from structinit_jax.attention_init.site import AttentionInit, AttentionSite, AttentionWeights
from structinit_jax.attention_init.solve import row_space, solve_bank
from structinit_jax.errors import InputError


def default() -> AttentionInit:
    """Truncated normal of standard deviation 0.02 on query, key, value and projection (timm)."""

    def init(key: PRNGKeyArray, site: AttentionSite) -> AttentionWeights:
        std = 0.02
        shape = (site.num_layers, site.width, site.num_heads, site.head_dim)
        query, key_, value, out = (
            # timm cuts at ±2 in absolute terms, so 100 deviations away.
            std * jax.random.truncated_normal(k, -2 / std, 2 / std, shape)
            for k in jax.random.split(key, 4)
        )
        return AttentionWeights(query, key_, value, jnp.moveaxis(out, 1, -1))

    return init


def mimetic() -> AttentionInit:
    """Mimetic initialization (Trockman & Kolter 2023, arXiv:2305.09828).

    Each head's Q Kᵀ is close to 0.7 I plus noise, and V Proj close to -0.4 I plus noise, both
    factored by singular value decomposition.
    """

    def init(key: PRNGKeyArray, site: AttentionSite) -> AttentionWeights:
        qk_key, vo_key = jax.random.split(key)
        layers, width, heads, dim = site.num_layers, site.width, site.num_heads, site.head_dim
        query, key_ = _factors_near_identity(
            qk_key, (layers, heads, width), dim, noise=0.7, identity=0.7
        )
        value, out = mimetic_value_out(vo_key, site)
        return AttentionWeights(jnp.moveaxis(query, 1, 2), jnp.moveaxis(key_, 1, 2), value, out)

    return init


def impulse(
    kernel_size: int = 3,
    *,
    offsets: str = "even",
    norm: float = 3**-0.5,
    value_out: str = "mimetic",
    max_steps: int = 200,
) -> AttentionInit:
    """Query and key solved so that each head's first map is an impulse convolution.

    The f² distinct filters are solved once in the row space of the position encoding
    (`attention_init.solve`). Every head of every layer then gets its own copy, turned by a random
    rotation of the head's channels: Q R and K R have the map of Q and K, but independent weights.
    Query and key are zero outside the encoding's row space: they see positions alone at first.

    Where the model's positions are trainable, they start from the sin-cos encoding.

    Args:
      kernel_size: f, odd, at most the grid's shorter side.
      offsets: how filters go to heads: 'even' covers all f² as evenly as the heads of all layers
        allow, with as few repeats within a layer as possible; 'random' draws each head's
        independently (2024 paper).
      norm: root mean square norm of the columns of Q and K, which bounds how sharp the maps
        are. The default is what the start of the 2024 paper's algorithm 1 has.
      value_out: 'mimetic' for V and projection as in `mimetic` (2025 paper), or 'default'.
      max_steps: an upper bound on solver steps.
    """
    check_kernel_size(kernel_size)
    _check_choice("offsets", offsets, ("even", "random"))
    _check_choice("value_out", value_out, ("mimetic", "default"))
    if norm <= 0:
        raise InputError(f"attention_init.norm={norm}: the column norm must be positive")
    if max_steps < 1:
        raise InputError(f"attention_init.max_steps={max_steps}: needs at least one solver step")

    def init(key: PRNGKeyArray, site: AttentionSite) -> AttentionWeights:
        check_kernel_size(kernel_size, site.grid)
        positions = site.positions
        if site.positions_trainable:
            positions = sincos_positions(site.grid, site.width)
        if positions is None:
            raise InputError(
                "attention_init.name='impulse' needs a model that adds positions to its tokens: "
                "the maps are solved against them"
            )
        z, v = row_space(layer_norm(positions))
        weights = _impulse_weights(
            key,
            z,
            v,
            convolution_maps(impulse_kernels(kernel_size), site.grid),
            even=offsets == "even",
            norm=norm,
            max_steps=max_steps,
            heads=(site.num_layers, site.num_heads, site.head_dim),
            qk_scale=site.qk_scale,
        )
        if value_out == "mimetic":
            value, out = mimetic_value_out(jax.random.fold_in(key, 1), site)
            weights = weights._replace(value=value, out=out)
        if site.positions_trainable:
            weights = weights._replace(positions=jnp.asarray(positions))
        return weights

    return init


@functools.partial(jax.jit, static_argnames=("even", "norm", "max_steps", "heads", "qk_scale"))
def _impulse_weights(
    key: PRNGKeyArray,
    z: Float[Array, "N r"],
    v: Float[Array, "D r"],
    targets: Float[Array, "F N N"],
    *,
    even: bool,
    norm: float,
    max_steps: int,
    heads: tuple[int, int, int],
    qk_scale: float,
) -> AttentionWeights:
    layers, num_heads, head_dim = heads
    solve_key, offset_key, turn_key = jax.random.split(key, 3)
    bank = solve_bank(
        solve_key, z, targets, head_dim=head_dim, qk_scale=qk_scale, norm=norm, max_steps=max_steps
    )
    filters = assign_filters(offset_key, (layers, num_heads), len(targets), even=even)
    rank = bank.query.shape[-1]
    turns, _ = jnp.linalg.qr(jax.random.normal(turn_key, (layers, num_heads, head_dim, rank)))

    def place(factors):
        return jnp.einsum("Dr,Lhrk,Lhdk->LDhd", v, factors[filters], turns)

    return AttentionWeights(place(bank.query), place(bank.key), report=bank.report)


def assign_filters(
    key: PRNGKeyArray, shape: tuple[int, int], num_filters: int, *, even: bool
) -> Int[Array, "L h"]:
    """Draws the filter of every head: an even cover of all filters, or independent draws."""
    layers, heads = shape
    if not even:
        return jax.random.randint(key, shape, 0, num_filters)
    rounds = -(-layers * heads // num_filters)
    order = jax.vmap(lambda k: jax.random.permutation(k, num_filters))(
        jax.random.split(key, rounds)
    )
    return order.reshape(-1)[: layers * heads].reshape(shape)


def mimetic_value_out(
    key: PRNGKeyArray, site: AttentionSite
) -> tuple[Float[Array, "L D h d"], Float[Array, "L h d D"]]:
    """V and projection with V Proj = 0.4 U - 0.4 I across the heads of a layer, U uniform noise."""
    inner = site.num_heads * site.head_dim
    value, out = _factors_near_identity(
        key, (site.num_layers, site.width), inner, noise=0.4, identity=-0.4
    )
    heads = (site.num_heads, site.head_dim)
    return (
        value.reshape(site.num_layers, site.width, *heads),
        jnp.swapaxes(out, -1, -2).reshape(site.num_layers, *heads, site.width),
    )


def _factors_near_identity(key, shape, rank, *, noise, identity):
    """Factors A, B [*shape, rank] with A Bᵀ closest to noise · U + identity · I.

    U is uniform between ±(3 / D)^1/2, D = shape[-1], so that its entries have variance 1 / D.
    """
    width = shape[-1]
    bound = (3 / width) ** 0.5
    uniform = jax.random.uniform(key, (*shape, width), minval=-bound, maxval=bound)
    eye = jnp.broadcast_to(jnp.eye(width), uniform.shape)
    u, s, vt = jnp.linalg.svd(noise * uniform + identity * eye, full_matrices=False)
    root = jnp.sqrt(s[..., None, :rank])
    return u[..., :rank] * root, jnp.swapaxes(vt, -1, -2)[..., :rank] * root


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"attention_init.{field}={value!r}: choose one of {', '.join(choices)}")


SCHEMES = {"default": default, "mimetic": mimetic, "impulse": impulse}


def scheme_options(name: str) -> tuple[str, ...]:
    """The names of the options of a scheme."""
    if name not in SCHEMES:
        near = difflib.get_close_matches(str(name), SCHEMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(
            f"attention_init.name={name!r} is no scheme: {hint}there are {', '.join(SCHEMES)}"
        )
    return tuple(inspect.signature(SCHEMES[name]).parameters)


def by_name(name: str, **options) -> AttentionInit:
    """The scheme of that name, such as `by_name('impulse', kernel_size=5)`.

    Raises:
      InputError: if there is no such scheme, or it does not take one of the options.
    """
    known = scheme_options(name)
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            takes = ", ".join(known) if known else "no options"
            raise InputError(
                f"attention_init.{option}: scheme {name!r} has no such option{hint} "
                f"(it takes {takes})"
            )
    return SCHEMES[name](**options)
