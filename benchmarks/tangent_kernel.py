"""Measures how initial values generalize: kernel regression with a model's tangent kernel.

    python benchmarks/tangent_kernel.py --out=tangent_kernel.json \
        --schemes=default,mimetic,impulse --set data.data_dir=DIR

The tangent kernel of two images is the inner product of the gradients of an output with respect to
the parameters (Jacot et al. 2018). Regression with it is what training would find if the features
did not change, and takes a minute or two for each scheme and seed on one CPU core. It is compared
with kernels that know nothing of the model: Gaussians on the pixels, and on patches of the model's
tokens, without overlap and position by position.

Accuracies are for the best of six ridge parameters on the evaluation split, so they are upper
bounds. Kernels use a random subset of the parameters' coordinates, by default 32,768.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from structinit_jax.augment import normalize
from structinit_jax.command_line import set_field
from structinit_jax.compare.train_grid import expand
from structinit_jax.config import load_config, make_attention_init
from structinit_jax.data.loader import decode_all
from structinit_jax.run import Run
from structinit_jax.training.mesh import make_mesh
from structinit_jax.training.state import abstract_model, initialize_model

RIDGES = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)  # relative to the mean diagonal of the kernel
BATCH_SIZE = 25
DEFAULTS = ("data.train_split=train[:1000]", "data.eval_split=train[50000:54000]")


def gradients(config, images: np.ndarray, num_coordinates: int) -> np.ndarray:
    """Returns the gradient of a fixed combination of logits for each image, [n, coordinates]."""
    mesh = make_mesh(devices=jax.local_devices()[:1])
    model = abstract_model(config.model, config.data, mesh)
    scheme = make_attention_init(config)
    params, model_state, _ = initialize_model(model, scheme, config.seed)
    leaves = jax.tree.leaves(params)
    rng = np.random.default_rng(0)
    size = sum(leaf.size for leaf in leaves)
    chosen = np.sort(rng.choice(size, min(size, num_coordinates), replace=False))
    mix = rng.standard_normal(config.model.num_classes).astype(np.float32)

    def output(params, image):
        logits, _ = nnx.merge(model.graphdef, params, model_state)(image[None])
        return logits[0] @ mix

    def gradient(params, image):
        leaves = jax.tree.leaves(jax.grad(output)(params, image))
        return jnp.concatenate([leaf.ravel() for leaf in leaves])[chosen]

    batch = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))
    starts = range(0, len(images), BATCH_SIZE)
    return np.concatenate([batch(params, images[i : i + BATCH_SIZE]) for i in starts])


def as_adam(gradients: np.ndarray, num_train: int) -> np.ndarray:
    """Scales coordinates as Adam's first steps do, by their root mean square to the power -1/2."""
    return gradients * (np.mean(gradients[:num_train] ** 2, axis=0) + 1e-16) ** -0.25


def patch_features(images: np.ndarray, patch_size: int, num_features: int = 400) -> np.ndarray:
    """Returns random features of a Gaussian kernel on contrast-normalized patches, by position."""
    n, height, width, channels = images.shape
    shape = (n, height // patch_size, patch_size, width // patch_size, patch_size, channels)
    patches = images.reshape(shape).transpose(0, 1, 3, 2, 4, 5)
    patches = patches.reshape(n, -1, patch_size * patch_size * channels)
    size = np.sqrt(np.mean(patches**2, axis=-1, keepdims=True)) + 0.02
    rng, dim = np.random.default_rng(0), patches.shape[-1]
    frequencies = rng.standard_normal((dim, num_features)).astype(np.float32) / (0.7 * dim**0.5)
    phases = rng.uniform(0, 2 * np.pi, num_features).astype(np.float32)
    return (np.cos(patches / size @ frequencies + phases) * size).reshape(n, -1)


def gaussian_kernel(images: np.ndarray, num_train: int, width: float = 0.5) -> np.ndarray:
    """Returns exp(-|x - y|² / (width · median)) between all images and those of training."""
    x = images.reshape(len(images), -1)
    square = np.sum(x**2, axis=1)
    distance = square[:, None] + square[:num_train] - 2 * x @ x[:num_train].T
    return np.exp(-distance / (width * np.median(distance)))


def linear_kernel(features: np.ndarray, num_train: int) -> np.ndarray:
    """Returns the products of centered features between all images and those of training."""
    features = features - features[:num_train].mean(axis=0)
    kernel = features @ features[:num_train].T
    return kernel / np.trace(kernel[:num_train]) * num_train


def accuracy(kernel: np.ndarray, labels: np.ndarray) -> float:
    """Returns the accuracy in percent of ridge regression with the best of `RIDGES`."""
    num_train = kernel.shape[1]
    targets = np.eye(labels.max() + 1)[labels[:num_train]]
    values, vectors = np.linalg.eigh(kernel[:num_train].astype(np.float64))
    projected = vectors.T @ (targets - targets.mean(axis=0))
    scores = [kernel[num_train:] @ (vectors @ (projected / (values + r)[:, None])) for r in RIDGES]
    return max(100 * float(np.mean(s.argmax(axis=1) == labels[num_train:])) for s in scores)


def main() -> None:
    """Prints the accuracies and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/vit_fashion_mnist.py")
    parser.add_argument("--schemes", default="default,mimetic,impulse")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--coordinates", type=int, default=2**15)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="config fields")
    parser.add_argument("--out", default="tangent_kernel.json")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    for assignment in (*DEFAULTS, *arguments.set):
        field, _, value = assignment.partition("=")
        set_field(config, field, value)

    data, dataset = config.data, Run(config).dataset
    images, labels = zip(
        *(
            decode_all(dataset.split(split, "data", "stop"), data.image_size, data.crop_fraction)
            for split in (data.train_split, data.eval_split)
        ),
        strict=True,
    )
    num_train, labels = len(labels[0]), np.concatenate(labels)
    images = np.concatenate(images)
    images = np.asarray(normalize(images, tuple(data.mean), tuple(data.std)))

    results = {}

    def record(name, kernel):
        results.setdefault(name, []).append(accuracy(kernel, labels))
        print(f"{name}: {results[name][-1]:.1f}", flush=True)

    record("Gaussian on pixels", gaussian_kernel(images, num_train))
    patches = patch_features(images, config.model.patch_size)
    record("Gaussian on patches", linear_kernel(patches, num_train))
    for seed in range(arguments.seeds):
        for scheme, setting in expand(config, arguments.schemes.split(","), {}).items():
            setting.seed = seed
            g = gradients(setting, images, arguments.coordinates)
            record(f"{scheme}, tangent kernel", linear_kernel(g, num_train))
            record(f"{scheme}, scaled as by Adam", linear_kernel(as_adam(g, num_train), num_train))
    with open(arguments.out, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
