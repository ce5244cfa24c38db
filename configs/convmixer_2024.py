"""ConvMixer on CIFAR-10 with trained and with fixed spatial filters: the 2024 paper's table 4.

    python -m structinit_jax.main --config=configs/convmixer_2024.py:512,5,impulse --workdir=DIR

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), section 5.5. Pass
the row after a colon: the width, 256 or 512; the kernel size, 3, 5 or 8; the filters, trained or
fixed at random, impulse or box values (see `attention_init.convolution`). Other filters, trained or
fixed according to the row: --config.attention_init="{'name': 'impulse', 'filters': 'gaussian'}".

Hardware: one GPU. Time: not measured.
Accuracy to expect (published, top-1 in percent; not run here):

              width 256                             width 512
    kernel    trained  random  impulse  box         trained  random  impulse  box
    3         91.76    90.72   90.68    81.70       92.82    92.15   92.20    81.90
    5         92.69    90.87   90.41    80.57       93.90    92.72   91.91    81.19
    8         92.34    88.12   87.82    78.95       92.96    90.09   89.61    80.10
"""

from structinit_jax.config import base_config, parse_row

ATTENTION_INIT = {
    "trained": dict(name="default"),
    "random": dict(name="default"),
    "impulse": dict(name="impulse_2024"),
    "box": dict(name="impulse", filters="box"),
}
COLUMNS = {
    "width": ("256", "512"),
    "kernel size": ("3", "5", "8"),
    "filters": tuple(ATTENTION_INIT),
}


def get_config(row=""):
    width, kernel_size, filters = parse_row(row, COLUMNS)
    config = base_config(f"convmixer_{width}_8")
    config.num_epochs = 100.0
    config.batch_size = 512
    config.learning_rate = 0.01
    config.warmup_epochs = 10.0
    config.final_learning_rate = 1e-6
    config.weight_decay = 0.01
    config.adam_epsilon = 1e-3
    config.clip_norm = 3.0
    config.eval_every_epochs = 10.0

    config.model.num_classes = 10
    config.model.kernel_size = int(kernel_size)
    config.model.spatial_filters = "trained" if filters == "trained" else "fixed"
    config.attention_init = ATTENTION_INIT[filters]

    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"

    config.data.name = "cifar10"
    config.data.image_size = 32
    return config
