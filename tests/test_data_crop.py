import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from structinit_jax.data import resize
from structinit_jax.data.crop import Box, CropOptions, crop_and_resize, draw_box
from structinit_jax.data.decode import EncodedImage
from structinit_jax.data.examples import LazyExamples, load_examples
from structinit_jax.data.info import DatasetInfo
from structinit_jax.data.source import ImageSource
from structinit_jax.data.stream import stream_indices, train_batches
from structinit_jax.errors import InputError

REFERENCE = np.load(Path(__file__).parent / "references" / "random_resized_crop.npz")
INFO = DatasetInfo(10, (None, None, 3), {"train": 7})


@pytest.fixture(scope="module")
def photo():
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("china.jpg"))  # 427 x 640


def encoded(image, image_format, **options):
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


class Records(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.fixture(scope="module")
def source(photo):
    turned = [photo.rotate(15 * i) for i in range(7)]
    return ImageSource(
        Records(
            {"image": encoded(image, "JPEG"), "label": i, "file_name": f"{i}.jpg"}
            for i, image in enumerate(turned)
        ),
        3,
        "photos",
    )


@pytest.mark.parametrize("size", ["375x500", "64x64", "300x60"])
def test_boxes_are_distributed_as_timms(size):
    shape = tuple(map(int, size.split("x")))
    options = CropOptions(seed=0)
    boxes = np.array([draw_box(shape, options, position) for position in range(1000)])
    for name, ours, theirs in zip(Box._fields, boxes.T, REFERENCE[size].T, strict=True):
        assert stats.ks_2samp(ours, theirs).pvalue > 0.01, name
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= shape).all()
    assert (boxes[:, 2:] >= 1).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (2, 3)])
def test_tiny_images_have_boxes(size):
    for position in range(50):
        box = draw_box(size, CropOptions(seed=3), position)
        assert box.height >= 1
        assert box.width >= 1
        assert box.top + box.height <= size[0]
        assert box.left + box.width <= size[1]


def test_boxes_depend_on_seed_and_position_alone():
    def draw(seed, position):
        return draw_box((375, 500), CropOptions(seed=seed), position)

    # A change here would change the crops of every resumed run.
    assert draw(3, 5) == (42, 61, 305, 320)
    assert draw(3, 5) == draw(3, 5)
    assert len({draw(seed, position) for seed in range(5) for position in range(20)}) == 100


@pytest.mark.parametrize("simd", [True, False])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("box", [Box(20, 30, 250, 300), Box(0, 0, 427, 640), Box(400, 600, 5, 7)])
def test_crop_without_scaled_decode_is_pillows(photo, box, interpolation, simd, monkeypatch):
    if not simd:  # as where there is no wheel
        monkeypatch.setattr(resize, "simd", None)
    image = EncodedImage(encoded(photo, "PNG"), 3, "photo")
    got = crop_and_resize(image, box, 224, interpolation).astype(int)
    part = photo.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    resample = getattr(Image.Resampling, interpolation.upper())
    differences = np.abs(got - np.asarray(part.resize((224, 224), resample)))
    assert np.mean(differences > 1) < 0.001
    assert differences.max() <= (8 if simd else 0)


@pytest.mark.parametrize("box", [Box(0, 0, 427, 640), Box(101, 203, 300, 233), Box(7, 1, 211, 411)])
def test_crop_with_scaled_decode_is_close(photo, box):
    image = EncodedImage(encoded(photo, "JPEG", quality=95), 3, "photo")
    got = crop_and_resize(image, box, 64, "bicubic")
    part = photo.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    right = np.asarray(part.resize((64, 64), Image.Resampling.BICUBIC)).astype(float)
    assert np.abs(got - right).mean() < 2
    # A shift by one pixel would show.
    assert np.abs(got - np.roll(right, 1, axis=0)).mean() > 8


def test_grey_crop(photo):
    image = EncodedImage(encoded(photo, "JPEG"), 1, "photo")
    assert crop_and_resize(image, Box(0, 0, 50, 60), 8, "bilinear").shape == (8, 8, 1)


def test_training_batches_of_crops(source):
    options = CropOptions(seed=1)
    examples = load_examples(source, INFO, 16, random_resized_crop=options)
    assert isinstance(examples, LazyExamples)
    args = {"batch_size": 4, "seed": 1, "num_steps": 5}
    whole = list(train_batches(examples, start_step=0, **args))
    order = stream_indices(1, 0, 20, 7)
    for position in (0, 6, 19):
        image, label = source.open(int(order[position]))
        batch, offset = whole[position // 4], position % 4
        right = crop_and_resize(image, draw_box(image.size, options, position), 16, "bicubic")
        np.testing.assert_array_equal(batch["image"][offset], right)
        assert batch["label"][offset] == label
    for step, batch in enumerate(train_batches(examples, start_step=3, **args), start=3):
        np.testing.assert_array_equal(batch["image"], whole[step]["image"])
    for process in (0, 1):
        mine = train_batches(examples, start_step=0, process_index=process, process_count=2, **args)
        for batch, all_of_it in zip(mine, whole, strict=True):
            half = all_of_it["image"][2 * process : 2 * process + 2]
            np.testing.assert_array_equal(batch["image"], half)
    # The same example looks different in another epoch.
    first = {int(order[p]): p for p in range(7)}
    again = {int(order[p]): p for p in range(7, 14)}
    for index in range(7):
        one, other = (whole[p // 4]["image"][p % 4] for p in (first[index], again[index]))
        assert (one != other).any()


@pytest.mark.parametrize(
    "options",
    [
        dict(scale=(0.0, 1.0)),
        dict(scale=(0.5, 1.1)),
        dict(ratio=(2.0, 1.0)),
        dict(interpolation="box"),
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(InputError, match=f"crop {next(iter(options))}="):
        CropOptions(seed=0, **options)
