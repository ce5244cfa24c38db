"""Time and loss of the attention solve beside the 2024 paper's procedure.

    python benchmarks/solve.py --out=solve.json

The models are those of the papers, with different weights in every layer. `impulse` is timed as a
whole, cold (first call, including compilation) and warm. The reference procedure (10,000 Adam
steps on the full Q and K of every head) is timed on three heads and 200 steps, and its time scaled
to all heads, layers and steps. Its loss on the three heads after --reference_steps is compared with
that of `impulse` at the same column norm. PyTorch is timed if it is installed.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionSite, impulse, papers, sincos_positions
from structinit_jax.attention_init.kernels import convolution_maps, impulse_kernels
from structinit_jax.attention_init.solve import layer_norm

MODELS = {  # grid, width, heads, layers
    "ViT-T/16": ((14, 14), 192, 3, 12),
    "ViT-B/16": ((14, 14), 768, 12, 12),
    "ViT-T/2": ((16, 16), 192, 3, 12),
    "ViT-T/h8": ((16, 16), 192, 8, 12),
    "ViT-S/h16": ((16, 16), 384, 16, 12),
    "width 256, 32 heads": ((16, 16), 256, 32, 8),
}
HEADS, STEPS = 3, 10_000
TIMED_STEPS = 200


def make_site(name: str) -> AttentionSite:
    """Returns the site of a model in `MODELS`."""
    grid, width, num_heads, depth = MODELS[name]
    head_dim = width // num_heads
    positions = sincos_positions(grid, width)
    return AttentionSite(grid, width, num_heads, head_dim, depth, head_dim**-0.5, positions)


def time_impulse(site: AttentionSite, vo_init: str) -> dict:
    """Times the first and the later calls, and returns the report."""
    init = impulse(vo_init=vo_init)
    seconds = []
    for seed in range(6):
        start = time.perf_counter()
        weights = jax.block_until_ready(init(jax.random.key(seed), site))
        seconds.append(time.perf_counter() - start)
    return {
        "cold_s": seconds[0],
        "warm_s": float(np.median(seconds[1:])),
        "loss": float(weights.report.loss),
        "target_mass": float(weights.report.target_mass),
        "steps": int(weights.report.steps),
    }


def reference_problem(site: AttentionSite):
    """Returns the pseudo input and the targets of three heads: center, right, upper left."""
    x = np.asarray(layer_norm(site.positions), np.float32)
    targets = convolution_maps(impulse_kernels(3), site.grid)[[4, 5, 0]]
    return x, targets


def time_reference_in_jax(site: AttentionSite, steps: int) -> dict:
    """Times the procedure of `impulse_2024`, jitted as one loop."""
    x, targets = map(jnp.asarray, reference_problem(site))

    def run(steps):
        start = time.perf_counter()
        solved = papers._solve_2024(
            jax.random.key(0),
            x,
            targets,
            qk_scale=site.qk_scale,
            head_dim=site.head_dim,
            max_steps=steps,
            learning_rate=1e-4,
        )
        report = jax.block_until_ready(solved)[2]
        return time.perf_counter() - start, report

    run(TIMED_STEPS)  # compiles
    seconds, _ = run(TIMED_STEPS)
    report = run(steps)[1]
    solved = impulse(filters=np.asarray(targets), norm=float(report.norm), vo_init="default")
    ours = solved(jax.random.key(0), site).report
    return _scaled(seconds, site) | {
        "loss": float(report.loss),
        "norm": float(report.norm),
        "impulse_loss_at_that_norm": float(ours.loss),
    }


def time_reference_in_torch(site: AttentionSite) -> dict | None:
    """Times the same procedure in eager PyTorch, as the reference program runs it."""
    try:
        import torch
    except ImportError:
        return None
    x, targets = map(torch.from_numpy, reference_problem(site))
    bound = site.width**-0.5
    shape = (HEADS, site.width, site.head_dim)
    factors = [torch.empty(shape).uniform_(-bound, bound).requires_grad_() for _ in range(2)]
    norms = [f.detach().norm(dim=1).mean(dim=1)[:, None, None] for f in factors]
    adam = torch.optim.Adam(factors, lr=1e-4, eps=papers.ADAM_EPSILON_2024)

    def step(index):
        query, key = factors
        logits = site.qk_scale * (x @ query) @ (x @ key).transpose(1, 2)
        loss = ((targets - logits.softmax(dim=-1)) ** 2).mean(dim=(1, 2)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if index % papers.RESCALE_EVERY == 0:
            with torch.no_grad():
                for f, norm in zip(factors, norms, strict=True):
                    f *= norm / f.norm(dim=1, keepdim=True)

    for index in range(20):
        step(index)
    start = time.perf_counter()
    for index in range(TIMED_STEPS):
        step(index)
    return _scaled(time.perf_counter() - start, site)


def _scaled(seconds: float, site: AttentionSite) -> dict:
    whole = seconds * STEPS / TIMED_STEPS * site.num_layers * site.num_heads / HEADS
    return {"measured_s": seconds, "whole_model_s": whole}


def print_row(name: str, site: AttentionSite, row: dict) -> None:
    """Prints the results of one model."""
    print(f"\n{name}: {site.num_layers} layers, {site.num_heads} heads", flush=True)
    for method in list(row)[:2]:
        r = row[method]
        print(
            f"  {method:32} cold {r['cold_s']:.2f} s, warm {r['warm_s']:.3f} s, loss "
            f"{r['loss']:.2e}, {100 * r['target_mass']:.1f} % on target, {r['steps']} steps"
        )
    warm = row["impulse, query and key"]["warm_s"]
    for method in list(row)[2:]:
        r = row[method]
        if r is None:
            print(f"  {method:32} not measured: torch is not installed")
            continue
        print(
            f"  {method:32} {r['whole_model_s']:.0f} s ({r['whole_model_s'] / warm:,.0f} × impulse "
            f"warm), scaled from {HEADS} heads and {TIMED_STEPS} steps in {r['measured_s']:.2f} s"
        )
    r = row["reference in JAX"]
    print(
        f"  loss at column norm {r['norm']:.2f}: reference {r['loss']:.2e}, impulse "
        f"{r['impulse_loss_at_that_norm']:.2e}, "
        f"{r['impulse_loss_at_that_norm'] / r['loss']:.2f} of it"
    )


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="solve.json")
    parser.add_argument("--models", nargs="+", default=["ViT-T/16", "ViT-B/16"], choices=MODELS)
    parser.add_argument(
        "--reference_steps", type=int, default=STEPS, help="steps before the reference's loss"
    )
    arguments = parser.parse_args()
    results = {"device": jax.devices()[0].device_kind}
    for name in arguments.models:
        site = make_site(name)
        row = {
            "impulse, query and key": time_impulse(site, "default"),
            "impulse, with V and projection": time_impulse(site, "balanced"),
            "reference in JAX": time_reference_in_jax(site, arguments.reference_steps),
            "reference in PyTorch": time_reference_in_torch(site),
        }
        results[name] = row
        print_row(name, site, row)
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=2)
    print(f"\nwrote {arguments.out}")


if __name__ == "__main__":
    main()
