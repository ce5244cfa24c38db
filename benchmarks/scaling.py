"""Communication of a training step, and the efficiency it implies on many devices.

    python benchmarks/scaling.py --out=scaling.json

The bytes are those of the 2025 paper's ImageNet step, compiled for eight virtual CPU devices. The
efficiency is computed, not measured: from the bytes, the model's FLOPs and the chips' published
bandwidths, assuming that each chip reaches `--mfu` of its peak while it computes. Latency is
ignored. Communication either follows the computation ("in turn") or overlaps it ("overlapped").
"""

import argparse
import json
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

from typing import NamedTuple

from structinit_jax.command_line import load_config
from structinit_jax.data.info import CATALOG
from structinit_jax.train import set_up
from structinit_jax.training import flops
from structinit_jax.training.collectives import traffic_by_kind

MODELS = {f"ViT-{name[0].upper()}": f"vit_{name}_patch16_224" for name in ("tiny", "small", "base")}
NUM_CHIPS = (8, 64, 256, 1024)
IMAGES_PER_CHIP = 128
GLOBAL_BATCH = 1024


class Chip(NamedTuple):
    """Bandwidth of a chip in one direction, in bytes per second.

    Attributes:
      kind: Name in `flops.PEAK`.
      near: To chips of the same group.
      far: To other groups.
      group: Number of chips in a group.
    """

    kind: str
    near: float
    far: float
    group: int


# TPU: all links of a chip, from https://cloud.google.com/tpu/docs/v5e and /v5p; a group is a pod.
# H100: half of NVLink's 900 GB/s, and one 400 Gbit/s adapter for each GPU, as in
# https://docs.nvidia.com/dgx/dgxh100-user-guide; a group is a node.
CHIPS = {
    "TPU v5e": Chip("TPU v5 lite", near=200e9, far=0, group=256),
    "TPU v5p": Chip("TPU v5p", near=600e9, far=0, group=8960),
    "H100 SXM": Chip("NVIDIA H100 80GB HBM3", near=450e9, far=50e9, group=8),
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


def measure(model: str) -> dict:
    """Returns the bytes of a step by kind of collective, with replicated and with sharded state."""
    config = load_config(f"configs/vit_2025_imagenet.py:{model}")
    config.attention_init = dict(name="default")
    row = {"flops_per_image": flops.flops_per_image(config)}
    for fsdp in (1, 8):
        config.fsdp = fsdp
        info = CATALOG["imagenet2012"]
        setup = set_up(config, info, info.num_examples["train"])
        step = setup.train_step.lower(setup.abstract_state, setup.abstract_batch).compile()
        row[f"fsdp={fsdp}"] = {
            kind: total for kind, (total, _) in traffic_by_kind(step.as_text()).items()
        }
    return row


def main() -> None:
    """Prints the tables and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="scaling.json")
    parser.add_argument("--mfu", type=float, default=0.4, help="assumed fraction of the peak")
    arguments = parser.parse_args()
    results = {"mfu": arguments.mfu}
    for name, model in MODELS.items():
        row = results[name] = measure(model)
        print(f"\n{name}: {row['flops_per_image']:.3e} FLOPs per image, sent per device and step")
        for fsdp in ("fsdp=1", "fsdp=8"):
            sent = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in row[fsdp].items())
            print(f"  {fsdp}: {sent}")
        num_bytes = row["fsdp=1"]["all-reduce"]
        for batch, images in (
            (f"{IMAGES_PER_CHIP} images a chip", lambda n: IMAGES_PER_CHIP),
            (f"{GLOBAL_BATCH} images in all", lambda n: GLOBAL_BATCH / n),
        ):
            print(f"  efficiency with {batch}, in turn / overlapped, on")
            for chip_name, chip in CHIPS.items():
                speed = arguments.mfu * flops.PEAK[chip.kind] / row["flops_per_image"]
                cells = {n: efficiencies(num_bytes, images(n) / speed, n, chip) for n in NUM_CHIPS}
                row[f"{chip_name}, {batch}"] = cells
                print(f"    {chip_name:9}" + "".join(map(_cell, cells.items())))
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=2)
    print(f"\nwrote {arguments.out}")


def _cell(item: tuple[int, dict | None]) -> str:
    num_chips, values = item
    text = (
        f"{100 * values['in_turn']:3.0f} / {100 * values['overlapped']:3.0f} %" if values else "–"
    )
    return f"   {num_chips:4}: {text:13}"


if __name__ == "__main__":
    main()
