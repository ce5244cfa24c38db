"""Training images per second and core, compared with PyTorch's loader and timm's transforms.

    python benchmarks/input.py --out=input.json

JPEGs of 500×375 (typical of ImageNet) and 1600×1200 pixels become 224² random resized crops,
uint8, bilinear or bicubic at random. Ours is the trainer's pipeline up to the copy to devices:
decode, crop, resize and batch in threads. The peer is a DataLoader without workers, with timm's
transforms up to the same point: decoding and RandomResizedCropAndInterpolation in Pillow, and
conversion to the array that timm's fast collate takes.

Each loader runs on one core. Times are processor times, medians of interleaved rounds, to limit the
influence of other processes; `ratio` is the median of ours over PyTorch's in the same round.
PyTorch and timm are measured if the interpreter given by --torch_python (by default the running
one) has them.
"""

import argparse
import io
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

IMPORT_TORCHVISION = Path(__file__).parents[1] / "tests" / "references" / "import_torchvision.py"
SIZES = ("500x375", "1600x1200")
IMAGE_SIZE = 224
BATCH_SIZE = 64
FILES = 32
BATCHES = 30  # timed
ROUNDS = 5  # the median is reported
# Batches after the timed ones, so that a loader that reads ahead does so until timing ends.
READ_AHEAD = 8


def write_images(folder: Path, width: int, height: int) -> None:
    """Writes random crops of scikit-learn's two photographs, enlarged if necessary."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    (folder / "train" / "photo").mkdir(parents=True)
    photos = [Image.fromarray(image) for image in load_sample_images().images]  # 640x427
    for number in range(FILES):
        photo = photos[number % 2]
        scale = max(1.0, 1.2 * width / photo.width)
        left, top = rng.uniform(0, (photo.width - width / scale, photo.height - height / scale))
        box = (left, top, left + width / scale, top + height / scale)
        image = photo.resize((width, height), Image.Resampling.BICUBIC, box=box)
        image.save(folder / "train" / "photo" / f"{number}.jpg", quality=92)


def our_batches(folder: Path, num_batches: int) -> Iterator[np.ndarray]:
    """Yields batches of the trainer's pipeline, before they are copied to devices."""
    from structinit_jax.data.datasets import open_dataset
    from structinit_jax.data.images import RandomCrop
    from structinit_jax.data.loader import HostLoader, stream_indices
    from structinit_jax.training.sharding import make_mesh

    def order(start, stop):
        return stream_indices(0, np.arange(start, stop), FILES)

    source = open_dataset("folder", folder).split("train")
    loader = HostLoader(source, make_mesh(), RandomCrop(IMAGE_SIZE, seed=0))
    batches = loader.read_batches(order, range(num_batches), BATCH_SIZE, 0, process_count=1)
    return (batch["image"] for batch in batches)


def torch_batches(folder: Path, num_batches: int) -> Iterator[np.ndarray]:
    """Yields batches of PyTorch's DataLoader with timm's transforms."""
    torch = import_torch()
    from timm.data.transforms import RandomResizedCropAndInterpolation

    files = sorted((folder / "train" / "photo").iterdir())
    crop = RandomResizedCropAndInterpolation(IMAGE_SIZE, interpolation="random")

    class Crops(torch.utils.data.Dataset):
        def __len__(self):
            return num_batches * BATCH_SIZE

        def __getitem__(self, index):
            with Image.open(io.BytesIO(files[index % FILES].read_bytes())) as image:
                return np.array(crop(image.convert("RGB")))

    def collate(images):
        return torch.from_numpy(np.stack(images))

    return iter(torch.utils.data.DataLoader(Crops(), BATCH_SIZE, shuffle=True, collate_fn=collate))


def import_torch():
    """Imports torchvision, and PyTorch with one thread."""
    runpy.run_path(str(IMPORT_TORCHVISION))
    import torch

    torch.set_num_threads(1)
    return torch


LOADERS = {"ours": our_batches, "torch": torch_batches}


def measure(loader, folder: Path) -> float:
    """Measures images per second of processor time, after two warm-up batches."""
    batches = loader(folder, BATCHES + 2 + READ_AHEAD)
    next(batches), next(batches)
    start = time.process_time()
    count = sum(len(batch) for batch in itertools.islice(batches, BATCHES))
    return count / (time.process_time() - start)


def measure_apart(size: str, loader: str, folder: str, flags) -> float | None:
    """Measures in a separate process; prints the reason and returns None if that fails."""
    python = flags.torch_python if loader == "torch" else sys.executable
    command = [python, __file__, f"--measure={loader}", f"--folder={folder}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return float(result.stdout.split()[-1])
    print(f"{size:<9}  {loader:<20}  {(result.stderr.strip().splitlines() or ['no output'])[-1]}")
    return None


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument(
        "--torch_python", default=sys.executable, help="Python that has torch and timm"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        if hasattr(os, "sched_setaffinity"):  # not on macOS
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(measure(LOADERS[flags.measure], flags.folder))
        return

    results = {}
    for size in SIZES:
        rounds = []
        with tempfile.TemporaryDirectory() as folder:
            write_images(Path(folder), *map(int, size.split("x")))
            for _ in range(ROUNDS):
                rounds.append({name: measure_apart(size, name, folder, flags) for name in LOADERS})
        if all(speeds["torch"] for speeds in rounds):
            for speeds in rounds:
                speeds["ratio"] = speeds["ours"] / speeds["torch"]
        results[size] = {}
        for name in rounds[0]:
            if measured := [speeds[name] for speeds in rounds if speeds[name]]:
                speed = results[size][name] = statistics.median(measured)
                print(f"{size:<9}  {name:<20}  {speed:8.2f}{' images/s' * (name != 'ratio')}")
    if flags.out:
        results = dict(images_per_second_per_core=results, batches=BATCHES, rounds=ROUNDS)
        Path(flags.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
