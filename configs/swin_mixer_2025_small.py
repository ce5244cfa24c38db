"""Swin and MLP-Mixer on small data sets: table 3 of the 2025 paper.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/swin_mixer_2025_small.py:cifar10,swin_tiny_patch4_window7_224,mimetic

Paper: "Structured Initialization for Vision Transformers" (2025).

Pass the row after a colon: the data set, cifar10, cifar100, stl10, oxford_flowers102,
oxford_iiit_pet or food101; then the model, swin_tiny_patch4_window7_224 (the default),
swin_base_patch4_window7_224, mixer_s16_224 or mixer_b16_224; then the scheme, impulse (the
default), mimetic or default. The paper trains its Mixer, whose size we do not know, on CIFAR-10
only.

The paper's closed form is for attention with positions; we do not know how the authors applied it
to these two families. `impulse`, and `mimetic` in Mixer, are our own; the filters of `impulse` are
in Swin's relative position bias and in Mixer's token-mixing MLPs. The recipe is as in
vit_2025_small.py, but all schemes start from timm's base initialization, because we do not know
which one the authors used here; for PyTorch's, pass --config.model.base_init=pytorch.

Hardware: one GPU or more. Time: not measured.
Accuracy to expect: unknown (the published figures are not in configs/papers.csv); not run here.
"""

from pathlib import Path
from typing import Literal

from structinit_jax.config import base_config, load_config

RECIPE = Path(__file__).with_name("vit_2025_small.py")
DATASETS = ("cifar10", "cifar100", "stl10", "oxford_flowers102", "oxford_iiit_pet", "food101")
MODELS = (
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "mixer_s16_224",
    "mixer_b16_224",
)


def get_config(
    dataset: Literal[*DATASETS] = "cifar10",
    model: Literal[*MODELS] = "swin_tiny_patch4_window7_224",
    scheme: Literal["impulse", "mimetic", "default"] = "impulse",
):
    config = load_config(f"{RECIPE}:{dataset}")
    changes = {name: config.model[name] for name in ("num_classes", "drop_path", "dtype")}
    config.model = base_config(model).model
    config.model.update(changes)
    config.attention_init = dict(name=scheme)
    return config
