"""Prints the seconds of `impulse`, the first and the fifth time: solve.py ViT-T/16 ViT-B/16."""

import sys
import time

import jax

import structinit_jax as si

WIDTHS = {"ViT-T/16": (192, 3), "ViT-S/16": (384, 6), "ViT-B/16": (768, 12)}
GRID = (14, 14)

for name in sys.argv[1:]:
    width, num_heads = WIDTHS[name]
    site = si.AttentionSite(
        grid=GRID,
        width=width,
        num_heads=num_heads,
        head_dim=64,
        num_layers=12,
        qk_scale=64**-0.5,
        positions=si.sincos_positions(GRID, width),
    )
    seconds = []
    for seed in range(5):
        begin = time.perf_counter()
        weights = jax.block_until_ready(si.impulse()(jax.random.key(seed), site))
        seconds.append(time.perf_counter() - begin)
    mass = float(weights.report.target_mass)
    print(f"{name}: first {seconds[0]:.2f} s, then {seconds[-1]:.3f} s, target mass {mass:.3f}")
