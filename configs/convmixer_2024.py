"""ConvMixer on CIFAR-10 with trained and with fixed depthwise filters: the 2024 paper's table 4.

    python -m structinit_jax.main --config=configs/convmixer_2024.py:512,5,impulse --workdir=DIR

"Structured Initialization for Attention in Vision Transformers", section 5.5. Behind the colon: the
width, 256 or 512; the kernel size, 3, 5 or 8; and the filters: trained, or fixed at random, impulse
or box ones. What the fixed ones are: `attention_init.convolution`. Other filters, trained or fixed
as the row says: --config.attention_init="{'name': 'impulse', 'filters': 'gaussian'}".

The paper's top-1 accuracies in percent. Not run here. Hardware: one GPU.

              width 256                             width 512
    kernel    trained  random  impulse  box         trained  random  impulse  box
    3         91.76    90.72   90.68    81.70       92.82    92.15   92.20    81.90
    5         92.69    90.87   90.41    80.57       93.90    92.72   91.91    81.19
    8         92.34    88.12   87.82    78.95       92.96    90.09   89.61    80.10
"""

from structinit_jax.recipes import choose, small_2024

START_FILTERS = {
    "trained": dict(name="default"),
    "random": dict(name="default"),
    "impulse": dict(name="impulse_2024"),
    "box": dict(name="impulse", filters="box"),
}
COLUMNS = {
    "width": ("256", "512"),
    "kernel size": ("3", "5", "8"),
    "filters": tuple(START_FILTERS),
}


def get_config(row=""):
    width, kernel_size, filters = choose(row, COLUMNS)
    config = small_2024(f"convmixer_{width}_8", "cifar10")
    config.model.kernel_size = int(kernel_size)
    config.model.spatial_filters = "trained" if filters == "trained" else "fixed"
    config.attention_init = START_FILTERS[filters]
    return config
