"""A small MLP-Mixer on scikit-learn's 8x8 digits: impulses through its token-mixing MLPs.

    python -m structinit_jax.main --config=configs/mixer_digits.py --workdir=/tmp/mixer

Every pixel is a token. Hardware: any; a laptop's two CPU cores do.
"""

from structinit_jax.recipes import digits


def get_config():
    config = digits("mixer")
    config.model.width = 64
    config.model.depth = 4
    config.model.token_mlp_ratio = 2.0  # 128 hidden units carry any filter of the 64 tokens exactly
    return config
