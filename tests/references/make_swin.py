"""Outputs of timm's Swin with random weights, by case.

Records weights, images, the output of every block, logits and, where windows are shifted, the
gradient of sum(cotangent · logits).
"""

import torch
from timm.models.swin_transformer import SwinTransformer

COMMON = dict(in_chans=2, num_classes=5, embed_dim=8, num_heads=(2, 4), mlp_ratio=2)
CASES = {
    # Grid 8×8, then 4×4: four windows with shift and mask, then a single 4×4 window.
    "shifted": dict(img_size=(32, 32), depths=(4, 2), window_size=4),
    # Grid 7×11, then 4×6: padding of windows and of patch merging, a shift along one axis only.
    "padded": dict(img_size=(28, 44), depths=(2, 3), window_size=4),
    # Pixels beyond the last patch; grid 7×7, then 4×4: windows larger than the map.
    "single": dict(img_size=(30, 30), depths=(2, 1), window_size=8),
}


def run(name, options):
    """One model's arrays by name."""
    generator = torch.Generator().manual_seed(len(name))
    model = SwinTransformer(**COMMON, **options).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            scale = "norm" in parameter_name and parameter_name.endswith("weight")
            # Large enough that attention is far from uniform.
            parameter.copy_(1 + 0.2 * drawn if scale else 0.3 * drawn)
    arrays = {f"weights/{key}": value for key, value in model.state_dict().items()}
    blocks = {
        key: module
        for key, module in model.named_modules()
        if key.split(".")[-2:-1] == ["blocks"] and key.startswith("layers")
    }
    outputs = {}
    for key, module in blocks.items():
        module.register_forward_hook(lambda m, args, y, key=key: outputs.update({key: y}))
    images = torch.randn((2, COMMON["in_chans"], *options["img_size"]), generator=generator)
    logits = model(images)
    cotangent = torch.randn(logits.shape, generator=generator)
    (logits * cotangent).sum().backward()
    arrays |= {f"blocks/{key}": value for key, value in outputs.items()}
    if name != "single":
        arrays |= {f"gradients/{key}": value.grad for key, value in model.named_parameters()}
    arrays |= {"images": images.permute(0, 2, 3, 1), "logits": logits, "cotangent": cotangent}
    return {f"{name}/{key}": value.detach().numpy() for key, value in arrays.items()}


def make():
    """All arrays by name."""
    arrays = {}
    for name, options in CASES.items():
        arrays |= run(name, options)
    return arrays
