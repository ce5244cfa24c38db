"""Memory and communication of the papers' recipes on accelerators, without having one.

    pip install '.[targets]' && python benchmarks/targets.py --out=targets.json

Compiles the training step of each config for each target, as `main --dry_run --target=` does, which
takes one to three minutes each on two CPU cores. Programs that do not fit are reported with the
compiler's message. The batch is that of the recipe, whatever the number of devices.
"""

import argparse
import contextlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

IMAGENET = "configs/vit_b_imagenet.py"
SLICES = (
    "tpu-v5e:2x4",  # v5e-8
    "tpu-v5e:16x16",  # v5e-256
    "tpu-v4:2x2x4",  # v4-32
    "tpu-v5p:2x4x4",  # v5p-64
    "tpu-v6e:2x4",  # v6e-8
    "h100",  # one machine of eight
)
PROGRAMS = [(IMAGENET, target) for target in SLICES] + [
    (config, target)
    for config in (
        "configs/vit_2024_imagenet.py",
        "configs/vit_2025_small.py",
        "configs/vit_2024_small.py:cifar10,vit_small_patch2_32",
        "configs/swin_mixer_2025_small.py:cifar10,swin_tiny_patch4_window7_224",
        "configs/swin_mixer_2025_small.py:cifar10,mixer_s16_224",
    )
    for target in ("tpu-v5e:2x4", "h100")
]


def measure(config: str, target: str) -> dict[str, str]:
    """Returns the lines of a dry run that concern the compiled program, or why there is none."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from structinit_jax.command_line import load_config
    from structinit_jax.dry_run import dry_run
    from structinit_jax.errors import InputError
    from structinit_jax.training.targets import find_target

    find_target(target)  # a compiler that is not installed says nothing about memory
    try:
        with contextlib.redirect_stdout(sys.stderr):
            rows = dry_run(load_config(config), target)
    except InputError as error:
        return {"does not fit": str(error)}
    names = ("devices", "batch", "memory per device", "sent per step", "remat")
    return {name: rows[name] for name in names if name in rows}


def main():
    """Compiles one program after another, each in a process of its own, and writes --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file for the results")
    parser.add_argument("--only", default="", help="only targets whose name contains this")
    args = parser.parse_args()
    results = []
    for config, target in PROGRAMS:
        if args.only not in target:
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            result = process.submit(measure, config, target).result()
        results.append({"config": config, "target": target, **result})
        print(json.dumps(results[-1], indent=2), flush=True)
        with open(args.out, "w") as file:
            json.dump(results, file, indent=2, ensure_ascii=False)
            file.write("\n")


if __name__ == "__main__":
    main()
