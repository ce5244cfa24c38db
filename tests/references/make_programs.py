"""Updates the record of what the authors' programs do for each recipe in `programs.json`.

    cd tests
    python -m references.make_programs 2024 CHECKOUT   # github.com/osiriszjq/structured_init
    python -m references.make_programs 2025 CHECKOUT   # .../structured_initialization

CHECKOUT is the timm folder inside the repository, at commit 48b59c3 or 2623dcc. The commands in
`programs.json` are from its README, which has none for ConvMixer: the 2024 paper trains it like its
small ViTs, with learning rate 0.01 for 100 epochs. The schedules, optimizers and transforms are
built by the program's own functions. `benchmarks/fidelity.py` compares with this record.
"""

import json
import pathlib
import re
import sys

import numpy as np
import torch

import references.import_torchvision  # noqa: F401

OUT = pathlib.Path(__file__).with_name("programs.json")


def main(paper, checkout):
    sys.path.insert(0, checkout)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    import train

    results = json.loads(OUT.read_text())
    for name, recipe in results["recipes"].items():
        if name.endswith(paper):
            size = {"img_size": 224} if paper == "2025" else {}
            recipe |= record_recipe(train, recipe["command"], **size)
    text = json.dumps(results, indent=1)
    text = re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    OUT.write_text(text + "\n")


def record_recipe(train, command, **arguments):
    """Builds what one command trains with, and records it; `arguments` go to the model."""
    sys.argv = ["train.py", "DATA", *command.split()]
    args, _ = train._parse_args()
    model = train.create_model(args.model, num_classes=args.num_classes, **arguments)
    optimizer = train.create_optimizer_v2(model, **train.optimizer_kwargs(cfg=args))
    scheduler, num_epochs = train.create_scheduler_v2(optimizer, **train.scheduler_kwargs(args))
    rates = {}
    for epoch in np.linspace(0, num_epochs - 1, 10).round().astype(int).tolist():
        scheduler.step(epoch)
        rates[epoch] = optimizer.param_groups[0]["lr"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {
        kind(names[id(parameter)])
        for group in optimizer.param_groups
        if group["weight_decay"]
        for parameter in group["params"]
    }
    data = train.resolve_data_config(vars(args), model=model)
    group = optimizer.param_groups[0]
    return {
        "num_epochs": num_epochs,
        "learning_rate": rates,
        "weight_decay": max(g["weight_decay"] for g in optimizer.param_groups),
        "adam": [*group["betas"], group["eps"]],
        "clip_norm": args.clip_grad or 0.0,
        "decayed": sorted(decayed),
        "mean": data["mean"],
        "std": data["std"],
        "crop_fraction": data["crop_pct"],
        "drop_path": args.drop_path or 0.0,
        "repeats": int(args.aug_repeats) or 1,
        "label_smoothing": args.smoothing,
        "augmentation": record_augmentation(args, data),
    }


def record_augmentation(args, data):
    """Returns timm's steps between a decoded image and the model, as fields of `AugmentConfig`.

    Fields at their default are left out.
    """
    from timm.data import create_transform

    options = dict(scale=args.scale, ratio=args.ratio, hflip=args.hflip, auto_augment=args.aa)
    transform = create_transform(
        data["input_size"], is_training=True, use_prefetcher=True, **options
    )
    fields = {}
    for step in transform.transforms:
        name = type(step).__name__
        if name == "RandomResizedCropAndInterpolation":
            if args.scale != args.ratio:  # both are (1, 1) if images have the input size
                if (step.scale, step.ratio) != ((0.08, 1.0), (3 / 4, 4 / 3)):
                    raise ValueError(f"unknown crop {step}")
                fields["crop"] = "resized"
        elif name == "RandomHorizontalFlip":
            fields["flip"] = step.p
        elif name == "RandAugment":
            fields["rand_augment"] = args.aa
        elif name not in ("ToNumpy", "MaybePILToTensor", "PILToTensor"):
            raise ValueError(f"unknown step {step}")
    # The prefetching loader mixes while it collates, then normalizes and erases on the device.
    if args.mixup or args.cutmix:
        fields |= dict(mixup=args.mixup, cutmix=args.cutmix, mix_group=args.batch_size)
    if args.reprob:
        if args.remode != "pixel":
            raise ValueError(f"unknown mode of erasing {args.remode}")
        fields |= dict(erasing=args.reprob)
    return fields


def kind(name):
    """Returns a parameter's name without its block number."""
    return re.sub(r"^blocks\.\d+\.", "blocks.", name)


if __name__ == "__main__":
    main(*sys.argv[1:])
