"""Speed, memory and compile time of one training step, compared with timm and big_vision.

On CPUs, in float32:

    python benchmarks/train_step.py --torch_python=TORCH/bin/python --big_vision=CHECKOUT \
        --out=train_step.json

On one GPU, with every variant of the step:

    python benchmarks/train_step.py --torch_python=TORCH/bin/python --big_vision=CHECKOUT \
        --rows ViT-B/16 --batch=128 --dtype=bfloat16 --programs all --steps=20 --out=h100.json

A step is a forward pass, a backward pass and AdamW on random images. Ours is the trainer's own
step, which also computes gradient norms. Only the program with "augmentation" in its name augments
images, as in the ImageNet recipe but without the random crops, which are made on the host. timm
uses fused attention and, in bfloat16, autocast. big_vision is its models/vit.py with a class token
and optax's AdamW; it runs unrolled, and under its scan, which recomputes every block. Its GELU is
the tanh approximation ("as published"); the other rows replace it with the exact one, which timm
and ours compute.

Each program runs in its own process. The programs of a row take turns, so that other load on the
machine affects all of them; on a GPU they share its memory. Peers whose paths are not given are
left out. Temporaries and cuDNN attention calls are those of XLA's compiled step; timm has no such
numbers.
"""

import argparse
import contextlib
import json
import os
import runpy
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

IMPORT_TORCHVISION = Path(__file__).parents[1] / "tests" / "references" / "import_torchvision.py"


class Row(NamedTuple):
    """The names of a model in each program, and its batch and image sizes."""

    ours: str
    timm: str
    batch: int
    timm_options: Mapping[str, int] = types.MappingProxyType({})
    big_vision: str = ""
    size: int = 224


ROWS = {
    "ViT-Ti/16": Row("vit_tiny_patch16_224", "vit_tiny_patch16_224", 16, big_vision="Ti/16"),
    "ViT-S/16": Row("vit_small_patch16_224", "vit_small_patch16_224", 16, big_vision="S/16"),
    "ViT-B/16": Row("vit_base_patch16_224", "vit_base_patch16_224", 8, big_vision="B/16"),
    "ViT-T/2 at 32²": Row(
        "vit_tiny_patch2_32",
        "vit_tiny_patch16_224",
        32,
        timm_options=dict(img_size=32, patch_size=2),
        big_vision="Ti/2",
        size=32,
    ),
    "Swin-T": Row("swin_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224", 8),
    "Mixer-B/16": Row("mixer_b16_224", "mixer_b16_224", 8),
}
AUGMENTED = ", augmentation"
OURS = {  # changes to the config's model
    "structinit_jax": {},
    "structinit_jax, remat dots": dict(remat="dots"),
    f"structinit_jax{AUGMENTED}": {},
}
TIMM = {"timm": False, "timm, torch.compile": True}  # whether it is compiled
DEFAULT_ROWS = ("ViT-Ti/16", "ViT-S/16", "ViT-T/2 at 32²", "Swin-T", "Mixer-B/16")
BIG_VISION = {  # options of the model, and whether its GELU is exact
    "big_vision": (dict(scan=False), True),
    "big_vision as published": (dict(scan=False), False),
    "big_vision, scan with remat": (dict(scan=True), True),
}
DEFAULT_PROGRAMS = ("structinit_jax", "timm", *BIG_VISION)
AUGMENT = dict(flip=0.5, rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0)
Step = Callable[[], Any]  # runs one step to completion


def compile_step(step, *arguments) -> tuple[Any, dict[str, float]]:
    """Compiles a jitted step; returns it and its costs."""
    start = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    costs = {
        "compile_seconds": seconds,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "cudnn_attention_calls": compiled.as_text().count('"__cudnn$fmha'),
    }
    return compiled, costs


def make_ours(row: Row, program: str, dtype: str) -> tuple[Step, dict[str, Any]]:
    """Returns the trainer's step and its costs."""
    import jax

    from structinit_jax.config import base_config
    from structinit_jax.training import build
    from structinit_jax.training import state as state_lib
    from structinit_jax.training.step import make_train_step

    config = base_config(row.ours)
    config.update(batch_size=row.batch, clip_norm=0.0, label_smoothing=0.0)
    config.attention_init = dict(name="default")
    config.model.update(dtype=dtype, **OURS[program])
    if program.endswith(AUGMENTED):
        config.augment.update(AUGMENT)
    model = build.make_model(config, build.make_mesh(config, jax.devices()[:1]))
    schedule = build.make_schedule(config, 100 * row.batch)
    initialize = state_lib.make_initializer(config, model)
    optimizer = build.make_optimizer(config, schedule.learning_rate, model)
    abstract = state_lib.abstract_state(model, optimizer)
    initial = initialize()
    state = state_lib.initialize_state(*initial.weights, optimizer, abstract)
    abstract_batch = build.abstract_batch(config, model.mesh)
    images, labels = random_batch(row)
    images = (127 + 40 * images).clip(0, 255).astype(np.uint8)
    shardings = {name: array.sharding for name, array in abstract_batch.items()}
    batch = jax.device_put({"image": images, "label": labels}, shardings)
    seed = jax.device_put(np.uint32(0), state.step.sharding)
    step = make_train_step(config, model, optimizer, schedule.learning_rate)
    step = build.jit_step(step, model.mesh, abstract)
    step, costs = compile_step(step, abstract, abstract_batch, build.SEED)

    def run():
        nonlocal state
        state, _ = jax.block_until_ready(step(state, batch, seed))

    return run, costs | {"device": jax.devices()[0].device_kind}


def make_big_vision(
    row: Row, program: str, checkout: str, dtype: str
) -> tuple[Step, dict[str, float]]:
    """Returns a step of big_vision's ViT and its costs."""
    import jax
    import jax.numpy as jnp

    init, train_step = big_vision_functions(row, program, checkout, dtype)
    batch = jax.tree.map(jnp.asarray, random_batch(row))
    state = jax.jit(init)(batch[0])
    step, costs = compile_step(jax.jit(train_step, donate_argnums=0), state, *batch)

    def run():
        nonlocal state
        state, _ = jax.block_until_ready(step(state, *batch))

    return run, costs


def big_vision_functions(row: Row, program: str, checkout: str, dtype: str) -> tuple:
    """Returns the functions `images -> state` and `(state, images, labels) -> (state, loss)`."""
    import jax
    import optax
    from flax import linen

    sys.path.insert(0, checkout)
    # vit.py imports these for checkpoints only, and they need TensorFlow.
    for name in ("big_vision.utils", "big_vision.models.common"):
        sys.modules[name] = types.ModuleType(name)
    import big_vision

    big_vision.utils = sys.modules["big_vision.utils"]
    import big_vision.models

    big_vision.models.common = sys.modules["big_vision.models.common"]
    from big_vision.models import vit

    options, exact = BIG_VISION[program]
    if exact:
        linen.gelu = lambda x: jax.nn.gelu(x, approximate=False)
    model = vit.Model(1000, variant=row.big_vision, pool_type="tok", dtype_mm=dtype, **options)
    optimizer = optax.adamw(1e-3)

    def init(images):
        params = model.init(jax.random.key(0), images)
        return params, optimizer.init(params)

    def train_step(state, images, labels):
        params, opt_state = state

        def loss_fn(params):
            logits, _ = model.apply(params, images, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return init, train_step


def make_timm(row: Row, program: str, dtype: str) -> tuple[Step, dict[str, float]]:
    """Returns a step of timm's model."""
    import torch

    runpy.run_path(str(IMPORT_TORCHVISION))
    import timm

    torch.set_float32_matmul_precision("high")  # TF32, JAX's default on GPUs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model(row.timm, **row.timm_options).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda" or None)
    images, labels = (torch.from_numpy(array).to(device) for array in random_batch(row))
    images = images.permute(0, 3, 1, 2).contiguous()
    forward = torch.compile(model) if TIMM[program] else model

    def run():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run, {}


def random_batch(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Returns normalized images and labels."""
    images = np.random.default_rng(0).normal(size=(row.batch, row.size, row.size, 3))
    dtype = np.int64 if "torch" in sys.modules else np.int32
    return images.astype(np.float32), np.arange(row.batch, dtype=dtype)


def work(program: str, row: Row, flags: argparse.Namespace) -> None:
    """Prints the costs of a program's step, then times one step for each line of stdin."""
    with contextlib.redirect_stdout(sys.stderr):
        if program in TIMM:
            run, costs = make_timm(row, program, flags.dtype)
        elif program in BIG_VISION:
            run, costs = make_big_vision(row, program, flags.big_vision, flags.dtype)
        else:
            run, costs = make_ours(row, program, flags.dtype)
        run()
        run()
    print(json.dumps(costs), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


def measure(name: str, row: Row, flags: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the results of all programs for a row."""
    pythons = {}
    for program in flags.programs:
        if program in OURS:
            pythons[program] = sys.executable
        elif program in TIMM and flags.torch_python:
            pythons[program] = flags.torch_python
        elif program in BIG_VISION and flags.big_vision and row.big_vision:
            pythons[program] = flags.big_vision_python
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # they share a GPU
    workers, results = {}, {}
    with contextlib.ExitStack() as stack:
        for program, python in pythons.items():
            command = [python, __file__, "--worker", program, "--rows", name]
            command += ["--big_vision", flags.big_vision]
            command += ["--dtype", flags.dtype, "--batch", str(row.batch)]
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            workers[program] = stack.enter_context(worker)
            costs = worker.stdout.readline()
            if not costs:
                raise SystemExit(f"{program} failed, see above: leave it out of --programs")
            results[program] = json.loads(costs) | {"seconds": []}
        for _ in range(flags.rounds):
            for program, worker in workers.items():
                for _ in range(flags.steps):
                    worker.stdin.write("\n")
                    worker.stdin.flush()
                    results[program]["seconds"].append(float(worker.stdout.readline()))
    for result in results.values():
        speeds = row.batch / np.asarray(result.pop("seconds"))
        low, median, high = np.quantile(speeds, [0, 0.5, 1]).round(2).tolist()
        result |= {"images_per_second": median, "range": [low, high]}
    return results


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--rows", nargs="+", default=list(DEFAULT_ROWS), choices=ROWS)
    programs = (*OURS, *TIMM, *BIG_VISION)
    parser.add_argument(
        "--programs", nargs="+", default=DEFAULT_PROGRAMS, choices=(*programs, "all")
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, help="batch size (default: the row's own)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each program")
    parser.add_argument("--steps", type=int, default=3, help="steps of each program in a round")
    parser.add_argument("--torch_python", default="", help="Python that has torch and timm")
    parser.add_argument("--big_vision", default="", help="checkout of google-research/big_vision")
    parser.add_argument("--big_vision_python", default=sys.executable, help="Python that has flax")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if "all" in flags.programs:
        flags.programs = programs
    rows = {}
    for name in flags.rows:
        row = ROWS[name]._replace(**{"batch": flags.batch} if flags.batch else {})
        if flags.worker:
            work(flags.worker, row, flags)
            return
        title = f"{name}, {row.size}² pixels, batch of {row.batch}, {flags.dtype}"
        print(f"{title}: images/s", flush=True)
        programs = measure(name, row, flags)
        rows[name] = {"batch": row.batch, "image_size": row.size, "programs": programs}
        for program, result in programs.items():
            low, high = result["range"]
            line = f"  {program:32} {result['images_per_second']:6.1f}  ({low:.1f} to {high:.1f})"
            if "compile_seconds" in result:
                line += f"  {result['temporary_bytes'] / 1e6:6.0f} MB of temporaries"
                line += f"  compiled in {result['compile_seconds']:.1f} s"
            print(line, flush=True)
        plain, augmented = (programs.get(f"structinit_jax{end}") for end in ("", AUGMENTED))
        if plain and augmented:
            share = 1 - augmented["images_per_second"] / plain["images_per_second"]
            print(f"  augmentation takes {share:.1%} of the step", flush=True)
            rows[name]["augmentation_share"] = round(share, 4)
    if flags.out:
        results = {
            "cores": len(os.sched_getaffinity(0)),
            "dtype": flags.dtype,
            "rounds": flags.rounds,
            "steps": flags.steps,
            "rows": rows,
        }
        Path(flags.out).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
