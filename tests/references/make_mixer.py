"""Outputs of the blocks and the head of a small timm MLP-Mixer with random weights.

The input is not square. Norms, biases and the head, which start at constants, are random too.
"""

import torch
from timm.models.mlp_mixer import MlpMixer


def make():
    """All arrays by name."""
    torch.manual_seed(0)
    model = MlpMixer(img_size=(8, 12), patch_size=2, embed_dim=16, num_blocks=2, num_classes=5)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(centre, scale)
        images = torch.randn(2, 3, 8, 12)
        _, blocks = model.forward_intermediates(images, output_fmt="NLC")
        logits = model(images)
    arrays = {f"state/{name}": value.numpy() for name, value in model.state_dict().items()}
    arrays["images"] = images.permute(0, 2, 3, 1).numpy()
    arrays["blocks"] = torch.stack(blocks).numpy()
    arrays["logits"] = logits.numpy()
    return arrays
