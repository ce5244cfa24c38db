"""ViT-T on CIFAR-10 with and without class token and learned positions: the 2024 paper's table 1.

    python -m structinit_jax.main --config=configs/vit_2024_settings.py:learned,class_token \
        --workdir=DIR

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), table 1. Pass the
row after a colon: the positions, sincos or learned; then the pooling, mean or class_token.

The recipe is that of vit_2024_small.py. The initialization of this table is not stated. The row
`sincos,mean` is the model of table 2, which has 86.36 with Kaiming uniform and 88.63 with truncated
normal. This file uses truncated normal; --config.attention_init.name=kaiming_uniform is the other.

Hardware: one GPU. Time: not measured.
Accuracy to expect (published, top-1 in percent; not run here):

                class_token   mean
    learned     81.23         82.23
    sincos      83.17         85.30
"""

from structinit_jax.config import base_config, parse_row

COLUMNS = {"positions": ("sincos", "learned"), "pooling": ("mean", "class_token")}


def get_config(row=""):
    positions, pool = parse_row(row, COLUMNS)
    config = base_config("vit_tiny_patch2_32")
    config.num_epochs = 200.0
    config.batch_size = 512
    config.schedule = "timm_cosine"
    config.learning_rate = 1e-3
    config.warmup_epochs = 10.0
    config.warmup_learning_rate = 1e-5
    config.final_learning_rate = 1e-6
    config.weight_decay = 0.01
    config.adam_epsilon = 1e-3
    config.clip_norm = 3.0
    config.eval_every_epochs = 10.0

    config.model.num_classes = 10
    config.model.positions = positions
    config.model.pool = pool
    config.attention_init = dict(name="default")

    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"

    config.data.name = "cifar10"
    config.data.drop_remainder = True
    config.data.image_size = 32
    config.data.mean = (0.4914, 0.4822, 0.4465)
    config.data.std = (0.2470, 0.2435, 0.2616)
    return config
