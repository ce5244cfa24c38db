"""Mean, standard deviation and largest absolute value of the initial values of timm's models.

'pytorch' is a model whose `init_weights` is skipped. timm 1.0.31 then does not initialize tokens
or positions. The papers' versions (0.9.16 and 1.0.22) set the tokens to zero and draw
positions with a standard deviation of 0.02.
"""

import numpy as np
import torch
from timm.models.convmixer import ConvMixer
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer


class SkippingMixer(MlpMixer):
    """Mixer has no argument to skip its initialization."""

    def init_weights(self, nlhb=False):
        """Keeps the defaults of the layers."""


SIZES = dict(img_size=32, patch_size=4, num_classes=200)


def make_model(family, base_init):
    """Builds one of timm's models with the given base_init."""
    options = SIZES | dict(weight_init="" if base_init == "timm" else "skip")
    if family == "vit":
        return VisionTransformer(**options, embed_dim=128, depth=1, num_heads=4)
    if family == "swin":
        sizes = dict(embed_dim=64, depths=(1, 1), num_heads=(8, 16), window_size=8)
        return SwinTransformer(**options, **sizes)
    if family == "convmixer":
        return ConvMixer(128, 1, kernel_size=5, patch_size=4, num_classes=200)
    model = MlpMixer if base_init == "timm" else SkippingMixer
    return model(**SIZES, embed_dim=128, num_blocks=1)


def make_statistics(family, base_init):
    """Mean, deviation and largest absolute value of every parameter by name."""
    skipped = ("cls_token", "pos_embed") if base_init == "pytorch" else ()
    return {
        name: torch.stack([p.mean(), p.std(correction=0), p.abs().max()]).detach().numpy()
        for name, p in make_model(family, base_init).named_parameters()
        if name not in skipped
    }


def make():
    """The statistics of all families."""
    torch.manual_seed(0)
    arrays = {}
    for family in ("vit", "swin", "mixer", "convmixer"):
        for base_init in ("timm", "pytorch"):
            statistics = make_statistics(family, base_init)
            arrays[f"{family} {base_init}/names"] = np.array(list(statistics))
            arrays[f"{family} {base_init}/statistics"] = np.array(list(statistics.values()))
    return arrays
