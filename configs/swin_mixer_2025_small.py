"""Swin and MLP-Mixer on small sets at 224²: "Structured Initialization for ViTs" (2025), table 3.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/swin_mixer_2025_small.py:cifar10,swin_tiny_patch4_window7_224

Behind the colon: cifar10, cifar100, stl10, oxford_flowers102, oxford_iiit_pet or food101; after a
comma swin_tiny_patch4_window7_224 (if left out), swin_base_patch4_window7_224, mixer_s16_224 or
mixer_b16_224. The paper's Mixer is on CIFAR-10 only, of a size that we do not know.

The scheme is our `impulse`, set in Swin's relative position bias and in Mixer's token-mixing MLPs,
since the paper's closed form is for attention over positions; how it did these two we do not know.
Others: --config.attention_init.name=default, mimetic or kaiming_uniform.

The recipe is that of the small sets. The table's figures are in the paper. Not run here. Hardware:
one GPU or more.
"""

from structinit_jax.recipes import SMALL_SETS_2025, choose, small_2025

COLUMNS = {
    "data set": SMALL_SETS_2025,
    "model": (
        "swin_tiny_patch4_window7_224",
        "swin_base_patch4_window7_224",
        "mixer_s16_224",
        "mixer_b16_224",
    ),
}


def get_config(row=""):
    dataset, model = choose(row, COLUMNS)
    return small_2025(model, dataset)
