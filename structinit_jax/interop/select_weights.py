r"""Weight selection: a smaller model starts from evenly spaced elements of a larger one.

Xu et al. 2024, "Initializing Models with Larger Ones" (arXiv:2311.18823). From the command line:
train a larger model, export it, start a smaller one from it.

    C="--config=configs/vit_t_digits.py --config.model.patch_size=2"
    LARGE="--workdir=/tmp/large --config.model.width=128 --config.model.num_heads=8"
    python -m structinit_jax.main $C $LARGE
    python -m structinit_jax.export $C $LARGE --out=/tmp/large.safetensors
    python -m structinit_jax.main $C --workdir=/tmp/small --config.num_epochs=5.0 \
        --config.start_from=/tmp/large.safetensors
"""

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from structinit_jax.errors import InputError
from structinit_jax.interop.convert import from_timm, timm_entries, to_timm
from structinit_jax.interop.entries import check_array, like
from structinit_jax.models.vit import VisionTransformer, resample_positions

StateDict = Mapping[str, Any]  # of NumPy or JAX arrays
Student = TypeVar("Student", nnx.Module, StateDict)
HEADS = ("head", "head_dist", "classifier")
# Axes along which elements are places, and what must therefore be equal.
PLACES = {
    "patch_embed.proj.weight": (slice(2, 4), "patch size"),
    "stem.proj.weight": (slice(2, 4), "patch size"),
    "stem.0.weight": (slice(2, 4), "patch size"),
    "relative_position_bias_table": (slice(0, 1), "window size"),
    "mlp_tokens.fc1.weight": (slice(1, 2), "number of tokens"),
}


def select_weights(teacher: nnx.Module | StateDict, student: Student) -> Student:
    """Gives a smaller model the weights selected from a larger one.

        student = select_weights(vit_small, vit_tiny)                       # models
        student = select_weights(load_file("vit_small.safetensors"), vit_tiny)
        state_dict = select_weights(timm_s.state_dict(), timm_ti.state_dict())  # of NumPy arrays

    The student takes the teacher's first layers. If it has m of the teacher's n elements along an
    axis, it takes every (n / m)-th one from the first on if m divides n, else those nearest to m
    evenly spaced points from the first to the last.

    Models are selected in timm's layout. As in the published program, query, key and value are then
    3 h d outputs of one linear layer, so a student's head may mix channels of several heads.

    Patch and window size must be equal. A learned position table of another grid is first resampled
    if the student is a model, as timm does it; the table's grid is taken to be square. The head,
    fixed position encodings and integers stay the student's.

    Args:
      teacher: The larger model, or its state dict in timm's layout.
      student: The smaller model of the same family, or its state dict. It is not changed.

    Returns:
      A model or state dict like `student` with the selected weights and the student's head.

    Raises:
      InputError: The student is larger than the teacher or of another family. The message names
        the first weight that does not fit.
    """
    families = {type(model) for model in (teacher, student) if isinstance(model, nnx.Module)}
    if len(families) > 1:
        raise InputError(
            f"teacher is a {type(teacher).__name__} and student a {type(student).__name__}: "
            "weights are selected within a family"
        )
    large = to_timm(teacher) if isinstance(teacher, nnx.Module) else teacher
    if not isinstance(student, nnx.Module):
        _check_names(large, student)
        for name in student:
            if name.endswith("pos_embed") and large[name].shape[:2] != student[name].shape[:2]:
                raise InputError(
                    f"{name} has shape {large[name].shape} in teacher and {student[name].shape} in "
                    "student: pass the student as a model, whose grid is known, or first resample "
                    "the table with models.vit.resample_positions"
                )
        return _select_all(large, student)
    # Older files of timm hold buffers that are functions of the sizes.
    buffers = {_without_layers(e.name) for e in timm_entries(student) if e.encode is None}
    large = {name: array for name, array in large.items() if _without_layers(name) not in buffers}
    small = to_timm(student)
    _check_names(large, small)
    if isinstance(student, VisionTransformer) and student.positions is not None:
        large["pos_embed"] = _fit_positions(large["pos_embed"], student)
    selected = _select_all(large, small)
    for entry in timm_entries(student):
        if not entry.paths and entry.name in small:
            entry.decode(np.asarray(large[entry.name]), [])  # refuses another position encoding
            selected[entry.name] = small[entry.name]
    model = nnx.clone(student)
    from_timm(model, selected)
    return model


def _fit_positions(table: Any, student: VisionTransformer) -> Any:
    """Resamples learned positions to the student's grid."""
    check_array("teacher", "pos_embed", table)
    num_tokens = table.shape[-2] - student.config.num_prefix
    if num_tokens == math.prod(student.grid):
        return table
    side = math.isqrt(max(num_tokens, 0))
    if side**2 != num_tokens:
        raise InputError(
            f"pos_embed has shape {table.shape} in teacher: its {num_tokens} image tokens are not "
            f"a square grid, so it cannot be resampled to {student.grid}"
        )
    return resample_positions(jnp.asarray(table[0], jnp.float32), (side, side), student.grid)[None]


def _select_all(large: StateDict, small: StateDict) -> dict[str, Any]:
    selected = {}
    for name, array in small.items():
        for argument, state_dict in (("student", small), ("teacher", large)):
            if name in state_dict:  # the teacher may lack a head
                check_array(argument, name, state_dict[name])
        kept = _is_head(name) or not jnp.issubdtype(array.dtype, jnp.floating)
        selected[name] = array if kept else like(_select(name, large[name], array.shape), array)
    return selected


def _check_names(large: StateDict, small: StateDict) -> None:
    """Requires equal names, except for a head and for more layers in the teacher."""
    teachers, students = (set(map(_without_layers, names)) for names in (large, small))
    for name in small:
        if name not in large and not _is_head(name):
            if _without_layers(name) in teachers:
                raise InputError(
                    f"student has {name}, a layer that teacher lacks: use a deeper teacher"
                )
            raise InputError(f"student has {name}, which teacher lacks: use models of one family")
    for name in large:
        if _without_layers(name) not in students and not _is_head(name):
            raise InputError(f"teacher has {name}, which student lacks: use models of one family")


def _select(name, teacher, shape):
    """Takes evenly spaced elements along every axis."""
    if teacher.ndim != len(shape):
        raise InputError(f"{name} has shape {teacher.shape} in teacher and {shape} in student")
    for end, (axes, what) in PLACES.items():
        if name.endswith(end) and teacher.shape[axes] != shape[axes]:
            raise InputError(
                f"{name} has shape {teacher.shape} in teacher and {shape} in student: use models "
                f"of the same {what}"
            )
    for axis, (have, want) in enumerate(zip(teacher.shape, shape, strict=True)):
        if want > have:
            raise InputError(
                f"student needs {want} elements along axis {axis} of {name}, but teacher has "
                f"{have}: the student must be the smaller model"
            )
        if have % want == 0:
            indices = np.arange(want) * (have // want)
        else:
            indices = np.round(np.linspace(0, have - 1, want)).astype(np.int32)
        teacher = teacher.take(indices, axis=axis)
    return teacher


def _is_head(name: str) -> bool:
    return any(part in HEADS for part in name.split("."))


def _without_layers(name: str) -> str:
    """Replaces the layer numbers in a name."""
    return re.sub(r"(?:(?<=\.)|(?<=_)|^)\d+(?=\.)", "*", name)
