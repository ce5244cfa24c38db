"""Pseudo inputs of the solve, on CIFAR-10: the 2024 paper's table 6.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/vit_2024_pseudo_inputs.py:vit_tiny_h8_patch2_32,uniform,positions

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), appendix C.1. Pass
the row after a colon: the model, vit_tiny_patch2_32 or vit_tiny_h8_patch2_32; the pseudo input of
the first layer; that of the other layers. A pseudo input is positions, uniform, positions+uniform,
gaussian or positions+gaussian. All layers share Q and K, as in the left half of the table;
--config.attention_init.same_layers=False gives the right half. Kernel size 5:
--config.attention_init.kernel_size=5. The recipe is that of vit_2024_small.py. From the program:
where the two inputs differ, the second layer draws new offsets, which the layers after it share.
The paper gives no figures for Gaussian inputs; it calls them better than uniform ones.

Hardware: one GPU. Time: not measured.
Accuracy to expect: the published figures are in configs/papers.csv; not run here.
"""

from pathlib import Path
from typing import Literal

from structinit_jax.config import load_config

RECIPE = Path(__file__).with_name("vit_2024_small.py")
INPUTS = ("positions", "uniform", "positions+uniform", "gaussian", "positions+gaussian")


def get_config(
    model: Literal["vit_tiny_patch2_32", "vit_tiny_h8_patch2_32"] = "vit_tiny_patch2_32",
    first_input: Literal[*INPUTS] = "positions",
    following_input: Literal[*INPUTS] = "positions",
):
    config = load_config(f"{RECIPE}:cifar10,{model},impulse3")
    config.attention_init = dict(
        name="impulse_2024",
        kernel_size=3,
        first_input=first_input,
        following_input=following_input,
        same_layers=True,
    )
    return config
