"""ViTs on ImageNet-1K: "Structured Initialization for Vision Transformers" (2025), table 2.

    python -m structinit_jax.main --config=configs/vit_2025_imagenet.py:vit_base_patch16_224 \
        --workdir=DIR --config.data.data_dir=DIR

Behind the colon: vit_base_patch16_224, vit_small_patch16_224 or vit_tiny_patch16_224. The scheme is
the paper's `impulse_2025`. Others: --config.attention_init.name=default, mimetic, or impulse, which
is ours.

To expect, ViT-B, top-1: impulse 81.83 %, default 81.24 %, mimetic 80.56 %. Not run here. This is
the configuration of the authors' public command (learning rate 1e-3, every image three times in a
row). Their appendix trains ViT-B under two more, which differ in the scaling of the learning rate
and in the augmentation; we know no numbers of these, nor a recipe of their own for ViT-S and ViT-T,
which get this one. The fields to change are `learning_rate` and `data.repeats`.

Hardware: 8 or more data-centre GPUs or TPUs.
"""

from structinit_jax.recipes import choose, imagenet_2025

COLUMNS = {"model": ("vit_base_patch16_224", "vit_small_patch16_224", "vit_tiny_patch16_224")}


def get_config(row=""):
    (model,) = choose(row, COLUMNS)
    return imagenet_2025(model)
