"""Images per second from JPEG files to training crops, on one core, beside PyTorch's loader.

    python benchmarks/input.py --out=input.json

JPEGs of 500×375 pixels, as most of ImageNet's, and of 1600×1200 become 224² random resized crops
(bicubic), uint8. Ours is the pipeline of the trainer: decode, crop, resize, batch, read by Grain's
threads. The peer is a DataLoader without workers and timm's transforms up to the same point: decode
and RandomResizedCropAndInterpolation in Pillow, and NumPy's array as timm's fast collate takes it.
Time is processor time, over all threads, so that other work on the machine counts little.
PyTorch and timm are measured where they are
installed, by the interpreter --torch_python (by itself the one that runs this).
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = ("500x375", "1600x1200")
IMAGE_SIZE, BATCH_SIZE = 224, 64
FILES = 32


def write_images(folder: Path, width: int, height: int) -> None:
    """Writes different cuts of scikit-learn's two photographs, enlarged if too small."""
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
    """The trainer's own pipeline."""
    from structinit_jax.data.crop import CropOptions
    from structinit_jax.data.datasets import open_dataset
    from structinit_jax.data.examples import load_examples
    from structinit_jax.data.loader import train_batches

    dataset = open_dataset("folder", folder)
    examples = load_examples(
        dataset.split("train"), dataset.facts, IMAGE_SIZE, random_resized_crop=CropOptions(seed=0)
    )
    batches = train_batches(
        examples, batch_size=BATCH_SIZE, seed=0, start_step=0, num_steps=num_batches
    )
    return (batch["image"] for batch in batches)


def torch_batches(folder: Path, num_batches: int) -> Iterator[np.ndarray]:
    """PyTorch's DataLoader with timm's transforms."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):  # a torchvision without its operators
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor a, Tensor b, float c) -> Tensor")
        library.define("qnms(Tensor a, Tensor b, float c) -> Tensor")
    from timm.data.transforms import RandomResizedCropAndInterpolation

    torch.set_num_threads(1)
    files = sorted((folder / "train" / "photo").iterdir())
    crop = RandomResizedCropAndInterpolation(IMAGE_SIZE, interpolation="bicubic")

    class Crops(torch.utils.data.Dataset):
        def __len__(self):
            return num_batches * BATCH_SIZE

        def __getitem__(self, index):
            with Image.open(io.BytesIO(files[index % FILES].read_bytes())) as image:
                return np.array(crop(image.convert("RGB")))

    def collate(images):
        return torch.from_numpy(np.stack(images))

    return iter(torch.utils.data.DataLoader(Crops(), BATCH_SIZE, shuffle=True, collate_fn=collate))


LOADERS = {"ours": our_batches, "torch": torch_batches}


def measure(loader: str, folder: Path, num_batches: int) -> float:
    """Images per second of processor time, after two batches to warm up."""
    batches = LOADERS[loader](folder, num_batches + 2)
    next(batches), next(batches)
    start = time.process_time()
    count = sum(len(batch) for batch in batches)
    return count / (time.process_time() - start)


def main() -> None:
    """Runs each loader in a process of its own, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--batches", type=int, default=30, help=f"of {BATCH_SIZE} images, timed")
    parser.add_argument("--torch_python", default=sys.executable)
    parser.add_argument("--measure", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print(measure(flags.measure, flags.folder, flags.batches))
        return

    results = {}
    for size in SIZES:
        speeds = results[size] = {}
        with tempfile.TemporaryDirectory() as folder:
            write_images(Path(folder), *map(int, size.split("x")))
            for loader in LOADERS:
                python = sys.executable if loader == "ours" else flags.torch_python
                command = [python, __file__, f"--measure={loader}", f"--folder={folder}"]
                result = subprocess.run(
                    [*command, f"--batches={flags.batches}"], capture_output=True, text=True
                )
                measured = result.returncode == 0
                speeds[loader] = float(result.stdout.split()[-1]) if measured else None
                reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
                said = f"{speeds[loader]:.0f} images/s" if measured else f"not measured: {reason}"
                print(f"{size:<9}  {loader:<5}  {said}", flush=True)
        if all(speeds.values()):
            speeds["ratio"] = speeds["ours"] / speeds["torch"]
            print(f"{size:<9}  ratio  {speeds['ratio']:.2f}", flush=True)
    if flags.out:
        results = dict(images_per_second_per_core=results, batches=flags.batches)
        Path(flags.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
