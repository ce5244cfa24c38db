"""ViT-T on CIFAR-10 with and without class token and learned positions: the 2024 paper's table 1.

    python -m structinit_jax.main --config=configs/vit_2024_settings.py:learned,class_token \
        --workdir=DIR

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), table 1. Pass the
row after a colon: the positions, sincos or learned; then the pooling, mean or class_token.

The recipe is that of vit_2024_small.py. The initialization of this table is not stated: this file
uses truncated normal, and --config.attention_init.name=kaiming_uniform is the other candidate.

Hardware: one GPU. Time: not measured.
Accuracy to expect: the published figures are in configs/papers.csv; not run here.
"""

from pathlib import Path
from typing import Literal

from structinit_jax.config import load_config

RECIPE = Path(__file__).with_name("vit_2024_small.py")


def get_config(
    positions: Literal["sincos", "learned"] = "sincos",
    pool: Literal["mean", "class_token"] = "mean",
):
    config = load_config(f"{RECIPE}:cifar10,vit_tiny_patch2_32,truncated_normal")
    config.model.positions = positions
    config.model.pool = pool
    return config
