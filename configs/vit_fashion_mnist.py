"""A small ViT on Fashion-MNIST, for quick comparisons of initializations.

    python -m structinit_jax.main --config=configs/vit_fashion_mnist.py --workdir=/tmp/fashion \
        --config.data.train_split='train[:1000]'

Without network access, pass --config.data.data_dir=DIR, the folder with the four idx.gz files.

The learning rate was tuned for the default initialization (benchmarks/protocol.md).

Hardware: one CPU core. Time: 2 to 4 minutes for 1,000 images.
Accuracy to expect: 78.8 % with 1,000 images (mean of 5 seeds).
"""

from structinit_jax.config import base_config


def get_config():
    config = base_config("vit")
    config.num_epochs = 30.0
    config.batch_size = 64
    config.learning_rate = 5e-4
    config.warmup_epochs = 3.0
    config.log_every_steps = 50
    config.eval_every_epochs = 10.0

    config.model.num_classes = 10
    config.model.width = 96
    config.model.depth = 6
    config.model.num_heads = 6
    config.model.base_init = "pytorch"
    config.model.patch_size = 4

    config.data.name = "fashion_mnist"
    config.data.image_size = 28
    config.data.channels = 1
    config.data.mean = (0.2860,)
    config.data.std = (0.3530,)
    return config
