"""ViTs on small sets at 224²: "Structured Initialization for ViTs" (2025), tables 1 and 4.

    python -m structinit_jax.main --config=configs/vit_2025_small.py:food101 --workdir=DIR

Behind the colon: cifar10, cifar100, stl10, oxford_flowers102, oxford_iiit_pet or food101; after a
comma vit_tiny_patch16_224 (if left out; the paper's), vit_small_patch16_224 or
vit_base_patch16_224. The scheme is the paper's `impulse_2025`. Others:
--config.attention_init.name=default, mimetic, or impulse, which is ours.

To expect, ViT-T on CIFAR-10, accuracy in training after 10 / 50 / 100 epochs (the authors'
rebuttal): default 47.95 / 61.51 / 76.87 %, mimetic 49.05 / 63.62 / 77.64 %, impulse 54.62 / 69.51 /
81.87 %. Not run here. The table's own figures are in the paper. Hardware: one GPU or more.

Table 4, weights selected from a larger model that was trained before: take its safetensors file (by
`structinit_jax.export`, after vit_2025_imagenet.py:vit_small_patch16_224, or timm's own) with
--config.start_from=vit_small.safetensors.
"""

from structinit_jax.recipes import SMALL_SETS_2025, choose, small_2025

COLUMNS = {
    "data set": SMALL_SETS_2025,
    "model": ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224"),
}


def get_config(row=""):
    dataset, model = choose(row, COLUMNS)
    return small_2025(model, dataset)
