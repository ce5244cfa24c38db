"""What the maps are solved against, on CIFAR-10: the 2024 paper's table 6.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/vit_2024_pseudo_inputs.py:vit_tiny_h8_patch2_32,uniform,positions

"Structured Initialization for Attention in Vision Transformers", appendix C.1. Behind the colon:
vit_tiny_patch2_32 or vit_tiny_h8_patch2_32, the pseudo input of the first layer and that of the
following ones: positions, uniform, positions+uniform, gaussian or positions+gaussian. All layers
share their Q and K, the table's left half; --config.attention_init.same_layers=False is the right
half. Its columns Imp.-5: --config.attention_init.kernel_size=5.

The paper's top-1 accuracies in percent. Not run here. Hardware: one GPU. What it has for Gaussian
inputs we do not know; it calls them better than uniform ones.

    first,              same Q and K                  different Q and K
    following           T/h3          T/h8            T/h3          T/h8
    kernel              3      5      3      5        3      5      3      5
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

from structinit_jax.recipes import choose, small_2024

PSEUDO_INPUTS = ("positions", "uniform", "positions+uniform", "gaussian", "positions+gaussian")
COLUMNS = {
    "model": ("vit_tiny_patch2_32", "vit_tiny_h8_patch2_32"),
    "first input": PSEUDO_INPUTS,
    "following input": PSEUDO_INPUTS,
}


def get_config(row=""):
    model, first, following = choose(row, COLUMNS)
    config = small_2024(model, "cifar10")
    config.attention_init.update(first_input=first, following_input=following, same_layers=True)
    return config
