"""A small ViT on 5,000 CIFAR-10 images: natural images in minutes on a CPU.

    python -m structinit_jax.main --config=configs/vit_cifar10_small.py --workdir=/tmp/cifar10 \
        --config.data.data_dir=IMAGES

Hardware: one CPU core. Time: 9 minutes.
Accuracy to expect: 52.9 % (mean of 5 seeds).

IMAGES holds the images as files, IMAGES/{train,test}/CLASS/*.jpg, which
benchmarks/cifar10_folder.py writes. --config.data.name=cifar10 reads the images of TensorFlow
Datasets instead.
"""

from structinit_jax.config import base_config


def get_config():
    config = base_config("vit")
    config.num_epochs = 12.0
    config.batch_size = 64
    config.learning_rate = 5e-4
    config.warmup_epochs = 1.2
    config.log_every_steps = 50
    config.eval_every_epochs = 4.0

    config.model.num_classes = 10
    config.model.width = 96
    config.model.depth = 6
    config.model.num_heads = 6
    config.model.patch_size = 4
    config.model.pool = "mean"
    config.model.base_init = "pytorch"

    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"

    config.data.name = "folder"
    config.data.train_split = "train[:10%]"
    config.data.image_size = 32
    config.data.mean = (0.4914, 0.4822, 0.4465)
    config.data.std = (0.2470, 0.2435, 0.2616)
    return config
