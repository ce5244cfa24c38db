"""Shares of tokens that attend most to their head's neighbor, in models from PyTorch libraries.

    python benchmarks/hits.py --out=hits.md

Applies `impulse` to models with the random weights of their libraries, on crops of scikit-learn's
two photographs. Needs torch, timm, torchvision, transformers and scikit-learn.
"""

import argparse
import math
import re

import jax
import numpy as np
import timm
import torch
import torchvision
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images

from structinit_jax.attention_init import impulse
from structinit_jax.interop import initialize, torch_maps

SIZE = 224
CROPS = 4
DEPTH = 12
SIGLIP, CLIP = "Hugging Face's `SiglipVisionConfig()`", "Hugging Face's `CLIPVisionConfig()`"
NOTE = """\
Share of tokens that attend most to the neighbor at their head's offset, by layer, before training.
A head's offset is the one that most of its tokens attend to, which need not be the one that
`impulse` assigned.

Quiet content: the kernel of the patch embedding is 0.3 times as large as PyTorch's default, and the
output kernels of the MLPs are 0. The last four rows have both a position table and rotary
positions.

| model | content | layers 1 to the last |
|---|---|---|"""
ROWS = [  # model, heads, whether content is quiet, whether `rotations` are passed
    ("vit_tiny_patch16_224", 3, True, False),
    ("vit_tiny_patch16_224", 3, False, False),
    ("vit_base_patch16_224", 12, True, False),
    ("vit_base_patch16_224", 12, False, False),
    (SIGLIP, 12, True, False),
    ("torchvision's `vit_b_16`", 12, True, False),
    (CLIP, 12, True, False),
    ("eva02_tiny_patch14_224", 3, False, False),
    ("eva02_tiny_patch14_224", 3, False, True),
    ("vit_pe_core_base_patch16_224", 12, False, False),
    ("vit_pe_core_base_patch16_224", 12, False, True),
]


def make_model(name: str) -> torch.nn.Module:
    """Returns a model with the random weights that its library draws."""
    torch.manual_seed(0)
    if name == SIGLIP:
        return transformers.SiglipVisionModel(transformers.SiglipVisionConfig())
    if name == CLIP:
        return transformers.CLIPVisionModel(transformers.CLIPVisionConfig())
    if name.startswith("torchvision"):
        return torchvision.models.vit_b_16()
    return timm.create_model(name)


def quiet(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scales the patch embedding to 0.3 of PyTorch's default and the MLPs' output kernels to 0.

    PyTorch draws the kernel [D, ...] with a variance of 1 / (3 fan-in): its squares sum to D / 3.
    """
    new = dict(params)
    for name, kernel in params.items():
        if re.search(r"(patch_embed.*|conv_proj)\.weight", name):
            new[name] = kernel * (0.3 * math.sqrt(len(kernel) / 3 / torch.sum(kernel**2)))
        elif re.search(r"mlp\.(fc2|3)\.weight", name):
            new[name] = 0 * kernel
    return new


def photographs() -> torch.Tensor:
    """Returns random square crops [CROPS, 3, SIZE, SIZE] of photographs, normalized as in timm."""
    rng = np.random.default_rng(0)
    sources = load_sample_images().images
    crops = []
    for index in range(CROPS):
        image = sources[index % 2]
        side = int(min(image.shape[:2]) * rng.uniform(0.5, 1))
        y, x = (rng.integers(length - side + 1) for length in image.shape[:2])
        crop = Image.fromarray(image[y : y + side, x : x + side])
        crops.append(np.asarray(crop.resize((SIZE, SIZE), Image.Resampling.BICUBIC)))
    mean = timm.data.IMAGENET_DEFAULT_MEAN
    std = timm.data.IMAGENET_DEFAULT_STD
    images = ((np.stack(crops) / 255 - mean) / std).astype(np.float32)
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def hit_rate(maps: np.ndarray, side: int) -> float:
    """Returns the share of tokens that attend most to the neighbor at their head's offset.

    A head's offset is the most frequent offset between a token and the token that it attends to
    most. `maps` is [images, heads, N, N] for N = side² tokens; tokens without that neighbor do not
    count.
    """
    y, x = np.divmod(np.arange(side * side), side)
    strongest = maps.argmax(axis=-1)
    rates = []
    for head in range(maps.shape[1]):
        offsets = np.stack([y[strongest[:, head]] - y, x[strongest[:, head]] - x], axis=-1)
        offsets, counts = np.unique(offsets.reshape(-1, 2), axis=0, return_counts=True)
        neighbors = np.prod(side - abs(offsets), axis=1)  # tokens with a neighbor there
        # Ties go to the offset that most tokens have: if all tokens attend to the same one, each
        # offset occurs once, and an offset that a single token has would count as a convolution.
        best = np.lexsort((neighbors, counts))[-1]
        rates.append(counts[best] / (len(maps) * neighbors[best]))
    return float(np.mean(rates))


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="hits.md", help="Markdown file (default: hits.md)")
    arguments = parser.parse_args()
    images = photographs()
    lines = [NOTE]
    for name, num_heads, is_quiet, has_rotations in ROWS:
        model = make_model(name)
        params = quiet(model.state_dict()) if is_quiet else model.state_dict()
        given = dict(num_heads=num_heads)
        if has_rotations:
            given["rotations"] = model.eval().rope.get_embed(shape=model.patch_embed.grid_size)
        params = initialize(params, impulse(), jax.random.key(0), **given)
        model.load_state_dict(params)
        rates = []
        for maps in torch_maps(model, images)[:DEPTH]:
            side = math.isqrt(maps.shape[-1])
            tokens = side * side
            rates.append(hit_rate(maps[..., -tokens:, -tokens:], side))
        rates = " ".join(f"{rate:.2f}" for rate in rates)
        content = "quiet" if is_quiet else "as built"
        name += ", `rotations` given" if has_rotations else ""
        lines.append(f"| {name} | {content} | {rates} |")
        print(lines[-1], flush=True)
    with open(arguments.out, "w") as file:
        file.write("\n".join(lines) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
