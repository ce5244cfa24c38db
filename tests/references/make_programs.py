"""Records again what the authors' programs do for each recipe of `programs.json`.

    cd tests
    python -m references.make_programs 2024 CHECKOUT   # github.com/osiriszjq/structured_init
    python -m references.make_programs 2025 CHECKOUT   # .../structured_initialization

CHECKOUT is the timm folder inside the repository, at commit 48b59c3 or 2623dcc. The commands in
`programs.json` are those of its README, except that there is none for ConvMixer: the 2024 paper
trains it like its small ViTs, with learning rate 0.01 for 100 epochs. The models, schedules,
optimizers and transforms are built by the program's own functions, without the GPU calls. Takes 20
minutes.
"""

import json
import pathlib
import re
import sys

import numpy as np
import torch

import references.import_torchvision  # noqa: F401

OUT = pathlib.Path(__file__).with_name("programs.json")
# Paper -> our config and row up to the initialization -> timm's name, its arguments, classes.
TINY, POOLED = "vit_tiny_patch2_32", dict(sin_pe=True, class_token=False, global_pool="avg")
SIZES = {
    "vit_tiny_patch2_32": {},
    "vit_tiny_h8_patch2_32": dict(num_heads=8),
    "vit_small_patch2_32": dict(embed_dim=384, num_heads=6),
    "vit_small_h16_patch2_32": dict(embed_dim=384, num_heads=16),
    "vit_w64_h4_patch2_32": dict(embed_dim=64, num_heads=4, depth=8),
    "vit_w512_h32_patch2_32": dict(embed_dim=512, num_heads=32, depth=8),
}
MODELS = {
    "2024": {
        **{
            f"vit_2024_small.py:cifar10,{name}": (TINY, POOLED | size, 10)
            for name, size in SIZES.items()
        },
        "vit_2024_imagenet.py:": ("vit_tiny_patch16_224", POOLED | dict(img_size=(224, 224)), 1000),
    },
    "2025": {
        "vit_2025_small.py:cifar10,vit_tiny_patch16_224": ("vit_tiny_patch16_224", {}, 10),
        "vit_2025_imagenet.py:vit_base_patch16_224": ("vit_base_patch16_224", {}, 1000),
    },
}
# Paper -> initialization, in the words of our configs -> arguments of the model.
INITS = {
    "2024": {
        "truncated_normal": dict(weight_init=""),
        "kaiming_uniform": dict(weight_init="skip"),
        "mimetic": dict(weight_init="mimetic0.7_0.7"),
        "impulse_2024": dict(weight_init="impulse3"),
        "impulse_2024,5": dict(weight_init="impulse5"),
    },
    "2025": {
        name: dict(weight_init="skip", post_weight_init=name.removesuffix("_2025"), img_size=224)
        for name in ("default", "mimetic", "impulse_2025")
    },
}
CONVMIXERS = ("256_8_3", "512_6_3", "512_6_5")  # width, depth, kernel size
FILTERS = {"trained": "train", "random": "random", "impulse_2024": "impulse", "box": "box"}


def main(paper, checkout):
    sys.path.insert(0, checkout)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    import train
    from timm.models import vision_transformer

    results = json.loads(OUT.read_text())
    models = results["models"]
    if paper == "2024":
        encode = vision_transformer.build_sincos2d_pos_embed
        vision_transformer.build_sincos2d_pos_embed = lambda shape, dim, device: encode(shape, dim)
        for name in CONVMIXERS:
            model, size = name.rsplit("_", 1)
            models[f"convmixer_2024.py:convmixer_{model},{size}"] = {
                filters: statistics(train.create_model(f"convmixer_{name}_{kind}", num_classes=10))
                for filters, kind in FILTERS.items()
            }
    for name, recipe in results["recipes"].items():
        if name.endswith(paper):
            size = {"img_size": 224} if paper == "2025" else {}
            recipe |= record_recipe(train, recipe["command"], **size)
    for name, (model, arguments, classes) in MODELS[paper].items():
        models[name] = {}
        for init, options in INITS[paper].items():
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
            network = train.create_model(model, num_classes=classes, **arguments | options)
            models[name][init] = statistics(network)
            print(name, init, flush=True)
    text = json.dumps(results, indent=1)
    text = re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    OUT.write_text(text + "\n")


def record_recipe(train, command, **arguments):
    """Builds what one command trains with; the arguments are the model's."""
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
            if args.scale != args.ratio:  # both are (1, 1) where images have the input's size
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


def statistics(model):
    """Returns the root mean square of every kind of weight, one number for each layer."""
    values = {}
    for name, parameter in model.named_parameters():
        parts = {name: parameter}
        if ".qkv." in name:
            parts = {
                name.replace("qkv", part): chunk
                for part, chunk in zip("qkv", parameter.chunk(3), strict=True)
            }
        for part, value in parts.items():
            size = float(value.detach().square().mean().sqrt())
            values.setdefault(kind(part), []).append(float(f"{size:.4g}"))
    return values


def kind(name):
    """Returns a parameter's name without the number of its block."""
    return re.sub(r"^blocks\.\d+\.", "blocks.", name)


if __name__ == "__main__":
    main(*sys.argv[1:])
