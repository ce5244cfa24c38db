"""A small Swin Transformer on scikit-learn's 8x8 digits: impulses in its relative position bias.

    python -m structinit_jax.main --config=configs/swin_digits.py --workdir=/tmp/swin

Every pixel is a token. Hardware: any; a laptop's two CPU cores do.
"""

from structinit_jax.recipes import digits


def get_config():
    config = digits("swin")
    config.model.width = 32
    config.model.depths = (2, 2)
    config.model.num_heads = (4, 8)
    config.model.window_size = 4
    return config
