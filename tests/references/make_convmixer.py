"""Records small ConvMixers of timm: weights, images, and what they compute in both modes.

    python tests/references/make_convmixer.py    # writes convmixer.npz and convmixer_counts.json

Made with timm 1.0.31 and torch 2.13.0. Inputs are not square; one model has GELU and an even
kernel, the other ReLU and an odd one. Weights and running statistics are random also where timm's
start values are not. Keys: `state/` what a model starts with, `evaluation/` and `training/` the
blocks' outputs and the logits, `after/` the running statistics after one forward pass in training.
"""

import json
import pathlib

import import_torchvision  # noqa: F401
import numpy as np
import timm
import torch
from timm.models.convmixer import ConvMixer

FOLDER = pathlib.Path(__file__).parent
MODELS = {
    "gelu_even": dict(kernel_size=8, act_layer=torch.nn.GELU),
    "relu_odd": dict(kernel_size=5, act_layer=torch.nn.ReLU),
}


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


def record(options):
    torch.manual_seed(0)
    model = ConvMixer(dim=16, depth=2, patch_size=2, num_classes=5, **options)
    images = torch.randn(3, 3, 12, 20)
    arrays = {"images": images.permute(0, 2, 3, 1).numpy()}
    with torch.no_grad():
        randomize(model)
        arrays |= {f"state/{k}": v.numpy().copy() for k, v in model.state_dict().items()}
        for mode in ("evaluation", "training"):
            model.train(mode == "training")
            features, blocks = model.forward_intermediates(images)  # moves the statistics once
            pooled = model.forward_head(features)
            arrays[f"{mode}/blocks"] = torch.stack(blocks).permute(0, 1, 3, 4, 2).numpy()
            arrays[f"{mode}/logits"] = pooled.numpy()
    arrays |= {f"after/{k}": v.numpy() for k, v in model.state_dict().items() if "running" in k}
    return arrays


def make():
    """All arrays by name."""
    return {f"{n}/{k}": v for n, o in MODELS.items() for k, v in record(o).items()}


def main():
    np.savez_compressed(FOLDER / "convmixer.npz", **make())
    names = ("convmixer_768_32", "convmixer_1024_20_ks9_p14", "convmixer_1536_20")
    counts = {n: sum(p.numel() for p in timm.create_model(n).parameters()) for n in names}
    (FOLDER / "convmixer_counts.json").write_text(json.dumps(counts, indent=2) + "\n")


if __name__ == "__main__":
    main()
