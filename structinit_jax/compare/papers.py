"""The tables of both papers as grids of config rows, with the published accuracies.

"2024" is "Structured Initialization for Attention in Vision Transformers", "2025" is "Structured
Initialization for Vision Transformers". A row's name is its place in the table, and its config is
`FILE:ROW` in `configs/`. Accuracies of the 2025 paper that we do not know are left out.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One cell of a table.

    Attributes:
      location: The --config of its runs.
      published: Accuracy in percent, if it is known.
      fields: Further fields as on the command line.
      from_teacher: Whether its weights are selected from the table's teacher.
      published_training: Training accuracy in percent after some epochs, as pairs.
    """

    location: str
    published: float | None = None
    fields: tuple[tuple[str, str], ...] = ()
    from_teacher: bool = False
    published_training: tuple[tuple[int, float], ...] = ()


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
      title: What it compares.
      hardware: Hardware that it needs.
      rows: Rows by name, which is the choices of the row, separated by commas.
      baseline: Word that replaces the last one of a row's name to give its baseline's name.
      teacher: The --config of a model that is trained first, or ''.
    """

    title: str
    hardware: str
    rows: dict[str, Row]
    baseline: str
    teacher: str = ""


ONE_GPU = "one GPU"
MANY = "8 or more data-center GPUs or TPUs"
INITS_2024 = ("kaiming_uniform", "truncated_normal", "mimetic", "impulse3", "impulse5")
INITS_2025 = ("default", "mimetic", "impulse")
SMALL_SETS = ("cifar10", "cifar100", "stl10", "oxford_flowers102", "oxford_iiit_pet", "food101")


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def _by_init(location: str, columns: Sequence[str], figures: str) -> dict[str, Row]:
    """Rows of a table that has a line for each of `INITS_2024`.

    Args:
      location: Their config, with the names {column} and {init}.
      columns: Names of the columns.
      figures: Published accuracies, a line for each initialization.
    """
    lines = [_numbers(line) for line in figures.strip().splitlines()]
    by_column = zip(columns, zip(*lines, strict=True), strict=True)
    return {
        f"{column},{init}": Row(location.format(column=column, init=init), figure)
        for column, values in by_column
        for init, figure in zip(INITS_2024, values, strict=True)
    }


def _table_2() -> dict[str, Row]:
    small = _by_init(
        "configs/vit_2024_small.py:{column},vit_tiny_patch2_32,{init}",
        ("cifar10", "cifar100", "svhn_cropped"),
        """
        86.36 63.50 94.51
        88.63 66.50 93.20
        91.16 70.40 97.53
        91.62 68.81 97.21
        90.67 70.46 97.23
        """,
    )
    large = _by_init(
        "configs/vit_2024_imagenet.py:{init}", ("imagenet",), "74.11\n73.42\n74.34\n74.24\n74.40"
    )
    return small | large


def _depth_8(widths: Sequence[int], figures: str) -> dict[str, Row]:
    columns = [f"vit_w{width}_h{heads}_patch2_32" for width in widths for heads in (4, 8, 16, 32)]
    return _by_init("configs/vit_2024_small.py:cifar10,{column},{init}", columns, figures)


def _convmixer() -> dict[str, Row]:
    filters = ("trained", "random", "impulse", "box")
    published = {
        "3": _numbers("91.76 90.72 90.68 81.70  92.82 92.15 92.20 81.90"),
        "5": _numbers("92.69 90.87 90.41 80.57  93.90 92.72 91.91 81.19"),
        "8": _numbers("92.34 88.12 87.82 78.95  92.96 90.09 89.61 80.10"),
    }
    models = ("convmixer_256_8", "convmixer_512_6")  # the program's depth; the text says 8 for both
    return {
        f"{model},{size},{kind}": Row(f"configs/convmixer_2024.py:{model},{size},{kind}", figure)
        for size, figures in published.items()
        for (model, kind), figure in zip(itertools.product(models, filters), figures, strict=True)
    }


def _pseudo_inputs() -> dict[str, Row]:
    kinds = ("positions", "uniform", "positions+uniform")
    lines = """
        90.75 90.22 90.39 90.24  89.90 90.18 90.19 91.24
        86.90 86.10 87.99 87.86  87.35 85.56 86.40 86.61
        89.62 88.40 89.61 89.50  88.99 89.29 89.05 89.47
        90.34 89.21 90.96 89.83  90.76 90.00 91.20 90.34
        86.05 86.50 86.13 86.44  87.09 87.22 86.03 86.13
        89.91 89.99 89.96 89.93  89.94 89.89 89.60 89.07
        90.07 89.19 90.31 89.56  90.03 90.72 90.40 90.76
        86.07 86.52 85.55 85.94  86.02 86.07 86.52 85.55
        89.63 89.33 90.02 88.92  89.52 89.28 89.29 89.33
    """
    models = ("vit_tiny_patch2_32", "vit_tiny_h8_patch2_32")
    columns = list(itertools.product(("same", "different"), models, ("3", "5")))
    rows = {}
    for (first, following), line in zip(
        itertools.product(kinds, kinds), lines.strip().splitlines(), strict=True
    ):
        for (layers, model, size), figure in zip(columns, _numbers(line), strict=True):
            location = f"configs/vit_2024_pseudo_inputs.py:{model},{first},{following}"
            fields = (
                ("attention_init.kernel_size", size),
                ("attention_init.same_layers", str(layers == "same")),
            )
            rows[f"{layers},{model},{size},{first},{following}"] = Row(location, figure, fields)
    return rows


def _small_2025(sets: Sequence[str]) -> dict[str, Row]:
    return {
        f"{name},{init}": Row(f"configs/vit_2025_small.py:{name},vit_tiny_patch16_224,{init}")
        for name, init in itertools.product(sets, INITS_2025)
    }


def _training_curves() -> dict[str, Row]:
    """Figure 3, with the training accuracies of the rebuttal.

    The rebuttal does not say whether its images are augmented. Ours are not.
    """
    figures = {
        "default": ((10, 47.95), (50, 61.51), (100, 76.87)),
        "mimetic": ((10, 49.05), (50, 63.62), (100, 77.64)),
        "impulse": ((10, 54.62), (50, 69.51), (100, 81.87)),
    }
    curves = {
        name: row._replace(
            published_training=figures[name.split(",")[-1]],
            fields=(("data.train_eval_split", "train[:10000]"),),
        )
        for name, row in _small_2025(("cifar10",)).items()
    }
    return curves | _imagenet_2025(("vit_base_patch16_224",))


def _imagenet_2025(models: Sequence[str]) -> dict[str, Row]:
    # Of appendix table 5, which the authors' rebuttal puts in the place of table 2's first figures.
    base = {"default": 81.24, "mimetic": 80.56, "impulse": 81.83}
    return {
        f"{model},{init}": Row(
            f"configs/vit_2025_imagenet.py:{model},{init}",
            base[init] if model == "vit_base_patch16_224" else None,
        )
        for model, init in itertools.product(models, INITS_2025)
    }


def _swin_and_mixer() -> dict[str, Row]:
    swins = ("swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224")
    columns = [*itertools.product(SMALL_SETS, swins), ("cifar10", "mixer_b16_224")]
    return {
        f"{name},{model},{scheme}": Row(
            f"configs/swin_mixer_2025_small.py:{name},{model}",
            fields=(("attention_init.name", scheme),),
        )
        for (name, model), scheme in itertools.product(columns, INITS_2025)
    }


def _weight_selection() -> dict[str, Row]:
    rows = _small_2025(SMALL_SETS)
    selected = {
        f"{name},selected": rows[f"{name},default"]._replace(from_teacher=True)
        for name in SMALL_SETS
    }
    return rows | selected


TABLES = {
    "2024.1": Table(
        "ViT-T with learned and sin-cos positions, class token and pooling, on CIFAR-10",
        ONE_GPU,
        {
            f"{positions},{pool}": Row(f"configs/vit_2024_settings.py:{positions},{pool}", figure)
            for positions, pool, figure in (
                ("learned", "class_token", 81.23),
                ("learned", "mean", 82.23),
                ("sincos", "class_token", 83.17),
                ("sincos", "mean", 85.30),
            )
        },
        "class_token",
    ),
    "2024.2": Table(
        "Initializations of ViT-T on CIFAR-10, CIFAR-100, SVHN and ImageNet-1K",
        f"{ONE_GPU}; {MANY} for ImageNet",
        _table_2(),
        "truncated_normal",
    ),
    "2024.3": Table(
        "Initializations of ViTs with more heads on CIFAR-100",
        ONE_GPU,
        _by_init(
            "configs/vit_2024_small.py:cifar100,{column},{init}",
            (
                *("vit_tiny_patch2_32", "vit_tiny_h8_patch2_32"),
                *("vit_small_patch2_32", "vit_small_h16_patch2_32"),
            ),
            """
            63.50 63.09 66.06 64.61
            66.50 66.48 66.81 67.25
            70.40 69.93 73.86 72.72
            68.81 70.79 75.97 75.40
            70.46 70.86 73.49 74.27
            """,
        ),
        "truncated_normal",
    ),
    "2024.4": Table(
        "ConvMixer with trained and fixed spatial filters on CIFAR-10",
        ONE_GPU,
        _convmixer(),
        "trained",
    ),
    "2024.5": Table(
        "ViTs of depth 8, widths 256 and 512, with 4 to 32 heads on CIFAR-10",
        ONE_GPU,
        _depth_8(
            (256, 512),
            """
            85.71 85.16 84.62 84.24  87.28 86.50 85.07 84.17
            87.27 87.10 87.30 86.71  87.49 87.03 87.74 87.39
            90.52 89.45 88.97 86.83  90.94 90.75 90.35 89.27
            89.95 90.67 90.59 88.69  91.55 91.75 91.49 91.18
            90.08 90.38 90.61 89.14  90.92 91.67 91.87 90.84
            """,
        ),
        "truncated_normal",
    ),
    "2024.6": Table(
        "Pseudo inputs of the solve, ViT-T with 3 and 8 heads on CIFAR-10",
        ONE_GPU,
        _pseudo_inputs(),
        "positions",
    ),
    "2024.7": Table(
        "ViTs of depth 8, widths 64 and 128, with 4 to 32 heads on CIFAR-10",
        ONE_GPU,
        _depth_8(
            (64, 128),
            """
            81.26 80.76 80.71 79.89  84.46 83.83 83.05 82.70
            81.57 82.12 81.57 80.40  86.19 86.00 85.39 84.37
            84.59 82.78 81.78 79.71  87.90 87.49 85.51 83.68
            82.73 84.12 81.59 79.39  88.49 87.75 87.63 84.42
            83.43 82.66 80.80 79.11  87.82 88.02 87.57 84.79
            """,
        ),
        "truncated_normal",
    ),
    "2025.1": Table(
        "Initializations of ViT-T on six small data sets at 224 pixels",
        ONE_GPU,
        _small_2025(SMALL_SETS),
        "default",
    ),
    "2025.2": Table(
        "Initializations of ViT-T, ViT-S and ViT-B on ImageNet-1K",
        MANY,
        _imagenet_2025(("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")),
        "default",
    ),
    "2025.3": Table(
        "Swin and MLP-Mixer (our own impulse) on six small data sets; Mixer on CIFAR-10",
        "one GPU or more",
        _swin_and_mixer(),
        "default",
    ),
    "2025.4": Table(
        "ViT-T on six small data sets against weights selected from a ViT-S that is trained first",
        f"{MANY} for the teacher",
        _weight_selection(),
        "default",
        teacher="configs/vit_2025_imagenet.py:vit_small_patch16_224,impulse",
    ),
    "2025.figure3": Table(
        "Training curves of ViT-T on CIFAR-10 and ViT-B on ImageNet-1K",
        MANY,
        _training_curves(),
        "default",
    ),
}
