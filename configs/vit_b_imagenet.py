"""ViT-B/16 on ImageNet-1K: "Structured Initialization for Vision Transformers" (NeurIPS 2025).

    python -m structinit_jax.main --config=configs/vit_b_imagenet.py --workdir=DIR \
        --config.data.data_dir=DIR

The paper reports 81.83 % top-1 with impulse, 81.24 % with default and 80.56 % with mimetic
initialization. Not run here. Hardware: 8 or more data-centre GPUs or TPUs.
"""

from structinit_jax.recipes import imagenet_2025


def get_config():
    return imagenet_2025("vit_base_patch16_224")
