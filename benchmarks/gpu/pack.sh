#!/bin/bash
# Packs wheels for Python 3.12 on x86-64 and the images into .gpu/: benchmarks/gpu/pack.sh CIFAR10.tar.gz
# PYTHON must be Python 3.12.
set -eu
images=$(realpath "$1")
cd "$(dirname "$0")/../.."
# What the trainer needs besides JAX, Flax, Optax, Orbax, PyTorch and matplotlib.
packages=(
  array_record beartype clu cykooz-resizer dm-tree docstring-parser etils googleapis-common-protos
  immutabledict importlib_resources jaxtyping ml-collections portpicker promise
  simple-parsing simplejpeg tensorboardX tensorflow-datasets tensorflow-metadata termcolor toml
)
rm -rf .gpu
mkdir -p .gpu
"${PYTHON:-python3.12}" -m pip wheel --quiet --no-deps --wheel-dir=.gpu/wheels "${packages[@]}"
cp "$images" .gpu/cifar10.tar.gz
du -sh .gpu
