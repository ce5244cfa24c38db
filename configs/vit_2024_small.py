"""Small ViTs on CIFAR-10, CIFAR-100 and SVHN: the 2024 paper's tables 2, 3 and 5.

    python -m structinit_jax.main --config=configs/vit_2024_small.py:cifar100,vit_small_patch2_32 \
        --workdir=DIR

"Structured Initialization for Attention in Vision Transformers". Behind the colon: the data set and
a model of `models.registry`: vit_tiny_patch2_32, vit_tiny_h8_patch2_32, vit_small_patch2_32,
vit_small_h16_patch2_32, vit_w256_h8_patch2_32 (depth 8), …
The paper reports for ViT-T top-1 accuracies on CIFAR-10 / CIFAR-100 / SVHN of 91.62 / 68.81 / 97.21
with impulse, 91.16 / 70.40 / 97.53 with mimetic and 88.63 / 66.50 / 93.20 with truncated normal
initialization. Not run here. Hardware: one GPU.
"""

from structinit_jax.recipes import small_2024


def get_config(row="cifar10,vit_tiny_patch2_32"):
    dataset, model = row.split(",")
    return small_2024(model, dataset)
