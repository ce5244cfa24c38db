"""ConvMixer on CIFAR-10 with trained and with fixed spatial filters: the 2024 paper's table 4.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/convmixer_2024.py:convmixer_512_6,5,impulse

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), section 5.5. Pass
the row after a colon: the model, convmixer_256_8, convmixer_512_6 or convmixer_512_8; the kernel
size, 3, 5 or 8; the filters, trained or fixed at random, impulse or box values. Fixed filters keep
their biases too. Other filters of the program, trained or fixed according to the row:

    4 taps, drawn          --config.attention_init="{'name': 'impulse_2024', 'taps': 4}"
    Gaussians              --config.attention_init="{'name': 'impulse_2024', 'variance': 0.5}"
    32 filters in a layer  --config.attention_init="{'name': 'impulse_2024', 'num_filters': 32}"

From the text: learning rate 0.01, 100 epochs, all else as for ViT (vit_2024_small.py). From the
program (github.com/osiriszjq/structured_init): the scale of the filters, and depth 6 at width 512,
where the text says 8. Not stated anywhere: the command for ConvMixer.

Hardware: one GPU. Time: not measured.
Accuracy to expect (published, top-1 in percent; not run here):

              width 256                             width 512
    kernel    trained  random  impulse  box         trained  random  impulse  box
    3         91.76    90.72   90.68    81.70       92.82    92.15   92.20    81.90
    5         92.69    90.87   90.41    80.57       93.90    92.72   91.91    81.19
    8         92.34    88.12   87.82    78.95       92.96    90.09   89.61    80.10
"""

from typing import Literal

from structinit_jax.config import base_config


def get_config(
    model: Literal["convmixer_256_8", "convmixer_512_6", "convmixer_512_8"] = "convmixer_256_8",
    kernel_size: Literal["3", "5", "8"] = "3",
    filters: Literal["trained", "random", "impulse", "box"] = "trained",
):
    config = base_config(model)
    config.num_epochs = 100.0
    config.batch_size = 512
    config.schedule = "timm_cosine"
    config.learning_rate = 0.01
    config.warmup_epochs = 10.0
    config.warmup_learning_rate = 1e-5
    config.final_learning_rate = 1e-6
    config.weight_decay = 0.01
    config.adam_epsilon = 1e-3
    config.clip_norm = 3.0
    config.eval_every_epochs = 10.0

    config.model.num_classes = 10
    config.model.kernel_size = int(kernel_size)
    config.model.spatial_filters = "trained" if filters == "trained" else "fixed"
    config.attention_init = dict(name="default")
    if filters in ("impulse", "box"):
        taps = 1 if filters == "impulse" else int(kernel_size) ** 2
        config.attention_init = dict(name="impulse_2024", taps=taps)

    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"

    config.data.name = "cifar10"
    config.data.drop_remainder = True
    config.data.image_size = 32
    config.data.mean = (0.4914, 0.4822, 0.4465)
    config.data.std = (0.2470, 0.2435, 0.2616)
    return config
