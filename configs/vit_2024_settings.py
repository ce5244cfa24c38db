"""ViT-T on CIFAR-10 with and without class token and learned positions: the 2024 paper's table 1.

    python -m structinit_jax.main --config=configs/vit_2024_settings.py:learned,class_token \
        --workdir=DIR

"Structured Initialization for Attention in Vision Transformers". Behind the colon: positions sincos
or learned, and after a comma pooling mean or class_token.

The paper's top-1 accuracies in percent. Not run here. Hardware: one GPU.

                class_token   mean
    learned     81.23         82.23
    sincos      83.17         85.30

The paper does not say which initialization this is, and `sincos,mean` is the model of its table 2,
which has 86.36 with Kaiming uniform and 88.63 with truncated normal. Here it is truncated normal;
--config.attention_init.name=kaiming_uniform is the other.
"""

from structinit_jax.recipes import choose, small_2024

COLUMNS = {"positions": ("sincos", "learned"), "pooling": ("mean", "class_token")}


def get_config(row=""):
    config = small_2024("vit_tiny_patch2_32", "cifar10")
    config.model.positions, config.model.pool = choose(row, COLUMNS)
    config.attention_init = dict(name="default")
    return config
