"""ViT-T/16 on six small sets at 224²: "Structured Initialization for Vision Transformers" (2025).

    python -m structinit_jax.main --config=configs/vit_2025_small.py:food101 --workdir=DIR

Behind the colon: cifar10, cifar100, stl10, oxford_flowers102, oxford_iiit_pet or food101, and after
a comma another model of `models.registry`. Not run here. Hardware: one GPU or more.
"""

from structinit_jax.recipes import small_2025


def get_config(row="cifar10,vit_tiny_patch16_224"):
    dataset, _, model = row.partition(",")
    return small_2025(model or "vit_tiny_patch16_224", dataset)
