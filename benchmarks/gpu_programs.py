"""Kernels, memory traffic and temporaries of training steps compiled for an H100, without one.

    pip install '.[targets]' && python benchmarks/gpu_programs.py --big_vision=CHECKOUT \
        --out=gpu_programs.json

Compares the variants of our step and big_vision's (see train_step.py) as XLA compiles them for one
H100 in bfloat16. Nothing is measured: kernels and bytes are counted in the program (see hlo.py),
and kernels are not tuned, since that takes a GPU. Steps that launch fewer kernels and move fewer
bytes tend to be faster; by how much only a GPU can tell.

Loops of the augmentation that depend on the drawn operations count with their expected length.
cuDNN's attention is compiled without cuDNN, so its workspace is not among the temporaries.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROWS = {"ViT-B/16": 128, "ViT-S/16": 256, "ViT-T/2 at 32²": 256}  # row of train_step.py: batch
PEERS = ("big_vision", "big_vision, scan with remat")
# Share of the images that each loop of AUGMENT changes, in the order of the program: RandAugment's
# bilinear and bicubic warps, tables, equalize, saturation and sharpness (`rand_augment`), erasing.
SHARES = (2.5 / 15, 2.5 / 15, 7 / 15, 1 / 15, 1 / 15, 1 / 15, 0.25)


def measure(name: str, program: str, checkout: str) -> dict[str, int]:
    """Returns the costs of a step that is compiled for one H100."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import hlo
    import numpy as np
    import train_step
    from jax.sharding import NamedSharding, PartitionSpec

    from structinit_jax.training.mesh import make_mesh
    from structinit_jax.training.targets import find_target

    row = train_step.ROWS[name]._replace(batch=ROWS[name])
    target = find_target("h100:1x1")
    if program in train_step.OURS:
        if "cuDNN" in program:
            _pretend_cudnn()
        _, setup = train_step.set_up_ours(row, program, "bfloat16", target.devices)
        lowered = setup.train_step.lower(setup.abstract_state, setup.abstract_batch)
    else:
        sharding = NamedSharding(make_mesh(devices=target.devices), PartitionSpec())
        init, step = train_step.big_vision_functions(row, program, checkout, "bfloat16")
        images = jax.ShapeDtypeStruct((row.batch, row.size, row.size, 3), np.float32)
        labels = jax.ShapeDtypeStruct((row.batch,), np.int32)
        step = jax.jit(step, donate_argnums=0, in_shardings=sharding, out_shardings=sharding)
        lowered = step.lower(jax.eval_shape(init, images), images, labels)
    compiled = lowered.compile(target.compiler_options)
    cost = hlo.count(compiled.as_text(), [chunks(share, row.batch) for share in SHARES])
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return {"kernels": cost.kernels} | cost._asdict() | {"temporary_bytes": temporaries}


def chunks(share: float, batch: int) -> float:
    """Returns the expected number of chunks of `augment.apply_where`."""
    from structinit_jax.augment.apply_where import CHUNKS

    size = math.ceil(batch / CHUNKS)
    return sum(
        math.comb(batch, n) * share**n * (1 - share) ** (batch - n) * math.ceil(n / size)
        for n in range(batch + 1)
    )


def _pretend_cudnn():
    """Passes JAX's checks of the installed cuDNN and GPU, which lowering does not need."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cudnn.check_cudnn_version = lambda: 91000
    cudnn.check_compute_capability = lambda capability: True
    cudnn.is_cuda_compute_capability_equal = lambda capability: capability == "9.0"


def main() -> None:
    """Compiles one program after another, each in a process of its own, and writes --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file for the results")
    parser.add_argument("--big_vision", default="", help="checkout of google-research/big_vision")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    args = parser.parse_args()
    from train_step import OURS

    results = {}
    for name in args.rows:
        rows = results[name] = {}
        print(f"{name}, batch of {ROWS[name]}", flush=True)
        for program in (*OURS, *(PEERS if args.big_vision else ())):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                row = process.submit(measure, name, program, args.big_vision).result()
            rows[program] = row
            print(
                f"  {program:32} {row['kernels']:6,.0f} kernels ({row['products']} products)"
                f"  {row['num_bytes'] / 1e9:6.1f} GB moved"
                f"  {row['temporary_bytes'] / 1e9:5.2f} GB of temporaries",
                flush=True,
            )
        text = json.dumps({"batch": ROWS, "rows": results}, indent=2, ensure_ascii=False)
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
