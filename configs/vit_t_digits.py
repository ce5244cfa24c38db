"""A small ViT on scikit-learn's 8x8 handwritten digits: a first run without any download.

    python -m structinit_jax.main --config=configs/vit_t_digits.py --workdir=/tmp/digits

Every pixel is a token.

Hardware: two CPU cores. Time: about 50 seconds.
Accuracy to expect: about 98 % (97.5 to 98.9 % with seeds 0 to 2).
"""

from structinit_jax.config import base_config


def get_config():
    config = base_config("vit")
    config.num_epochs = 20.0
    config.batch_size = 64
    config.learning_rate = 2e-3
    config.warmup_epochs = 3.0
    config.log_every_steps = 50
    config.eval_every_epochs = 5.0

    config.model.num_classes = 10
    config.model.width = 64
    config.model.depth = 4
    config.model.num_heads = 4
    config.model.patch_size = 1

    config.data.name = "digits"
    config.data.image_size = 8
    config.data.channels = 1
    config.data.mean = (0.305,)
    config.data.std = (0.376,)
    return config
