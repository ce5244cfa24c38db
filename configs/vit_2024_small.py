"""ViTs on CIFAR-10, CIFAR-100 and SVHN: tables 2, 3, 5 and 7 of the 2024 paper.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/vit_2024_small.py:cifar100,vit_small_patch2_32,mimetic

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), section 5.2. Pass
the row after a colon: the data set, cifar10, cifar100 or svhn_cropped; then the model,
vit_tiny_patch2_32 (the default), vit_tiny_h8_patch2_32, vit_small_patch2_32,
vit_small_h16_patch2_32, or of depth 8 vit_wD_hH_patch2_32 with width D of 64, 128, 256 or 512 and
H of 4, 8, 16 or 32 heads; then the initialization, impulse3 (the default), impulse5, mimetic,
truncated_normal or kaiming_uniform. Our own scheme: --config.attention_init.name=impulse.

From the text: AdamW, learning rate 1e-3, weight decay 0.01, batch 512, 200 epochs, RandAugment.
From the authors' command (github.com/osiriszjq/structured_init): the schedule, epsilon 1e-3,
clipping at 3, timm's variant of RandAugment, no crops, label smoothing 0.1. From their program: all
but truncated_normal start the whole model from PyTorch's defaults (`model.base_init`). Not stated
anywhere: the mean and standard deviation of the pixels (here the data set's own), and the command
for widths of 64 to 512 (here the same recipe).

Hardware: one GPU. Time: not measured.
Accuracy to expect (published, top-1 in percent; not run here):

    ViT-T, ViT-S        CIFAR-10  SVHN    CIFAR-100
    width, heads        T/h3      T/h3    T/h3    T/h8    S/h6    S/h16
    impulse-3           91.62     97.21   68.81   70.79   75.97   75.40
    impulse-5           90.67     97.23   70.46   70.86   73.49   74.27
    mimetic             91.16     97.53   70.40   69.93   73.86   72.72
    truncated normal    88.63     93.20   66.50   66.48   66.81   67.25
    Kaiming uniform     86.36     94.51   63.50   63.09   66.06   64.61

    depth 8, CIFAR-10   width 64                       width 128
    heads               4      8      16     32        4      8      16     32
    impulse-3           82.73  84.12  81.59  79.39     88.49  87.75  87.63  84.42
    impulse-5           83.43  82.66  80.80  79.11     87.82  88.02  87.57  84.79
    mimetic             84.59  82.78  81.78  79.71     87.90  87.49  85.51  83.68
    truncated normal    81.57  82.12  81.57  80.40     86.19  86.00  85.39  84.37
    Kaiming uniform     81.26  80.76  80.71  79.89     84.46  83.83  83.05  82.70

    depth 8, CIFAR-10   width 256                      width 512
    heads               4      8      16     32        4      8      16     32
    impulse-3           89.95  90.67  90.59  88.69     91.55  91.75  91.49  91.18
    impulse-5           90.08  90.38  90.61  89.14     90.92  91.67  91.87  90.84
    mimetic             90.52  89.45  88.97  86.83     90.94  90.75  90.35  89.27
    truncated normal    87.27  87.10  87.30  86.71     87.49  87.03  87.74  87.39
    Kaiming uniform     85.71  85.16  84.62  84.24     87.28  86.50  85.07  84.17
"""

from typing import Literal

from structinit_jax.config import base_config

# Data set -> number of classes, mean and standard deviation of its pixels.
DATASETS = {
    "cifar10": (10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "svhn_cropped": (10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
# Initialization -> that of the whole model, and the scheme for attention.
INITS = {
    "impulse3": ("pytorch", dict(name="impulse_2024", kernel_size=3)),
    "impulse5": ("pytorch", dict(name="impulse_2024", kernel_size=5)),
    "mimetic": ("pytorch", dict(name="mimetic")),
    "truncated_normal": ("timm", dict(name="default")),
    "kaiming_uniform": ("pytorch", dict(name="kaiming_uniform")),
}
DEPTH_8 = [f"vit_w{d}_h{h}_patch2_32" for d in (64, 128, 256, 512) for h in (4, 8, 16, 32)]
MODELS = (
    "vit_tiny_patch2_32",
    "vit_tiny_h8_patch2_32",
    "vit_small_patch2_32",
    "vit_small_h16_patch2_32",
    *DEPTH_8,
)


def get_config(
    dataset: Literal[*DATASETS] = "cifar10",
    model: Literal[*MODELS] = "vit_tiny_patch2_32",
    init: Literal[*INITS] = "impulse3",
):
    num_classes, mean, std = DATASETS[dataset]
    config = base_config(model)
    config.num_epochs = 200.0
    config.batch_size = 512
    config.schedule = "timm_cosine"
    config.learning_rate = 1e-3
    config.warmup_epochs = 10.0
    config.warmup_learning_rate = 1e-5
    config.final_learning_rate = 1e-6
    config.weight_decay = 0.01
    config.adam_epsilon = 1e-3
    config.clip_norm = 3.0
    config.eval_every_epochs = 10.0

    config.model.num_classes = num_classes
    config.model.positions = "sincos"
    config.model.pool = "mean"
    config.model.base_init, config.attention_init = INITS[init]

    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"

    config.data.name = dataset
    config.data.drop_remainder = True
    config.data.image_size = 32
    config.data.mean = mean
    config.data.std = std
    return config
