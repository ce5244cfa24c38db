"""Why fixed spatial filters are enough: spans of filters, and proposition 1 of the 2024 paper.

Section 3 and appendix A of "Structured Initialization for Attention in Vision Transformers". One
output channel of a block with fixed filters h_i is y = Σ_i w_i h_i * x_i over channels x_i. Inputs
of rank k are x_i = Σ_j a_ji z_j, so that y = Σ_j (Σ_i w_i a_ji h_i) * z_j: each z_j meets a filter
of its own, and channel mixing w reaches every set of them if the D vectors a_i ⊗ h_i span k M
dimensions, M being the dimension of the filters' span.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

TOLERANCE = 1e-6  # smaller values count as zero, relative to the largest


class Spans(NamedTuple):
    """M and k of a set of vectors that is M-k spanned (definition 1).

    Attributes:
      dimension: Dimension M of the space that the vectors span.
      count: Largest number k of disjoint subsets that each span it.
    """

    dimension: int
    count: int


def filter_rank(kernels: Float[np.ndarray, "D f f"]) -> int:
    """The dimension of the span of the filters: f² at most."""
    return int(np.linalg.matrix_rank(_vectors(kernels), rtol=TOLERANCE))


def stable_rank(x: Float[np.ndarray, "N D"]) -> float:
    """Σ σ² / σ_max² over the singular values, which is at most the rank (remark 1)."""
    values = np.linalg.svd(x, compute_uv=False)
    return float((values**2).sum() / values[0] ** 2)


def spans(kernels: Float[np.ndarray, "D f f"]) -> Spans:
    """The M and the largest k for which the filters are M-k spanned.

    Members left over belong to any subset, so that k is the number of disjoint bases that can be
    found. They are found by matroid partition (Edmonds 1965): a filter that fits into none of the
    bases takes the place of one that another base can take, and so on.
    """
    vectors = _vectors(kernels)
    dimension = filter_rank(kernels)
    bases: list[list[int]] = []
    while dimension and (len(bases) + 1) * dimension <= len(vectors):
        bases.append([])
        used = {i for base in bases for i in base}
        for i in range(len(vectors)):
            if len(used) == len(bases) * dimension:
                break
            if i not in used and _insert(vectors, bases, i):
                used.add(i)
        if len(used) < len(bases) * dimension:
            return Spans(dimension, len(bases) - 1)
    return Spans(dimension, len(bases))


def recovering_mixing(
    x: Float[np.ndarray, "N D"],
    kernels: Float[np.ndarray, "D f f"],
    trained_kernels: Float[np.ndarray, "D f f"],
    trained_mixing: Float[np.ndarray, "D E"],
) -> Float[np.ndarray, "D E"]:
    """Channel mixing W by which fixed filters do what trained ones do (proposition 1).

    W of least squares for Σ_i w_ie a_ji h_i = Σ_i w'_ie a_ji h'_i, over the k patterns z_j of the
    input's singular value decomposition. If it is met, then so is T(X) = T'(X), for convolution at
    any size of image and with any padding.

    It is met where the filters are M-k spanned, the trained ones lie in their span, and the a_i are
    in general position: the a_i ⊗ h_i must span k M dimensions. The condition on the filters alone
    is not enough: with filters a, b, a, b, whose span is 2-2 spanned, on inputs z1, z2, z1, z2, no
    mixing lets b act on z1.

    Args:
      x: the input; a channel is a column.
      kernels: h, the fixed filter of each channel.
      trained_kernels: h'.
      trained_mixing: W' of the trained block, with E output channels.
    """
    _, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    a = vt[s > TOLERANCE * s[0]]
    fixed, trained = (
        np.einsum("ji,iv->jvi", a, _vectors(k)).reshape(-1, x.shape[1])
        for k in (kernels, trained_kernels)
    )
    return np.linalg.lstsq(fixed, trained @ trained_mixing, rcond=TOLERANCE)[0]


def _insert(vectors, bases, new) -> bool:
    """Adds a vector to the bases by the shortest chain of exchanges; returns whether one exists."""
    came_from = {new: None}  # vector -> (the one that would push it out, from which base)
    queue = [new]
    for i in queue:
        for number, base in enumerate(bases):
            if i in base:
                continue
            circuit = _circuit(vectors, base, i)
            if circuit is None:
                _exchange(bases, came_from, i, number)
                return True
            for j in circuit:
                if j not in came_from:
                    came_from[j] = (i, number)
                    queue.append(j)
    return False


def _circuit(vectors, base, i) -> list[int] | None:
    """Members of the base that the vector is a combination of, or None if it is independent."""
    members = vectors[base].T  # [f², members]
    weights = np.linalg.lstsq(members, vectors[i], rcond=None)[0] if base else np.zeros(0)
    scale = np.linalg.norm(vectors[i])
    if np.linalg.norm(vectors[i] - members @ weights) > TOLERANCE * scale:
        return None
    sizes = np.abs(weights) * np.linalg.norm(members, axis=0)
    return [j for j, size in zip(base, sizes, strict=True) if size > TOLERANCE * scale]


def _exchange(bases, came_from, i, number) -> None:
    """Moves i into a base, the vector that replaces it into the base of i, and so on."""
    while i is not None:
        step = came_from[i]
        if step is not None:
            bases[step[1]].remove(i)
        bases[number].append(i)
        i, number = step if step is not None else (None, number)


def _vectors(kernels):
    return kernels.reshape(len(kernels), -1).astype(np.float64)
