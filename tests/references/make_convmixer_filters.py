"""Records moments of the 2024 program's ConvMixer filters.

    cd tests && python -m references.make_convmixer_filters CONVMIXER_PY    # writes the .json

CONVMIXER_PY is pytorch-image-models/timm/models/convmixer.py of
https://github.com/osiriszjq/structured_init at commit 9c2d0e0.
"""

import ast
import pathlib
import sys

import numpy as np
import torch

import references

CHANNELS = 20_000
CASES = (("impulse", 3), ("box1", 3), ("box4", 3), ("box9", 3), ("box7", 8), ("random", 5))


def load(path):
    """Returns the program's function that draws filters, without importing the program."""
    tree = ast.parse(pathlib.Path(path).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "SpatialConv2d_init"]
    names = {"torch": torch, "np": np}
    exec(compile(tree, path, "exec"), names)
    return names["SpatialConv2d_init"]


def moments(filters):
    """Means over the filters [C, f²]: of the weights and their squares, by position, and of
    the fourth power of a filter's norm."""
    squares = filters.square()
    return dict(
        weight=[float(f"{x:.5g}") for x in filters.mean(0)],
        square=[float(f"{x:.5g}") for x in squares.mean(0)],
        norm4=float(f"{squares.sum(1).square().mean():.5g}"),
    )


def main():
    draw = load(sys.argv[1])
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - the program draws from it
    figures = {}
    for init, size in CASES:
        filters = torch.as_tensor(draw(CHANNELS, size, init=init)).float().reshape(CHANNELS, -1)
        figures[f"{init} {size}"] = moments(filters)
    references.write_json("convmixer_filters", figures)


if __name__ == "__main__":
    main()
