"""Weight selection: a smaller model takes evenly spaced elements of a larger one's weights.

Xu et al. 2024, "Initializing Models with Larger Ones" (arXiv:2311.18823): the smaller model takes
the first layers of the larger one, and of each weight evenly spaced elements along every axis. The
head is left out.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from structinit_jax.errors import InputError
from structinit_jax.interop.leaves import Leaves, check_array, flatten, like

HEADS = ("head", "head_dist", "classifier")  # names of the parts that are left out
STACK = "blocks"  # in our models, what is below this name has a leading layer axis
QKV = ("query", "key", "value")


def select_weights(teacher: Any, student: Any) -> Any:
    """Gives a smaller model the weights that weight selection takes from a larger one.

        student = select_weights(vit_small, vit_tiny)                       # modules or states
        state = select_weights(timm_s.state_dict(), timm_ti.state_dict())   # of NumPy arrays

    Along an axis of n elements of which m are wanted, these are every (n / m)-th one from the first
    on if m divides n, else the m elements nearest to evenly spaced ones from the first to the last.
    Layers are not spread but the first ones.

    Both layouts give the same weights. timm holds the heads of query, key and value one behind the
    other, as 3 h d outputs of one layer, and the published program selects along that axis. Here
    they are separate [D, h, d] arrays, so they are laid out like timm's for the selection and taken
    apart again. In effect a head of the student draws from one or more heads of the teacher as the
    flat numbers fall: heads do not stay whole.

    Position tables are selected along their tokens as any axis is, which does not resample the
    grid: take a larger model with the student's grid. What is no weight, such as counters and
    index tables of integers, stays the student's.

    Args:
      teacher: the larger model: a module or state of NNX, a nested dict of parameters, or a timm
        state dict of NumPy arrays.
      student: the smaller one, of the same kind and family. It is not changed.

    Returns:
      What the student is, with the selected weights and its own head.

    Raises:
      InputError: naming the first weight that does not fit, if the student is larger than the
        teacher or of another family.
    """
    if isinstance(teacher, nnx.Module) and type(teacher) is not type(student):
        raise InputError(
            f"teacher is a {type(teacher).__name__} and student a {type(student).__name__}: "
            "weights are selected within a family"
        )
    large, _ = flatten(teacher)
    small, rebuild = flatten(student)
    _check_family(large, small)
    new = dict(small)
    for leaves in (large, small):
        for path in small:
            if path in leaves:
                check_array(path, leaves[path])
    for paths in _groups(small):
        teachers, students = ([leaves[path] for path in paths] for leaves in (large, small))
        selected = _select(paths, teachers, students)
        new |= {path: like(w, small[path]) for path, w in zip(paths, selected, strict=True)}
    return rebuild(new)


def _check_family(large: Leaves, small: Leaves) -> None:
    """Both must have the same names, but for a head and for further layers of the teacher."""
    parts_of_both = [set(map(_of_any_layer, leaves)) for leaves in (large, small)]
    for path in small:
        if path in large or _is_head(path):
            continue
        if _of_any_layer(path) in parts_of_both[0]:
            raise InputError(
                f"student has {path}, a layer that teacher lacks: weights are selected from a "
                "model that is at least as deep"
            )
        raise InputError(
            f"student has {path}, which teacher lacks: weights are selected within a family, from "
            "a model with the same parts under the same names"
        )
    for path in large:
        if _of_any_layer(path) not in parts_of_both[1] and not _is_head(path):
            raise InputError(
                f"teacher has {path}, which student lacks: weights are selected within a family, "
                "for a model with the same parts under the same names"
            )


def _groups(small: Leaves) -> Iterator[tuple[str, ...]]:
    """The weights to select: query, key and value of a layer of ours together, others alone."""
    for path, leaf in small.items():
        if _is_head(path) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        part = re.fullmatch(r"(.*/)(query|key|value)(/kernel|/bias)", path)
        if part is None:
            yield (path,)
        elif part[2] == QKV[0]:
            yield tuple(part[1] + name + part[3] for name in QKV)


def _select(paths: tuple[str, ...], teachers: list[Any], students: list[Any]) -> list[Any]:
    """What the student's arrays become."""
    for path, teacher, student in zip(paths, teachers, students, strict=True):
        if teacher.ndim != student.ndim:
            raise InputError(
                f"{path} has shape {teacher.shape} in teacher and {student.shape} in student: "
                "weights are selected within a family, along equally many axes"
            )
    stacked = re.search(rf"(?:^|/){STACK}/(?!\d+/)", paths[0]) is not None
    shapes = [_flat_shape(paths[0], arrays[0].shape) for arrays in (teachers, students)]
    xp = np if isinstance(teachers[0], np.ndarray) else jnp
    array = xp.concatenate([t.reshape(shapes[0]) for t in teachers], axis=-1)
    wanted = (*shapes[1][:-1], len(paths) * shapes[1][-1])
    for axis, (have, want) in enumerate(zip(array.shape, wanted, strict=True)):
        of_layers = stacked and axis == 0
        if want > have:
            raise InputError(
                f"student needs {want} {'layers' if of_layers else 'elements'} along axis {axis} "
                f"of {', '.join(paths)}, but teacher has {have}: the student must be the smaller"
            )
        indices = np.arange(want) if of_layers else _evenly_spaced(have, want)
        array = xp.take(array, indices, axis=axis)
    parts = xp.split(array, len(paths), axis=-1)
    return [part.reshape(s.shape) for part, s in zip(parts, students, strict=True)]


def _flat_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which heads and their channels are one axis, as in timm."""
    if path.endswith(("/query/kernel", "/query/bias")):
        return (*shape[:-2], shape[-2] * shape[-1])
    if path.endswith("/out/kernel"):
        return (*shape[:-3], shape[-3] * shape[-2], shape[-1])
    return shape


def _evenly_spaced(have: int, want: int) -> np.ndarray:
    if have % want == 0:
        return np.arange(want) * (have // want)
    return np.round(np.linspace(0, have - 1, want)).astype(np.int32)


def _is_head(path: str) -> bool:
    return any(part in HEADS for part in path.split("/"))


def _of_any_layer(path: str) -> str:
    """The path without the numbers of layers."""
    return re.sub(r"(?:(?<=/)|(?<=_)|^)\d+(?=/)", "*", path)
