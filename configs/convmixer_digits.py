"""A small ConvMixer on scikit-learn's 8x8 digits: its depthwise filters start as impulses.

    python -m structinit_jax.main --config=configs/convmixer_digits.py --workdir=/tmp/convmixer

Every pixel is a token. Hardware: any; a laptop's two CPU cores do.
"""

from structinit_jax.recipes import digits


def get_config():
    config = digits("convmixer")
    config.model.width = 32
    config.model.depth = 4
    config.model.kernel_size = 3
    return config
