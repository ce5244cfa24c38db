"""ConvMixer on CIFAR-10 with trained and with fixed spatial filters: the 2024 paper's table 4.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/convmixer_2024.py:convmixer_512_6,5,impulse_2024

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), section 5.5. Pass
the row after a colon: the model, convmixer_256_8, convmixer_512_6 or convmixer_512_8; the kernel
size, 3, 5 or 8; the filters: trained, or fixed at random values (random), the paper's impulses
(impulse_2024), boxes (box) or our impulses (impulse), which are larger. The biases of fixed filters
are fixed, too. For filters with several nonzero entries at random places, as in the program, add
--config.attention_init.name=impulse_2024 and --config.attention_init.taps=4.

From the text: learning rate 0.01, 100 epochs, otherwise as for ViT (vit_2024_small.py). From the
program (github.com/osiriszjq/structured_init): the scale of the filters, and depth 6 at width 512,
where the text says 8. Not stated anywhere: the command for ConvMixer.

Hardware: one GPU. Time: not measured.
Accuracy to expect: the published figures are in configs/papers.csv; not run here.
"""

from pathlib import Path
from typing import Literal

from structinit_jax.config import base_config, load_config

RECIPE = Path(__file__).with_name("vit_2024_small.py")


def get_config(
    model: Literal["convmixer_256_8", "convmixer_512_6", "convmixer_512_8"] = "convmixer_256_8",
    kernel_size: Literal["3", "5", "8"] = "3",
    filters: Literal["trained", "random", "impulse_2024", "box", "impulse"] = "trained",
):
    config = load_config(f"{RECIPE}:cifar10")
    config.num_epochs = 100.0
    config.learning_rate = 0.01
    config.model = base_config(model).model
    config.model.num_classes = 10
    config.model.kernel_size = int(kernel_size)
    config.model.spatial_filters = "trained" if filters == "trained" else "fixed"
    config.model.dtype = "bfloat16"
    config.attention_init = dict(name="default")
    if filters in ("impulse", "impulse_2024"):
        config.attention_init = dict(name=filters)
    elif filters == "box":
        config.attention_init = dict(name="impulse_2024", taps=int(kernel_size) ** 2)
    return config
