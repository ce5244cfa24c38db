"""Outputs of small timm ConvMixers in training and evaluation.

Inputs are not square; weights and running statistics are random. Keys: `state/` is the model,
`evaluation/` and `training/` the blocks' outputs and the logits, `after/` the running statistics
after one forward pass in training.
"""

import torch
from timm.models.convmixer import ConvMixer

KERNEL_SIZES = {"even": 8, "odd": 5}


def randomize(model):
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.ndim == 1:
            is_scale = name.endswith("weight")
            tensor.normal_(1.0 if is_scale else 0.0, 0.3)
        else:
            tensor.normal_(0.0, tensor[0].numel() ** -0.5)


def record(kernel_size):
    torch.manual_seed(0)
    model = ConvMixer(dim=16, depth=2, kernel_size=kernel_size, patch_size=2, num_classes=5)
    images = torch.randn(3, 3, 12, 20)
    arrays = {"images": images.permute(0, 2, 3, 1).numpy()}
    with torch.no_grad():
        randomize(model)
        arrays |= {f"state/{k}": v.numpy().copy() for k, v in model.state_dict().items()}
        for mode in ("evaluation", "training"):
            model.train(mode == "training")
            features, blocks = model.forward_intermediates(images)  # updates the statistics once
            pooled = model.forward_head(features)
            arrays[f"{mode}/blocks"] = torch.stack(blocks).permute(0, 1, 3, 4, 2).numpy()
            arrays[f"{mode}/logits"] = pooled.numpy()
    arrays |= {f"after/{k}": v.numpy() for k, v in model.state_dict().items() if "running" in k}
    return arrays


def make():
    """All arrays by name."""
    return {f"{n}/{k}": v for n, size in KERNEL_SIZES.items() for k, v in record(size).items()}
