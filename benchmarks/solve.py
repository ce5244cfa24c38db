"""Time and loss of the attention solve, compared with the 2024 paper's procedure.

    python benchmarks/solve.py --out=solve.json

The models are the papers', with different weights in every layer. `impulse` is timed with value and
projection, cold (first call, including compilation) and warm. The reference procedure is
`impulse_2024`, which takes the steps of the authors' program (`tests/test_papers.py`): 10,000 Adam
steps on the full Q and K of every head. It is run for one layer, and its time scaled to all layers
and, for fewer --reference_steps, to all steps. PyTorch is timed for 50 steps if it is installed.

Losses are compared at the same norm. A map depends on the product Q Kᵀ, and the procedure ends with
a K that is about h^1/2 times longer than Q, so `impulse` is given the geometric mean of both
(`SolveReport.norm`), which the same product has when it is shared evenly between Q and K.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionSite, impulse, papers, sincos_positions
from structinit_jax.attention_init.targets import convolution_maps, impulse_kernels

MODELS = {  # grid, width, heads, layers
    "ViT-T/16": ((14, 14), 192, 3, 12),
    "ViT-B/16": ((14, 14), 768, 12, 12),
}
STEPS, TIMED_STEPS = 10_000, 50


def make_site(name: str) -> AttentionSite:
    """Returns the site of a model in `MODELS`."""
    grid, width, num_heads, depth = MODELS[name]
    head_dim = width // num_heads
    positions = sincos_positions(grid, width)
    return AttentionSite(grid, width, num_heads, head_dim, depth, head_dim**-0.5, positions)


def time_impulse(site: AttentionSite) -> dict:
    """Times the first and the later calls, and returns the report."""
    init, seconds = impulse(), []
    for seed in range(6):
        start = time.perf_counter()
        weights = jax.block_until_ready(init(jax.random.key(seed), site))
        seconds.append(time.perf_counter() - start)
    return {
        "cold_s": seconds[0],
        "warm_s": float(np.median(seconds[1:])),
        "loss": float(weights.report.loss),
        "target_mass": float(weights.report.target_mass),
    }


def reference_problem(site: AttentionSite):
    """Returns positions, kernels and targets of one layer, each offset about equally often."""
    kernels = impulse_kernels(3)[papers.CENTER_FIRST[np.arange(site.num_heads) % 9]]
    return np.asarray(site.positions), kernels, convolution_maps(kernels, site.grid)


def time_reference_in_jax(site: AttentionSite, steps: int) -> dict:
    """Runs one layer of `impulse_2024`, jitted as one loop, and `impulse` at its final norm."""
    positions, kernels, targets = reference_problem(site)
    positions, targets = map(jnp.asarray, (positions, targets))
    options = dict(head_dim=site.head_dim, qk_scale=site.qk_scale)
    solve = papers._solve_2024.lower(
        jax.random.key(0), positions, targets, max_steps=steps, **options
    ).compile()
    start = time.perf_counter()
    *_, report = jax.block_until_ready(solve(jax.random.key(0), positions, targets))
    seconds = time.perf_counter() - start
    solved = impulse(filters=kernels, norm=float(report.norm))
    ours = solved(jax.random.key(0), site).report
    return _scaled(seconds, steps, site) | {
        "loss": float(report.loss),
        "target_mass": float(report.target_mass),
        "norm": float(report.norm),
        "impulse_loss_at_that_norm": float(ours.loss),
    }


def time_reference_in_torch(site: AttentionSite) -> dict | None:
    """Times the same procedure in eager PyTorch, as the reference program runs it."""
    try:
        import torch
    except ImportError:
        return None
    positions, _, targets = reference_problem(site)
    positions, targets = map(torch.from_numpy, (positions, targets))
    x = torch.nn.functional.layer_norm(positions, positions.shape[1:])
    bound = (site.num_heads * site.head_dim) ** -0.5
    shapes = [
        (site.num_heads, site.width, site.head_dim),
        (site.num_heads, site.head_dim, site.width),
    ]
    factors = [torch.empty(s).uniform_(-bound, bound).requires_grad_() for s in shapes]
    norm = factors[0].detach().norm(dim=1).mean()
    adam = torch.optim.Adam(factors, lr=1e-4)

    def step(index):
        if index % papers.RESCALE_EVERY == 0:
            with torch.no_grad():
                for factor in factors:
                    factor *= norm / factor.norm(dim=1, keepdim=True)
        query, key = factors
        logits = site.qk_scale * x @ query @ key @ x.T
        loss = torch.nn.functional.mse_loss(logits.softmax(dim=-1), targets)
        adam.zero_grad()
        loss.backward()
        adam.step()

    for index in range(5):
        step(index)
    start = time.perf_counter()
    for index in range(TIMED_STEPS):
        step(index)
    return _scaled(time.perf_counter() - start, TIMED_STEPS, site)


def _scaled(seconds: float, steps: int, site: AttentionSite) -> dict:
    whole = seconds * STEPS / steps * site.num_layers
    return {"measured_s": seconds, "measured_steps": steps, "whole_model_s": whole}


def print_row(name: str, site: AttentionSite, row: dict) -> None:
    """Prints the results of one model."""
    print(f"\n{name}: {site.num_layers} layers, {site.num_heads} heads", flush=True)
    ours = row["impulse"]
    print(
        f"  {'impulse':32} cold {ours['cold_s']:.2f} s, warm {ours['warm_s']:.3f} s, loss "
        f"{ours['loss']:.2e}, {100 * ours['target_mass']:.1f} % on target"
    )
    for method in list(row)[1:]:
        r = row[method]
        if r is None:
            print(f"  {method:32} not measured: torch is not installed")
            continue
        ratio = r["whole_model_s"] / ours["warm_s"]
        print(
            f"  {method:32} {r['whole_model_s']:.0f} s ({ratio:,.0f} × impulse warm), scaled from "
            f"{r['measured_steps']} steps of a layer in {r['measured_s']:.2f} s"
        )
    r = row["reference in JAX"]
    print(
        f"  loss at norm {r['norm']:.2f}: reference {r['loss']:.2e}, impulse "
        f"{r['impulse_loss_at_that_norm']:.2e}, "
        f"{r['impulse_loss_at_that_norm'] / r['loss']:.2f} of it"
    )


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="solve.json", help="JSON file (default: solve.json)")
    parser.add_argument("--models", nargs="+", default=["ViT-T/16", "ViT-B/16"], choices=MODELS)
    parser.add_argument(
        "--reference_steps", type=int, default=STEPS, help="steps before the reference's loss"
    )
    arguments = parser.parse_args()
    results = {"device": jax.devices()[0].device_kind}
    for name in arguments.models:
        site = make_site(name)
        row = {
            "impulse": time_impulse(site),
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
