"""What timm's train.py does: learning rates, weight decay, and a batch with mixup.

The schedules are from the papers' public commands; `create_scheduler_v2`, `create_optimizer_v2` and
`create_loader` get the arguments that train.py passes.
"""

import numpy as np
import torch
from PIL import Image
from timm.data import FastCollateMixup, create_loader
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
    vit = dict(img_size=8, patch_size=4, depth=2, num_heads=2, init_values=0.1, **options)
    swin = dict(img_size=16, patch_size=2, window_size=4, depths=(2, 1), num_heads=(2, 4))
    mixer = dict(img_size=8, patch_size=2, num_blocks=2, **options)
    return {
        "vit": VisionTransformer(**vit),
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


def mixed_batch():
    """The one batch of the loader that train.py makes, with mixup alone and λ = 0.3."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)

    class Images(torch.utils.data.Dataset):
        transform = None

        def __len__(self):
            return len(pixels)

        def __getitem__(self, index):
            return self.transform(Image.fromarray(pixels[index])), index

    collate = FastCollateMixup(mixup_alpha=0.8, num_classes=4, label_smoothing=0.1)
    collate._params_per_batch = lambda: (0.3, False)
    cpu = dict(device=torch.device("cpu"), num_workers=0, persistent_workers=False)
    options = dict(is_training=True, no_aug=True, collate_fn=collate)
    batch, targets = next(iter(create_loader(Images(), (3, 8, 8), len(pixels), **options, **cpu)))
    labels = targets.numpy().argmax(1)[::-1]  # the mirror image in the batch has the larger share
    names = ("inputs", "labels", "images", "targets")
    arrays = (pixels[labels], labels, batch.permute(0, 2, 3, 1).numpy(), targets.numpy())
    return dict(zip(names, arrays, strict=True))


def make():
    """All arrays by name."""
    torch.manual_seed(0)
    arrays = {f"rates/{name}": learning_rates(*row) for name, row in SCHEDULES.items()}
    arrays |= {f"settings/{name}": np.array(row) for name, row in SCHEDULES.items()}
    arrays |= {f"augmentation/{key}": value for key, value in mixed_batch().items()}
    for family, model in models().items():
        arrays[f"names/{family}"], arrays[f"decayed/{family}"] = decayed(model)
    return arrays
