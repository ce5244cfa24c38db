"""ViTs on small data sets at 224 pixels: tables 1 and 4 of the 2025 paper.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/vit_2025_small.py:food101,vit_tiny_patch16_224,mimetic

Paper: "Structured Initialization for Vision Transformers" (2025).

Pass the row after a colon: the data set, cifar10, cifar100, stl10, oxford_flowers102,
oxford_iiit_pet or food101; then the model, vit_tiny_patch16_224 (the default, and the paper's),
vit_small_patch16_224 or vit_base_patch16_224; then the scheme, impulse_2025 (the default, and the
paper's), mimetic, default, or our impulse. All rows keep the learned positions.

All settings are from the authors' command (github.com/osiriszjq/structured_initialization): eight
processes with 64 images each, 300 epochs, learning rate 2e-3, 50 epochs of warm-up from 1e-6. Its
color jitter has no effect with RandAugment. The command sets a decay for averaged weights but does
not enable them. From the program: all rows start the whole model from PyTorch's defaults
(`model.base_init`). The program can also scale positions, Q and K, and V and projection (with
mimetic and default, `attention_init.position_scale`, `query_key_scale` and `value_scale`); we do
not know the factors of the paper. The splits are those in the code of Xu et al. 2024
(github.com/OscarXZQ/weight-selection), whose settings the authors say they use.

Table 4 selects weights from a larger pretrained model. Its rows read three files from the working
directory. For vit_small_impulse_2025.safetensors, train
vit_2025_imagenet.py:vit_small_patch16_224,impulse_2025, and rename the model.safetensors that
`structinit_jax.export` writes; for vit_small_default.safetensors, do the same with the scheme
default. vit_small_imagenet21k.safetensors is a model pretrained on ImageNet-21K, such as timm's
vit_small_patch16_224.augreg_in21k; which weights the authors used is not stated.

Hardware: one GPU or more. Time: not measured.
Accuracy to expect: unknown (configs/papers.csv has no published test accuracy); not run here.
"""

from typing import Literal

from structinit_jax.config import base_config

# Data set -> number of classes, training split, test split.
DATASETS = {
    "cifar10": (10, "train", "test"),
    "cifar100": (100, "train", "test"),
    "stl10": (10, "train", "test"),
    "oxford_flowers102": (102, "train+validation", "test"),
    "oxford_iiit_pet": (37, "train", "test"),
    "food101": (101, "train", "validation"),
}
MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")


def get_config(
    dataset: Literal[*DATASETS] = "cifar10",
    model: Literal[*MODELS] = "vit_tiny_patch16_224",
    scheme: Literal["impulse_2025", "mimetic", "default", "impulse"] = "impulse_2025",
):
    num_classes, train_split, eval_split = DATASETS[dataset]
    config = base_config(model)
    config.num_epochs = 300.0
    config.batch_size = 512
    config.label_smoothing = 0.1
    config.schedule = "timm_cosine"
    config.learning_rate = 2e-3
    config.warmup_epochs = 50.0
    config.warmup_learning_rate = 1e-6
    config.final_learning_rate = 1e-6
    config.weight_decay = 0.05
    config.clip_norm = 0.0
    config.eval_every_epochs = 10.0

    config.model.num_classes = num_classes
    config.model.drop_path = 0.1
    config.model.dtype = "bfloat16"
    config.model.base_init = "pytorch"
    # All schemes but impulse_2024 and impulse_mimetic, which always replace learned positions, take
    # this option, so that --schemes=A,B keeps them in every row.
    config.attention_init = dict(name=scheme, replace_positions=False)

    config.augment.crop = "resized"
    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"
    config.augment.erasing = 0.25
    config.augment.mixup = 0.8
    config.augment.cutmix = 1.0
    config.augment.mix_group = 64  # one lambda for the images of one process, as in the program

    config.data.name = dataset
    config.data.train_split = train_split
    config.data.eval_split = eval_split
    config.data.drop_remainder = True
    config.data.image_size = 224
    config.data.crop_fraction = 0.875
    return config
