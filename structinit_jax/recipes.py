"""The papers' training recipes and that of the digits, which files in `configs/` start from.

A paper's ViT starts from the paper's own scheme, `impulse_2024` or `impulse_2025`, so that a file
of `configs/` is what was published; `--config.attention_init.name=impulse` is this package's own.

Two traps of the papers' commands, kept: colour jitter has no effect beside RandAugment, and mixup
and cutmix draw one λ for each process's own 64 images, whatever the global batch. Label smoothing
of 0.1 is timm's default.
"""

from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from structinit_jax.config import base_config
from structinit_jax.data.info import CATALOG
from structinit_jax.errors import InputError

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
IMAGES_PER_MIX = 64
EVAL_SPLITS = {"oxford_flowers102": "test", "food101": "validation", "imagenet2012": "validation"}
TRAIN_SPLITS = {"oxford_flowers102": "train+validation"}
SMALL_SETS_2024 = ("cifar10", "cifar100", "svhn_cropped")
SMALL_SETS_2025 = (
    "cifar10",
    "cifar100",
    "stl10",
    "oxford_flowers102",
    "oxford_iiit_pet",
    "food101",
)


def small_2024(model: str, dataset: str) -> ConfigDict:
    """The 2024 paper's CIFAR-10, CIFAR-100 and SVHN: 32² images, 200 epochs (section 5.2).

    Args:
      model: a name of `models.registry`, such as 'vit_tiny_patch2_32'.
      dataset: a name of `data.info`.
    """
    config = base_config(model)
    _set_dataset(config, dataset, image_size=32)
    config.num_epochs = 200.0
    config.batch_size = 512
    config.learning_rate = 1e-3
    config.final_learning_rate = 1e-6
    config.warmup_epochs = 10.0
    config.weight_decay = 0.01
    config.adam_epsilon = 1e-3
    config.clip_norm = 3.0
    config.eval_every_epochs = 10.0
    config.augment.flip = 0.5
    config.augment.rand_augment = RAND_AUGMENT
    if config.model.name == "vit":
        _set_vit_2024(config)
    if config.model.name == "convmixer":
        config.num_epochs = 100.0
        config.learning_rate = 0.01
    return config


def imagenet_2024(model: str) -> ConfigDict:
    """The 2024 paper's ImageNet-1K: 300 epochs with the settings of ConvMixer (section 5.2).

    The paper says no more. ConvMixer's settings are those of the command in its public README
    (github.com/locuslab/convmixer), ten processes of 64 images, and of timm as it stands there:
    weight decay 2e-5. One thing differs: its triangular learning rate is a cosine here, which that
    README takes to be as good. The test crop of 0.875 is timm's default.

    Args:
      model: a name of `models.registry`, such as 'vit_tiny_patch16_224'.
    """
    config = base_config(model)
    _set_dataset(config, "imagenet2012", image_size=224)
    config.num_epochs = 300.0
    config.batch_size = 640
    config.learning_rate = 0.01
    config.warmup_epochs = 0.0
    config.final_learning_rate = 1e-6
    config.weight_decay = 2e-5
    config.adam_epsilon = 1e-3
    config.clip_norm = 1.0
    _set_imagenet_pace(config)
    _mix_and_augment(config, mixup=0.5, cutmix=0.5)
    _set_vit_2024(config)
    return config


def small_2025(model: str, dataset: str) -> ConfigDict:
    """The 2025 paper's small sets at 224²: 300 epochs (its appendix).

    Args:
      model: a name of `models.registry`, such as 'vit_tiny_patch16_224'.
      dataset: a name of `data.info`.
    """
    config = base_config(model)
    _set_dataset(config, dataset, image_size=224)
    config.num_epochs = 300.0
    config.batch_size = 512
    config.learning_rate = 2e-3
    config.final_learning_rate = 1e-6
    config.warmup_epochs = 50.0
    config.weight_decay = 0.05
    config.clip_norm = 0.0
    config.eval_every_epochs = 10.0
    config.model.drop_path = 0.1
    _mix_and_augment(config, mixup=0.8, cutmix=1.0)
    if config.model.name == "vit":
        config.attention_init.name = "impulse_2025"
    return config


def imagenet_2025(model: str) -> ConfigDict:
    """The 2025 paper's ImageNet-1K: 300 epochs and 10 more at the final rate, batch 1024.

    Args:
      model: a name of `models.registry`, such as 'vit_base_patch16_224'.
    """
    config = base_config(model)
    _set_dataset(config, "imagenet2012", image_size=224)
    config.num_epochs = 310.0
    config.cooldown_epochs = 10.0
    config.batch_size = 1024
    config.learning_rate = 5e-4 * config.batch_size / 512
    config.warmup_epochs = 5.0
    config.warmup_learning_rate = 1e-6
    config.final_learning_rate = 1e-5
    config.weight_decay = 0.05
    config.clip_norm = 0.0
    config.data.repeats = 3
    config.model.drop_path = 0.1
    config.attention_init.name = "impulse_2025"
    _set_imagenet_pace(config)
    _mix_and_augment(config, mixup=0.8, cutmix=1.0)
    return config


def choose(row: str, columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Reads the text behind a config file's colon: one choice from each column, by commas.

    Columns that are left out at the end take their first choice.

    Args:
      row: such as 'cifar100,vit_small_patch2_32', or '' where nothing was given.
      columns: a column's name and its choices.

    Raises:
      InputError: naming what is no choice, and listing those that there are.
    """
    words = row.split(",") if row else []
    for word, (column, choices) in zip(words, columns.items(), strict=False):
        if word not in choices:
            raise InputError(
                f"{word!r} is no {column}: choose one of {', '.join(choices)}; behind the colon "
                f"stand {','.join(columns)}"
            )
    if len(words) > len(columns):
        raise InputError(
            f"{len(words)} words are too many: behind the colon stand {','.join(columns)}"
        )
    return words + [choices[0] for choices in list(columns.values())[len(words) :]]


def digits(model: str) -> ConfigDict:
    """scikit-learn's 8x8 handwritten digits, every pixel a token: minutes on two CPU cores.

    Args:
      model: a family of `models.registry`, to be sized.
    """
    config = base_config(model)
    _set_dataset(config, "digits", image_size=8)
    config.num_epochs = 20.0
    config.batch_size = 64
    config.learning_rate = 2e-3
    config.warmup_epochs = 3.0
    config.log_every_steps = 50
    config.eval_every_epochs = 5.0
    config.model.patch_size = 1
    config.data.channels = 1
    config.data.mean = (0.305,)
    config.data.std = (0.376,)
    return config


def _set_dataset(config: ConfigDict, name: str, image_size: int) -> None:
    if name not in CATALOG:
        raise InputError(f"data set {name!r}: choose one of {', '.join(CATALOG)}")
    config.model.num_classes = CATALOG[name].num_classes
    config.data.name = name
    config.data.image_size = image_size
    config.data.train_split = TRAIN_SPLITS.get(name, "train")
    config.data.eval_split = EVAL_SPLITS.get(name, "test")


def _set_vit_2024(config: ConfigDict) -> None:
    """The 2024 paper's ViT (section 5.1) and scheme."""
    config.model.positions = "sincos"
    config.model.pool = "mean"
    config.attention_init.name = "impulse_2024"


def _set_imagenet_pace(config: ConfigDict) -> None:
    config.checkpoint_every_steps = 1250
    config.log_every_steps = 50


def _mix_and_augment(config: ConfigDict, *, mixup: float, cutmix: float) -> None:
    """What the recipes of 224² images share."""
    config.label_smoothing = 0.1
    config.model.dtype = "bfloat16"
    config.data.crop_fraction = 0.875
    config.augment.update(
        crop="resized",
        flip=0.5,
        rand_augment=RAND_AUGMENT,
        erasing=0.25,
        mixup=mixup,
        cutmix=cutmix,
        mix_group=IMAGES_PER_MIX,
    )
