"""Communication of a training step, and the efficiency it implies on many devices.

    pip install '.[targets]' && python benchmarks/scaling.py --out=scaling.json

The bytes are those of the 2025 paper's ImageNet step, compiled for the eight chips of a v5e-8 and
for eight H100s (`--dry_run --target=`), which takes about a minute each on two CPU cores. The
efficiency is computed, not measured: from the bytes, the model's FLOPs and the chips' published
bandwidths, assuming that each chip reaches `--mfu` of its peak while it computes. Latency is
ignored. Communication either follows the computation ("in turn") or overlaps it ("overlapped");
`overlapped` of a program says for how many bytes it has computation to run meanwhile.

With fsdp=8, the weights of one block are gathered at a time: compare `largest` of the all-gather
with the bytes of one block and of all of them, in the type of the computation.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import jax

from structinit_jax.command_line import load_config
from structinit_jax.data.info import CATALOG
from structinit_jax.training import flops
from structinit_jax.training.collectives import traffic_by_kind
from structinit_jax.training.setup import set_up
from structinit_jax.training.targets import find_target

MODELS = {f"ViT-{name[0].upper()}": f"vit_{name}_patch16_224" for name in ("tiny", "small", "base")}
NUM_CHIPS = (8, 64, 256, 1024)
IMAGES_PER_CHIP = 128
GLOBAL_BATCH = 1024


PROGRAMS = {  # target, fsdp
    "tpu-v5e:2x4, fsdp=1": ("tpu-v5e:2x4", 1),
    "tpu-v5e:2x4, fsdp=8": ("tpu-v5e:2x4", 8),
    "h100, fsdp=1": ("h100", 1),
    "h100, fsdp=8": ("h100", 8),
}


class Chip(NamedTuple):
    """Bandwidth of a chip in one direction, in bytes per second.

    Attributes:
      program: The one of `PROGRAMS` that has its bytes.
      kind: Name in `flops.PEAK`.
      near: To chips of the same group.
      far: To other groups.
      group: Number of chips in a group.
    """

    program: str
    kind: str
    near: float
    far: float
    group: int


# TPU: all links of a chip, from https://cloud.google.com/tpu/docs/v5e and /v5p; a group is a pod.
# H100: half of NVLink's 900 GB/s, and one 400 Gbit/s adapter for each GPU, as in
# https://docs.nvidia.com/dgx/dgxh100-user-guide; a group is a node.
CHIPS = {
    "TPU v5e": Chip("tpu-v5e:2x4, fsdp=1", "TPU v5 lite", near=200e9, far=0, group=256),
    "TPU v5p": Chip("tpu-v5e:2x4, fsdp=1", "TPU v5p", near=600e9, far=0, group=8960),
    "H100 SXM": Chip("h100, fsdp=1", "NVIDIA H100 80GB HBM3", near=450e9, far=50e9, group=8),
}


def all_reduce_seconds(num_bytes: int, num_chips: int, chip: Chip) -> float | None:
    """Returns the minimum time of a ring all-reduce, or None if so many chips are not connected.

    Groups reduce-scatter; then each chip exchanges its part with its peers in other groups.
    """
    inside = min(num_chips, chip.group)
    groups = num_chips // inside
    if groups > 1 and not chip.far:
        return None
    seconds = 2 * (inside - 1) / inside * num_bytes / chip.near
    if groups > 1:
        seconds += 2 * (groups - 1) / groups * num_bytes / inside / chip.far
    return seconds


def efficiencies(num_bytes: int, compute: float, num_chips: int, chip: Chip) -> dict | None:
    """Returns the fraction of time spent computing, for steps of `compute` seconds per chip."""
    send = all_reduce_seconds(num_bytes, num_chips, chip)
    if send is None:
        return None
    return {"in_turn": compute / (compute + send), "overlapped": compute / max(compute, send)}


def compile_step(model: str, target: str, fsdp: int) -> dict[str, Any]:
    """Returns what a device receives in a step by kind of collective, and the sizes of arrays."""
    jax.config.update("jax_platforms", "cpu")
    devices, _, compiler_options = find_target(target)
    config = load_config(f"configs/vit_2025_imagenet.py:{model}")
    config.attention_init = dict(name="default")
    config.fsdp = fsdp
    info = CATALOG["imagenet2012"]
    setup = set_up(config, info, info.num_examples["train"], devices)
    step = setup.train_step.lower(setup.abstract_state, setup.abstract_batch)
    step = step.compile(compiler_options)
    leaves = jax.tree.leaves(setup.abstract_state.params["blocks"])
    blocks = sum(map(math.prod, (leaf.shape for leaf in leaves))) * 2  # bytes of a bfloat16
    memory = step.memory_analysis()
    return {
        kind: traffic._asdict() for kind, traffic in traffic_by_kind(step.as_text()).items()
    } | {
        "state_and_batch_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "block_bytes": blocks // config.model.depth,
        "blocks_bytes": blocks,
    }


def measure(model: str) -> dict[str, Any]:
    """Compiles the programs of a model, each in a process of its own."""
    config = load_config(f"configs/vit_2025_imagenet.py:{model}")
    row = {"flops_per_image": flops.flops_per_image(config)}
    for name, arguments in PROGRAMS.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            program = process.submit(compile_step, model, *arguments).result()
        row[name] = program
        sent = ", ".join(
            f"{kind} {traffic['total'] / 1e6:.1f} MB"
            f" ({traffic['overlapped'] / traffic['total']:.0%} overlapped,"
            f" largest {traffic['largest'] / 1e6:.1f} MB)"
            for kind, traffic in program.items()
            if isinstance(traffic, dict)
        )
        temporaries = f"{program['temporary_bytes'] / 1e9:.2f} GB of temporaries"
        print(f"  {name}: {sent}; {temporaries}", flush=True)
    return row


def main() -> None:
    """Prints the tables and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="scaling.json", help="JSON file (default: scaling.json)")
    parser.add_argument("--mfu", type=float, default=0.4, help="assumed fraction of the peak")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = {"mfu": arguments.mfu}
    for name in arguments.models:
        print(f"\n{name}: received per device and step", flush=True)
        row = results[name] = measure(MODELS[name])
        for batch, images in (
            (f"{IMAGES_PER_CHIP} images a chip", lambda n: IMAGES_PER_CHIP),
            (f"{GLOBAL_BATCH} images in all", lambda n: GLOBAL_BATCH / n),
        ):
            print(f"  efficiency with {batch}, in turn / overlapped, on")
            for chip_name, chip in CHIPS.items():
                num_bytes = row[chip.program]["all-reduce"]["total"]
                speed = arguments.mfu * flops.PEAK[chip.kind] / row["flops_per_image"]
                cells = {n: efficiencies(num_bytes, images(n) / speed, n, chip) for n in NUM_CHIPS}
                row[f"{chip_name}, {batch}"] = cells
                print(f"    {chip_name:9}" + "".join(map(_cell, cells.items())), flush=True)
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=2)
            file.write("\n")
    print(f"\nwrote {arguments.out}")


def _cell(item: tuple[int, dict | None]) -> str:
    num_chips, values = item
    text = (
        f"{100 * values['in_turn']:3.0f} / {100 * values['overlapped']:3.0f} %" if values else "–"
    )
    return f"   {num_chips:4}: {text:13}"


if __name__ == "__main__":
    main()
