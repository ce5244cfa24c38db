"""Measures how close attention maps are to their targets."""

import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from structinit_jax.attention_init.sites import SolveReport

TARGET_MASS = 0.5  # wanted by every impulse of our own
MIN_HIT_RATE = 0.75  # below it, targets count as out of reach


def attention_maps(
    queries: Float[Array, "n r"],
    keys: Float[Array, "m r"],
    query: Float[Array, "F r k"],
    key: Float[Array, "F r k"],
    qk_scale: float,
) -> Float[Array, "F n m"]:
    """Returns softmax(σ Z Q Kᵀ Zᵀ) for every filter, given Z of querying and of all tokens."""
    q = jnp.einsum("nr,frk->fnk", queries, query) * qk_scale
    k = jnp.einsum("mr,frk->fmk", keys, key)
    return jax.nn.softmax(jnp.einsum("fnk,fmk->fnm", q, k), axis=-1)


def overlap(targets: Float[Array, "F n m"], maps: Float[Array, "F n m"]) -> Float[Array, " F"]:
    """Returns the attention mass on target, averaged over the rows that have a target."""
    rows = jnp.sum(targets.max(axis=-1) > 0, axis=-1, dtype=jnp.float32)
    return jnp.sum(jnp.minimum(targets, maps), axis=(1, 2)) / rows


def find_hits(
    targets: Float[Array, "*F n m"], maps: Float[Array, "*F n m"]
) -> tuple[Bool[Array, "*F n"], Bool[Array, "*F n"]]:
    """Returns which rows are strongest where their target is, and which have a target at all."""
    strongest = targets.max(axis=-1)
    has_target = strongest > 0
    at_peak = jnp.take_along_axis(targets, maps.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    return has_target & (at_peak == strongest), has_target


def report_on_maps(targets, maps, *, steps, norm) -> SolveReport:
    """Compares maps [F, n, m] with their targets; copies steps and norm into the report."""
    hits, has_target = find_hits(targets, maps)
    return SolveReport(
        loss=jnp.mean((targets - maps) ** 2),
        target_mass=jnp.mean(overlap(targets, maps)),
        hit_rate=jnp.sum(hits, dtype=jnp.float32) / jnp.sum(has_target, dtype=jnp.float32),
        steps=jnp.asarray(steps, jnp.float32),
        norm=jnp.asarray(norm, jnp.float32),
    )


def out_of_reach(report: SolveReport) -> str | None:
    """Returns a warning if too few rows peak on their target, else None."""
    if report.hit_rate >= MIN_HIT_RATE:
        return None
    return (
        f"only {100 * float(report.hit_rate):.0f} % of the attention rows peak on their target. "
        "The head dimension, the rank of the positions (sin-cos for 'impulse', learned for "
        "'impulse_2025'), the frequencies of rotary positions, a small target mass or norm, or few "
        "steps may be the cause: use fewer heads, a smaller kernel, or a larger target mass"
    )


def warn_if_out_of_reach(report: SolveReport | None) -> None:
    """Warns the caller of a scheme if its targets are out of reach, unless the report is traced."""
    if report is None or isinstance(report.hit_rate, jax.core.Tracer):
        return
    if message := out_of_reach(report):
        warnings.warn(message, stacklevel=3)
