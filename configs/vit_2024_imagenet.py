"""ViT-T/16 on ImageNet-1K: the 2024 paper's table 2, last column.

    python -m structinit_jax.main --config=configs/vit_2024_imagenet.py --workdir=DIR \
        --config.data.data_dir=DIR

"Structured Initialization for Attention in Vision Transformers". The paper says of the recipe: 300
epochs, with ConvMixer's settings. What is taken from where: `recipes.imagenet_2024`.

The paper's top-1 accuracies in percent, which may differ for what is not known. Not run here.

    impulse-3          74.24   as it is: the paper's `impulse_2024`
    impulse-5          74.40   --config.attention_init.kernel_size=5
    mimetic            74.34   --config.attention_init.name=mimetic
    truncated normal   73.42   --config.attention_init.name=default
    Kaiming uniform    74.11   --config.attention_init.name=kaiming_uniform
    our impulse                --config.attention_init.name=impulse

Hardware: 8 or more data-centre GPUs or TPUs.
"""

from structinit_jax.recipes import imagenet_2024


def get_config():
    return imagenet_2024("vit_tiny_patch16_224")
