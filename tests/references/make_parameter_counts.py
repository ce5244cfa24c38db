"""Parameter counts of timm's models, by name, for `parameter_counts.json`."""

import timm
import torch

NAMES = (
    *timm.list_models("swin_*_window7_224"),
    "swin_base_patch4_window12_384",
    *("convmixer_1024_20_ks9_p14", "convmixer_1536_20"),
    *(f"mixer_{size}{patch}_224" for size in "sbl" for patch in (32, 16)),
)
# width, depth, heads; in more patch and image sizes than timm has names for
VITS = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}
INPUTS = [(2, 32), (4, 32), *((p, size) for p in (8, 14, 16, 32) for size in (224, 384))]


def make():
    """All counts by name."""
    with torch.device("meta"):
        models = {name: timm.create_model(name) for name in NAMES}
        for size, (width, depth, heads) in VITS.items():
            for patch, image in INPUTS:
                if image % patch == 0:
                    model = timm.models.VisionTransformer(
                        image, patch, 3, 1000, "token", width, depth, heads
                    )
                    models[f"vit_{size}_patch{patch}_{image}"] = model
    return {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
