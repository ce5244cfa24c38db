"""A small ViT on scikit-learn's 8x8 handwritten digits: the first run, with no download.

    python -m structinit_jax.main --config=configs/vit_t_digits.py --workdir=/tmp/digits

Every pixel is a token. Hardware: any; a laptop's two CPU cores do.
"""

from structinit_jax.recipes import digits


def get_config():
    config = digits("vit")
    config.model.width = 64
    config.model.depth = 4
    config.model.num_heads = 4
    return config
