"""ViT-T/16 on ImageNet-1K: the 2024 paper's table 2, last column.

    python -m structinit_jax.main --config=configs/vit_2024_imagenet.py:mimetic --workdir=DIR \
        --config.data.data_dir=TFDS

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), section 5.2. Pass
the initialization after a colon: impulse_2024 (the default, and the paper's), mimetic,
truncated_normal or kaiming_uniform (the scheme default with timm's and PyTorch's base), or our
impulse; then the kernel size of the impulses, 3 (the default) or 5.

From the text: 300 epochs with the training settings of ConvMixer. The authors' command
(github.com/osiriszjq/structured_init) has other settings, and this file follows the command: eight
processes with 512 images each, learning rate 4e-3, 50 epochs of warm-up, weight decay 0.05, mixup
1.0, cutmix 0.8, random erasing, mixed precision (float16 there, bfloat16 here). From their program:
all rows except truncated_normal start the whole model from PyTorch's defaults (`model.base_init`);
mean, standard deviation and test crop are as in timm's vit_tiny_patch16_224.

Hardware: 8 or more data-center GPUs or TPUs. Time: not measured.
Accuracy to expect: the published figures are in configs/papers.csv; not run here.
"""

from pathlib import Path
from typing import Literal

from structinit_jax.config import load_config

RECIPE = Path(__file__).with_name("vit_2024_small.py")  # schedule, schemes and augmentation


def get_config(
    init: Literal[
        "impulse_2024", "mimetic", "truncated_normal", "kaiming_uniform", "impulse"
    ] = "impulse_2024",
    kernel_size: Literal["3", "5"] = "3",
):
    config = load_config(f"{RECIPE}:cifar10,vit_tiny_patch2_32,{init},{kernel_size}")
    config.num_epochs = 300.0
    config.batch_size = 4096
    config.learning_rate = 4e-3
    config.warmup_epochs = 50.0
    config.final_learning_rate = 0.0
    config.weight_decay = 0.05
    config.adam_epsilon = 1e-8
    config.clip_norm = 0.0
    config.log_every_steps = 50
    config.eval_every_epochs = 5.0
    config.checkpoint_every_steps = 312  # one epoch

    config.model.num_classes = 1000
    config.model.patch_size = 16

    config.augment.crop = "resized"
    config.augment.erasing = 0.25
    config.augment.mixup = 1.0
    config.augment.cutmix = 0.8
    config.augment.mix_group = 512  # one lambda for the images of one process, as in the program

    config.data.name = "imagenet2012"
    config.data.eval_split = "validation"
    config.data.image_size = 224
    config.data.crop_fraction = 0.9
    config.data.mean = (0.5, 0.5, 0.5)
    config.data.std = (0.5, 0.5, 0.5)
    return config
