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

Hardware: one GPU. Time: not measured.
Accuracy to expect (published, top-1 in percent; not run here). The figures for Gaussian inputs are
not known to us; the paper calls them better than those for uniform ones.

    first,              same Q and K                  different Q and K
    other layers        T/h3          T/h8            T/h3          T/h8
    kernel size         3      5      3      5        3      5      3      5
    P,P                 90.75  90.22  90.39  90.24    89.90  90.18  90.19  91.24
    P,U                 86.90  86.10  87.99  87.86    87.35  85.56  86.40  86.61
    P,P+U               89.62  88.40  89.61  89.50    88.99  89.29  89.05  89.47
    U,P                 90.34  89.21  90.96  89.83    90.76  90.00  91.20  90.34
    U,U                 86.05  86.50  86.13  86.44    87.09  87.22  86.03  86.13
    U,P+U               89.91  89.99  89.96  89.93    89.94  89.89  89.60  89.07
    P+U,P               90.07  89.19  90.31  89.56    90.03  90.72  90.40  90.76
    P+U,U               86.07  86.52  85.55  85.94    86.02  86.07  86.52  85.55
    P+U,P+U             89.63  89.33  90.02  88.92    89.52  89.28  89.29  89.33
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
