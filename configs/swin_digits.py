"""A small Swin Transformer on scikit-learn's 8x8 handwritten digits.

    python -m structinit_jax.main --config=configs/swin_digits.py --workdir=/tmp/swin

Every pixel is a token. The relative position biases start as impulses. The recipe is as in
vit_t_digits.py.

Hardware: two CPU cores. Time and accuracy: not measured.
"""

from pathlib import Path

from structinit_jax.config import base_config, load_config


def get_config():
    config = load_config(Path(__file__).with_name("vit_t_digits.py"))
    config.model = base_config("swin").model
    config.attention_init = dict(name="impulse", kernel_size=3)

    config.model.num_classes = 10
    config.model.width = 32
    config.model.depths = (2, 2)
    config.model.num_heads = (4, 8)
    config.model.window_size = 4
    config.model.patch_size = 1
    return config
