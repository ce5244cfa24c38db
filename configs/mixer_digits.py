"""A small MLP-Mixer on scikit-learn's 8x8 handwritten digits.

    python -m structinit_jax.main --config=configs/mixer_digits.py --workdir=/tmp/mixer

Every pixel is a token, so `base_init` is 'pytorch' (see `models.mixer.MlpMixer`). With 400 images
(--config.data.train_split='train[:400]' --config.num_epochs=40.0) accuracy is 94.1 % (mean of three
seeds); with base_init='timm' it is 91.2 %, with `impulse` 94.0 % and 89.2 %.

Hardware: two CPU cores. Time and accuracy with all images: not measured.
"""

from structinit_jax.config import base_config


def get_config():
    config = base_config("mixer")
    config.num_epochs = 20.0
    config.batch_size = 64
    config.learning_rate = 2e-3
    config.warmup_epochs = 3.0
    config.log_every_steps = 50
    config.eval_every_epochs = 5.0

    config.model.num_classes = 10
    config.model.base_init = "pytorch"
    config.model.width = 64
    config.model.depth = 4
    config.model.token_mlp_ratio = 2.0  # 128 hidden units represent any filter of 64 tokens exactly
    config.model.patch_size = 1

    config.data.name = "digits"
    config.data.image_size = 8
    config.data.channels = 1
    config.data.mean = (0.305,)
    config.data.std = (0.376,)
    return config
