"""ViT-B/16 on ImageNet-1K with our `impulse` and the recipe of the 2025 paper.

    python -m structinit_jax.main --config=configs/vit_b_imagenet.py --workdir=DIR \
        --config.data.data_dir=TFDS

vit_2025_imagenet.py describes the recipe, and has the paper's own scheme and other sizes. The rest
of the model starts from PyTorch's defaults there, and from timm's here (`model.base_init`).

Hardware: 8 or more data-center GPUs or TPUs. Time: not measured.
Accuracy to expect: configs/papers.csv has the paper's, for its own impulse; not run here.
"""

from pathlib import Path

from structinit_jax.config import load_config


def get_config():
    config = load_config(Path(__file__).with_name("vit_2025_imagenet.py"))
    config.model.base_init = "timm"
    config.attention_init = dict(name="impulse", kernel_size=3)
    return config
