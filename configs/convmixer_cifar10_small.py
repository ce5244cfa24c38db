"""A ConvMixer on 5,000 CIFAR-10 images, for comparison with the ViT of vit_cifar10_small.py.

    python -m structinit_jax.main --config=configs/convmixer_cifar10_small.py --workdir=DIR \
        --config.data.data_dir=IMAGES

Width, depth, patch size and recipe are the same as for the ViT. The learning rate is the best
of 2e-3, 5e-3 and 1e-2 on validation images. Filters start as in PyTorch.

Hardware: one CPU core. Time: 8 minutes.
Accuracy to expect: 54.3 % (mean of 5 seeds).
"""

from pathlib import Path

from structinit_jax.config import base_config, load_config


def get_config():
    config = load_config(Path(__file__).with_name("vit_cifar10_small.py"))
    config.learning_rate = 5e-3
    config.model = base_config("convmixer").model
    config.attention_init = dict(name="default")

    config.model.num_classes = 10
    config.model.width = 96
    config.model.depth = 6
    config.model.kernel_size = 3
    config.model.patch_size = 4
    return config
