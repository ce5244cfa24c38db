"""The papers' training recipes and that of the digits, which files in `configs/` start from.

Two traps of the papers' commands, kept: colour jitter has no effect beside RandAugment, and mixup
and cutmix draw one λ for each process's own 64 images, whatever the global batch.
"""

from ml_collections import ConfigDict

from structinit_jax.config import base_config
from structinit_jax.data.catalog import CATALOG
from structinit_jax.errors import InputError

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
IMAGES_PER_MIX = 64
EVAL_SPLITS = {"oxford_flowers102": "test", "food101": "validation", "imagenet2012": "validation"}
TRAIN_SPLITS = {"oxford_flowers102": "train+validation"}


def small_2024(model: str, dataset: str) -> ConfigDict:
    """The 2024 paper's CIFAR-10, CIFAR-100 and SVHN: 32² images, 200 epochs (section 5.2).

    Args:
      model: a name of `models.registry`, such as 'vit_tiny_patch2_32'.
      dataset: a name of `data.catalog`.
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
        config.model.positions = "sincos"
        config.model.pool = "mean"
    if config.model.name == "convmixer":
        config.num_epochs = 100.0
        config.learning_rate = 0.01
    return config


def small_2025(model: str, dataset: str) -> ConfigDict:
    """The 2025 paper's small sets at 224²: 300 epochs (its appendix).

    Args:
      model: a name of `models.registry`, such as 'vit_tiny_patch16_224'.
      dataset: a name of `data.catalog`.
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
    _mix_and_augment(config)
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
    config.checkpoint_every_steps = 1250
    config.log_every_steps = 50
    config.data.repeats = 3
    _mix_and_augment(config)
    return config


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


def _mix_and_augment(config: ConfigDict) -> None:
    """What the 2025 paper's recipes share."""
    config.label_smoothing = 0.1
    config.model.drop_path = 0.1
    config.model.dtype = "bfloat16"
    config.data.crop_fraction = 0.875
    config.augment.update(
        crop="resized",
        flip=0.5,
        rand_augment=RAND_AUGMENT,
        erasing=0.25,
        mixup=0.8,
        cutmix=1.0,
        mix_group=IMAGES_PER_MIX,
    )
