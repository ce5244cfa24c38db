"""ViTs on ImageNet-1K: tables 2 and 5 of the 2025 paper.

    python -m structinit_jax.main --workdir=DIR --config.data.data_dir=TFDS \
        --config=configs/vit_2025_imagenet.py:vit_base_patch16_224,mimetic

Paper: "Structured Initialization for Vision Transformers" (2025).

Pass the row after a colon: vit_base_patch16_224, vit_small_patch16_224 or vit_tiny_patch16_224;
then the scheme, impulse_2025 (the default, and the paper's), mimetic, default, or our impulse. All
rows keep the learned positions.

All settings are from the authors' command (github.com/osiriszjq/structured_initialization):
learning rate 1e-3, every image three times, so that an epoch sees a third of the images, and one
mixup lambda per 64 images (sixteen processes; their rebuttal uses eight GPUs with 128 images each,
--config.augment.mix_group=128). From the program: all rows start the whole model from PyTorch's
defaults (`model.base_init`). Not stated anywhere: a recipe for ViT-S and ViT-T, for which we use
this one.

Table 5 and figure 5 train ViT-B in three configurations, which differ in the scaling of the
learning rate and in repeated augmentation. We do not know the values of two of them;
configs/papers.csv uses --config.data.repeats=1 for one, and for the other also
--config.learning_rate=0.0005, the command's rate before scaling.

Hardware: 8 or more data-center GPUs or TPUs. Time: not measured.
Accuracy to expect: configs/papers.csv has the published figures of ViT-B only; not run here.
"""

from pathlib import Path
from typing import Literal

from structinit_jax.config import load_config

RECIPE = Path(__file__).with_name("vit_2025_small.py")  # augmentation and regularization
MODELS = ("vit_base_patch16_224", "vit_small_patch16_224", "vit_tiny_patch16_224")


def get_config(
    model: Literal[*MODELS] = "vit_base_patch16_224",
    scheme: Literal["impulse_2025", "mimetic", "default", "impulse"] = "impulse_2025",
):
    config = load_config(f"{RECIPE}:cifar10,{model},{scheme}")
    config.num_epochs = 310.0
    config.cooldown_epochs = 10.0  # of the 310
    config.batch_size = 1024
    config.learning_rate = 1e-3  # 5e-4 * batch_size / 512
    config.warmup_epochs = 5.0
    config.final_learning_rate = 1e-5
    config.log_every_steps = 50
    config.eval_every_epochs = 5.0
    config.checkpoint_every_steps = 1251  # one epoch

    config.model.num_classes = 1000

    config.data.name = "imagenet2012"
    config.data.eval_split = "validation"
    config.data.repeats = 3  # repeated augmentation
    return config
