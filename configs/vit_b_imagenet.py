"""ViT-B/16 on ImageNet-1K: the ViT-B rows of table 2 of the 2025 paper, and our `impulse`.

    python -m structinit_jax.main --config=configs/vit_b_imagenet.py --workdir=DIR \
        --config.data.data_dir=TFDS

Pass the scheme after a colon: impulse (the default), our solve for the learned positions that the
paper keeps; impulse_2025, the paper's closed form; mimetic or default. Everything else is as in
the paper; see vit_2025_imagenet.py.

Hardware: 8 or more data-center GPUs or TPUs. Time: not measured.
Accuracy to expect: configs/papers.csv has the published figures for all schemes except impulse,
which is ours; not run here.
"""

from pathlib import Path
from typing import Literal

from structinit_jax.config import load_config


def get_config(
    scheme: Literal["impulse", "impulse_2025", "mimetic", "default"] = "impulse",
):
    recipe = Path(__file__).with_name("vit_2025_imagenet.py")
    return load_config(f"{recipe}:vit_base_patch16_224,{scheme}")
