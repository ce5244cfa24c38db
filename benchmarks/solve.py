"""Time and closeness of the attention solve against the 2024 paper's procedure, side by side.

    python benchmarks/solve.py --out=solve.json

For ViT-T/16 and ViT-B/16 at 224 pixels, twelve layers with weights of their own. `impulse` is timed
whole, cold (first call, compilation included, no cache) and warm. The reference procedure (10,000
Adam steps on the full Q and K of every head) is run for three heads and a part of its steps, and
its time scaled to all heads, layers and steps; its loss is that of the three heads after
--reference_steps steps. PyTorch is timed where it is installed.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from structinit_jax.attention_init import AttentionSite, impulse, papers, sincos_positions
from structinit_jax.attention_init.filters import convolution_maps, impulse_kernels
from structinit_jax.attention_init.pseudo_input import layer_norm

MODELS = {"ViT-T/16": (192, 3), "ViT-B/16": (768, 12)}
GRID, DEPTH, HEAD_DIM, HEADS, STEPS = (14, 14), 12, 64, 3, 10_000
TIMED_STEPS = 200


def make_site(width: int, num_heads: int) -> AttentionSite:
    """All layers of a ViT/16 at 224 pixels."""
    positions = sincos_positions(GRID, width)
    return AttentionSite(GRID, width, num_heads, HEAD_DIM, DEPTH, HEAD_DIM**-0.5, positions)


def time_impulse(site: AttentionSite, value_out: str) -> dict:
    """Seconds of the first and of later calls, and the report."""
    init = impulse(value_out=value_out)
    seconds = []
    for seed in range(6):
        start = time.perf_counter()
        weights = jax.block_until_ready(init(jax.random.key(seed), site))
        seconds.append(time.perf_counter() - start)
    return {
        "cold_s": seconds[0],
        "warm_s": float(np.median(seconds[1:])),
        "loss": float(weights.report.loss),
        "share": float(weights.report.share),
        "steps": int(weights.report.steps),
    }


def reference_problem(site: AttentionSite):
    """Pseudo input and targets of three heads: centre, right neighbour, upper left neighbour."""
    x = np.asarray(layer_norm(site.positions), np.float32)
    targets = convolution_maps(impulse_kernels(3), GRID)[[4, 5, 0]]
    return x, targets


def time_reference_in_jax(site: AttentionSite, steps: int) -> dict:
    """The procedure of `impulse_2024`, jitted as one loop."""
    x, targets = map(jnp.asarray, reference_problem(site))

    def run(steps):
        start = time.perf_counter()
        solved = papers._solve_2024(
            jax.random.key(0),
            x,
            targets,
            qk_scale=site.qk_scale,
            head_dim=HEAD_DIM,
            max_steps=steps,
            learning_rate=1e-4,
        )
        report = jax.block_until_ready(solved)[2]
        return time.perf_counter() - start, report

    run(TIMED_STEPS)  # compiles
    seconds, _ = run(TIMED_STEPS)
    report = run(steps)[1]
    return _scaled(seconds, site) | {"loss": float(report.loss), "share": float(report.share)}


def time_reference_in_torch(site: AttentionSite) -> dict | None:
    """The same procedure written in PyTorch, eagerly, as the reference program runs it."""
    try:
        import torch
    except ImportError:
        return None
    x, targets = map(torch.from_numpy, reference_problem(site))
    bound = site.width**-0.5
    shape = (HEADS, site.width, HEAD_DIM)
    factors = [torch.empty(shape).uniform_(-bound, bound).requires_grad_() for _ in range(2)]
    norms = [f.detach().norm(dim=1).mean(dim=1)[:, None, None] for f in factors]
    adam = torch.optim.Adam(factors, lr=1e-4)

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


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="solve.json")
    parser.add_argument(
        "--reference_steps", type=int, default=STEPS, help="steps before the reference's loss"
    )
    arguments = parser.parse_args()
    results = {"device": jax.devices()[0].device_kind}
    for name, (width, num_heads) in MODELS.items():
        site = make_site(width, num_heads)
        row = {
            "impulse, query and key": time_impulse(site, "default"),
            "impulse, with V and projection": time_impulse(site, "mimetic"),
            "reference in JAX": time_reference_in_jax(site, arguments.reference_steps),
            "reference in PyTorch": time_reference_in_torch(site),
        }
        results[name] = row
        print(f"\n{name}, {DEPTH} layers, {num_heads} heads, on {results['device']}")
        for method in list(row)[:2]:
            r = row[method]
            print(
                f"  {method:32} cold {r['cold_s']:.2f} s, warm {r['warm_s']:.3f} s, loss "
                f"{r['loss']:.2e}, {100 * r['share']:.1f} % on target, {r['steps']} steps"
            )
        warm = row["impulse, query and key"]["warm_s"]
        for method in list(row)[2:]:
            r = row[method]
            if r is None:
                print(f"  {method:32} not measured: torch is not installed")
                continue
            loss = (
                f", loss {r['loss']:.2e}, {100 * r['share']:.1f} % on target" if "loss" in r else ""
            )
            print(
                f"  {method:32} {r['whole_model_s']:.0f} s, scaled from {HEADS} heads and "
                f"{TIMED_STEPS} steps in {r['measured_s']:.2f} s{loss}; "
                f"{r['whole_model_s'] / warm:,.0f} × impulse"
            )
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=2)
    print(f"\nwrote {arguments.out}")


if __name__ == "__main__":
    main()
