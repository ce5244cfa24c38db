"""Records what timm's train.py does in a run: learning rates and the optimizer's parameter groups.

    python tests/references/make_train_script.py    # writes train_script.npz

Made with timm 1.0.31 and torch 2.13.0. The schedules are those of the papers' public commands;
`create_scheduler_v2` and `create_optimizer_v2` get the arguments that train.py passes on.
"""

import contextlib
import pathlib

import torch

# timm imports torchvision, whose compiled operators need not fit this torch: it uses none of them.
with contextlib.suppress(RuntimeError):  # where they are defined already
    _library = torch.library.Library("torchvision", "DEF")
    for _schema in ("nms(Tensor d, Tensor s, float t) -> Tensor", "qnms(Tensor d) -> Tensor"):
        _library.define(_schema)

import numpy as np
from timm.models.convmixer import ConvMixer
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

# epochs, learning rate, warm-up epochs, warm-up rate, final rate, cool-down epochs
SCHEDULES = {
    "2024_small": (200, 1e-3, 10, 1e-5, 1e-6, 0),
    "2024_imagenet": (300, 4e-3, 50, 1e-5, 0.0, 0),
    "2024_convmixer": (100, 0.01, 10, 1e-5, 1e-6, 0),
    "2025_small": (300, 2e-3, 50, 1e-6, 1e-6, 0),
    "2025_imagenet": (300, 1e-3, 5, 1e-6, 1e-5, 10),
}


def learning_rates(epochs, rate, warmup_epochs, warmup_rate, final_rate, cooldown_epochs):
    """The learning rate of each epoch, float64 [epochs + cooldown_epochs]."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler, num_epochs = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=epochs,
        warmup_epochs=warmup_epochs,
        warmup_lr=warmup_rate,
        min_lr=final_rate,
        cooldown_epochs=cooldown_epochs,
    )
    rates = []
    for epoch in range(num_epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(epoch + 1, None)
    return np.array(rates)


def models():
    """Small models of every family, with every kind of parameter."""
    options = dict(num_classes=5, embed_dim=16)
    vit = dict(img_size=8, patch_size=4, depth=2, num_heads=2, **options)
    extras = dict(reg_tokens=3, init_values=0.1, qk_norm=True)
    swin = dict(img_size=16, patch_size=2, window_size=4, depths=(2, 1), num_heads=(2, 4))
    mixer = dict(img_size=8, patch_size=2, num_blocks=2, **options)
    return {
        "vit": VisionTransformer(**vit, **extras),
        "swin": SwinTransformer(**swin, **options),
        "mixer": MlpMixer(**mixer),
        "convmixer": ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=2, num_classes=5),
    }


def decayed(model):
    """Names of the trained parameters, and whether weight decay applies to each."""
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    parameters = dict(model.named_parameters())
    assert set(decay.values()) == {0.0, 0.05}
    return np.array(list(parameters)), np.array([decay[id(p)] > 0 for p in parameters.values()])


def make():
    """All arrays by name."""
    arrays = {f"rates/{name}": learning_rates(*row) for name, row in SCHEDULES.items()}
    arrays |= {f"settings/{name}": np.array(row) for name, row in SCHEDULES.items()}
    for family, model in models().items():
        arrays[f"names/{family}"], arrays[f"decayed/{family}"] = decayed(model)
    return arrays


def main():
    np.savez_compressed(pathlib.Path(__file__).with_name("train_script.npz"), **make())


if __name__ == "__main__":
    main()
