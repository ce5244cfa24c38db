"""Time and loss of the attention solve, compared with the papers' own procedures.

    python benchmarks/solve.py --out=solve.json

On sin-cos positions, `impulse` is compared with algorithm 1 of the 2024 paper (`impulse_2024`,
which takes the steps of the authors' program): 10,000 Adam steps on the full Q and K of every head
of one layer, whose weights all layers then share, as in the paper's main results. If PyTorch is
installed, 50 steps of algorithm 1 are also timed in PyTorch. On learned positions that are kept,
`impulse` is compared with the closed form of the 2025 paper (`impulse_2025`).

Times are for all weights of a model, cold (the first call, with compilation) and warm. `impulse`
draws different weights for every layer. How close maps get to their targets depends on the norm of
Q and K, so losses are compared at the norm at which the other procedure ends. A map depends on the
product Q Kᵀ, and algorithm 1 ends with a K that is about h^1/2 times longer than Q. The norm used
is therefore the geometric mean of both: the norm of each if they shared the product evenly.
"""

import argparse
import dataclasses
import json
import time

import jax
import numpy as np

from structinit_jax.attention_init import (
    AttentionInit,
    AttentionSite,
    AttentionWeights,
    SolveReport,
    impulse,
    impulse_2024,
    impulse_2025,
    sincos_positions,
)
from structinit_jax.attention_init.absolute import NOISE_SOLVE
from structinit_jax.attention_init.positions import layer_norm
from structinit_jax.attention_init.published import RESCALE_EVERY
from structinit_jax.attention_init.solve import (
    full_row_space,
    row_space,
    solve,
    start_factors,
)
from structinit_jax.attention_init.targets import filter_maps, target_maps

MODELS = {  # grid, width, heads, layers
    "ViT-T/16": ((14, 14), 192, 3, 12),
    "ViT-S/16": ((14, 14), 384, 6, 12),
    "ViT-B/16": ((14, 14), 768, 12, 12),
}
STEPS = 10_000  # of algorithm 1
TORCH_STEPS = 50


def make_site(name: str) -> AttentionSite:
    """Returns the site of a model in `MODELS`, with sin-cos positions."""
    grid, width, num_heads, depth = MODELS[name]
    head_dim = width // num_heads
    positions = sincos_positions(grid, width)
    return AttentionSite(grid, width, num_heads, head_dim, depth, head_dim**-0.5, positions)


def with_learned_positions(site: AttentionSite) -> AttentionSite:
    """Returns the site with positions initialized as in the 2025 paper."""
    shape = (site.num_tokens, site.width)
    positions = 0.02 * jax.random.truncated_normal(jax.random.key(1), -2, 2, shape)
    return dataclasses.replace(site, positions=positions, positions_trainable=True)


def time_scheme(
    scheme: AttentionInit, site: AttentionSite, repeats: int = 5
) -> tuple[dict, AttentionWeights]:
    """Times the first and the later calls; returns times and report, and the last weights."""
    seconds = []
    for seed in range(1 + repeats):
        start = time.perf_counter()
        weights = jax.block_until_ready(scheme(jax.random.key(seed), site))
        seconds.append(time.perf_counter() - start)
    times = {"cold_s": seconds[0]}
    if repeats:
        times["warm_s"] = float(np.median(seconds[1:]))
    return times | numbers(weights.report), weights


def numbers(report: SolveReport) -> dict:
    """Returns a report as plain numbers."""
    return {name: float(value) for name, value in report._asdict().items()}


def impulse_at_norm(site: AttentionSite, weights: AttentionWeights) -> dict:
    """Returns the report of `impulse` for the targets of other weights, at their norm."""
    if site.positions_trainable:
        z, _ = full_row_space(layer_norm(18.0 * site.positions))
    else:
        z, _ = row_space(layer_norm(np.asarray(site.positions)))
    # The targets of one layer, one per head. At such a large norm, the solve needs the small steps
    # that `impulse` takes for learned positions.
    targets = filter_maps(weights.filters[weights.filter_index[0]], site.grid)
    sizes = dict(head_dim=site.head_dim, qk_scale=site.qk_scale)
    options = {key: NOISE_SOLVE[key] for key in ("learning_rate", "steps")}
    start = start_factors(z, targets, site.head_dim)
    query, key = (np.linalg.norm(w[0], axis=(0, 2)) for w in (weights.query, weights.key))
    norm = np.sqrt(query * key / site.head_dim).mean()  # of the columns of a head's Q and K
    *_, report = solve(start, z, targets, norm, **options, **sizes)
    return numbers(report)


def time_algorithm_1_in_torch(site: AttentionSite) -> float | None:
    """Times algorithm 1 in eager PyTorch; returns the seconds, extrapolated to all steps."""
    try:
        import torch
    except ImportError:
        return None
    targets = torch.from_numpy(target_maps(site.grid)[np.arange(site.num_heads) % 9])
    positions = torch.from_numpy(np.asarray(site.positions))
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
        if index % RESCALE_EVERY == 0:
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
    for index in range(TORCH_STEPS):
        step(index)
    return (time.perf_counter() - start) * STEPS / TORCH_STEPS


def measure(name: str) -> dict:
    """Returns all figures of one model."""
    fixed = make_site(name)
    learned = with_learned_positions(fixed)
    ours, _ = time_scheme(impulse(), fixed)
    algorithm_1, solved = time_scheme(impulse_2024(), fixed, repeats=0)
    ours_learned, _ = time_scheme(impulse(replace_positions=False), learned)
    closed_form, factored = time_scheme(impulse_2025(), learned)
    return {
        "sin-cos positions": {
            "impulse": ours,
            "algorithm 1": algorithm_1,
            "algorithm 1 in PyTorch, extrapolated": {"cold_s": time_algorithm_1_in_torch(fixed)},
            "impulse at the norm of algorithm 1": impulse_at_norm(fixed, solved),
        },
        "learned positions": {
            "impulse": ours_learned,
            "closed form": closed_form,
            "impulse at the norm of the closed form": impulse_at_norm(learned, factored),
        },
    }


def main() -> None:
    """Prints the figures and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="solve.json", help="JSON file (default: solve.json)")
    parser.add_argument("--models", nargs="+", default=["ViT-T/16", "ViT-B/16"], choices=MODELS)
    arguments = parser.parse_args()
    results = {"device": jax.devices()[0].device_kind}
    for name in arguments.models:
        results[name] = measure(name)
        for positions, rows in results[name].items():
            print(f"\n{name}, {positions}")
            for row, figures in rows.items():
                texts = [
                    f"{key} {value:.3g}" for key, value in figures.items() if value is not None
                ]
                print(f"  {row:42} {', '.join(texts)}", flush=True)
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=2)
    print(f"\nwrote {arguments.out}")


if __name__ == "__main__":
    main()
