import io
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from scipy import stats
from sklearn.datasets import load_sample_image

from structinit_jax.data import images
from structinit_jax.data.images import BadImageError, CenterCrop, RandomCrop, StoredImage

REFERENCE = np.load(Path(__file__).parent / "references" / "random_resized_crop.npz")


@pytest.fixture(scope="module")
def large_photo():
    return Image.fromarray(load_sample_image("china.jpg"))  # 427 x 640


@pytest.fixture(scope="module")
def photo():
    return Image.fromarray(load_sample_image("flower.jpg")).resize((96, 64))


SCALES = ((0.5, 1), (1.9, 1), (2.0, 1 / 2), (2.7, 3 / 8), (4.5, 1 / 4), (20.0, 1 / 8))


def encoded(image, image_format, **options):
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def distance(pixels, image):
    """Mean absolute difference from a Pillow image of the same mode."""
    expected = np.asarray(image).reshape(pixels.shape)
    return np.abs(pixels.astype(float) - expected).mean()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "kind", ["RGB JPEG", "L JPEG", "CMYK JPEG", "RGBA PNG", "P PNG", "P GIF", "RGB WEBP"]
)
def test_every_kind_looks_like_the_picture(photo, kind, channels):
    mode, image_format = kind.split()
    content = encoded(photo.convert(mode), image_format)
    pixels = StoredImage(content, channels, "picture").decode()
    assert pixels.shape == (64, 96, channels)
    assert pixels.dtype == np.uint8
    right = Image.open(io.BytesIO(content)).convert("RGB" if channels == 3 else "L")
    assert distance(pixels, right) == 0
    assert distance(pixels, photo.convert(mode).convert("RGB").convert(right.mode)) < 12


def test_sixteen_bits_keep_the_upper_eight():
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = StoredImage(encoded(Image.fromarray(values), "PNG"), 3, "deep").decode()
    np.testing.assert_array_equal(pixels, np.repeat((values // 256)[..., None], 3, axis=2))
    for mode in ("I", "F"):  # their value range is unknown
        content = encoded(Image.fromarray(values).convert(mode), "TIFF")
        with pytest.raises(BadImageError, match=r"^deep.tif: cannot be decoded .*no known range"):
            StoredImage(content, 3, "deep.tif").decode()
    others = [np.zeros(shape, np.uint8) for shape in ((4, 4, 4), (1, 4, 4, 3), (0, 4, 3))]
    for pixels in (values, values.astype(np.float32), *others):
        with pytest.raises(BadImageError, match=r"^pixels: .* uint8 \[h, w, 3\], not \w+ \["):
            StoredImage(pixels, 3, "pixels").decode()


def test_images_with_other_channels_are_resized_by_channel(large_photo, photo):
    pixels = np.dstack([large_photo, np.asarray(large_photo)[..., :2]])
    file = io.BytesIO()
    np.save(file, pixels)
    crops = (RandomCrop(24, seed=0), CenterCrop(24, 0.875))
    for image in (StoredImage(file.getvalue(), 5, "a.npy"), StoredImage(pixels, 5, "pixels")):
        for crop in crops:
            by_channel = [crop(StoredImage(p, 1, "p"), 7) for p in np.moveaxis(pixels, -1, 0)]
            got = crop(image, 7)
            assert got.shape == (24, 24, 5)
            np.testing.assert_array_equal(got, np.concatenate(by_channel, axis=-1))
    gray = StoredImage(np.asarray(photo), 1, "photo").decode()
    assert distance(gray, photo.convert("L")) == 0
    for content, problem in (
        (file.getvalue(), r"uint8 \[h, w, 4\], not uint8 \[427, 640, 5\]"),
        (file.getvalue()[:-1], ""),
        (encoded(photo, "JPEG"), r"it is not a \.npy file, .* channels=4"),
    ):
        with pytest.raises(BadImageError, match=rf"^a\.npy: cannot be decoded \(.*{problem}"):
            CenterCrop(24)(StoredImage(content, 4, "a.npy"))


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation(photo, image_format):
    for orientation in range(1, 9):
        content = encoded(photo, image_format, exif=turned(orientation))
        right = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        image = StoredImage(content, 3, "rotated")
        assert image.size == right.size[::-1]
        assert distance(image.decode(), right) == 0


def test_unknown_formats_are_named_without_an_address():
    with pytest.raises(BadImageError, match=r"^note: cannot be decoded \(unknown format\)$"):
        StoredImage(b"hello", 3, "note").decode()


def test_exif_is_found_after_other_segments_and_in_large_images(photo, monkeypatch):
    content = encoded(photo, "JPEG", exif=turned(6))
    # A padding byte, then a comment segment that contains a scan marker and an Exif identifier.
    comment = b"\xff\xff\xfe\0\x10\xff\xda\xff\xe1Exif\0\0\0\0\0\0"
    image = StoredImage(content[:2] + comment + content[2:], 3, "photo")
    assert image.size == photo.size  # width first
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert StoredImage(content, 3, "large").size == photo.size


def test_exif_that_continues_in_a_second_segment(photo):
    more = b"\xff\xe1\0\x0cExif\0\0more"
    content = encoded(photo, "JPEG", exif=turned(6), extra=more)
    right = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert right.size == photo.size[::-1]
    assert distance(StoredImage(content, 3, "photo").decode(), right) == 0


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])  # of which Pillow decodes the second
def test_an_orientation_that_only_xmp_has_is_not_applied(photo, mode):
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    content = encoded(photo.convert(mode), "JPEG", xmp=xmp)
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size == photo.size[::-1]
    image = StoredImage(content, 3, "photo")
    assert image.size == image.decode().shape[:2] == photo.size[::-1]  # width first


def test_damaged_exif_is_passed_over(photo):
    damaged = encoded(photo, "JPEG", exif=b"Exif\0\0 is none")
    right = Image.open(io.BytesIO(encoded(photo, "JPEG")))
    assert distance(StoredImage(damaged, 3, "photo").decode(), right) == 0


@pytest.mark.parametrize("orientation", [1, 6])
def test_scaled_decode_is_large_enough_and_alike(photo, orientation):
    large = photo.resize((960, 640), Image.Resampling.BICUBIC)
    content = encoded(large, "JPEG", quality=95, exif=turned(orientation))
    image = StoredImage(content, 3, "large")
    for reduction, scale in SCALES:
        pixels, *found = image.decode_scaled(reduction)
        assert found == [scale, orientation]
        assert pixels.shape == (640 * scale, 960 * scale, 3)
        box = large.resize(pixels.shape[1::-1], Image.Resampling.BOX)
        assert distance(pixels, box) < 2


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.9])
def test_truncated_images_are_refused_by_name(photo, image_format, kept):
    content = encoded(photo, image_format)
    image = StoredImage(content[: int(kept * len(content))], 3, "cat.img")
    with pytest.raises(BadImageError, match=r"^cat\.img: cannot be decoded "):
        image.decode()


def test_damage_that_pillow_tolerates_is_ignored(photo):
    content = encoded(photo, "JPEG")[:-300] + b"\xff\xd9"
    right = Image.open(io.BytesIO(content))
    pixels, scale, _ = StoredImage(content, 3, "photo").decode_scaled(8.0)
    assert scale == 1
    assert distance(pixels, right) == 0


@pytest.mark.parametrize("size", ["375x500", "64x64", "300x60"])
def test_boxes_are_distributed_as_timms(size):
    shape = tuple(map(int, size.split("x")))
    crop = RandomCrop(224, seed=0)
    boxes = np.array([crop.draw_box(shape, position) for position in range(1000)])
    # One test each for top, left, height and width.
    assert (stats.ks_2samp(boxes, REFERENCE[size], axis=0).pvalue > 0.01).all()
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= shape).all()
    assert (boxes[:, 2:] >= 1).all()


def test_boxes_have_the_given_share_of_the_area_or_are_central():
    crop = RandomCrop(224, seed=0, scale=(0.25, 0.5))
    boxes = np.array([crop.draw_box((400, 400), position) for position in range(100)])
    areas = boxes[:, 2:].prod(axis=1) / 400**2
    assert 0.24 < areas.min() < 0.3 < 0.45 < areas.max() < 0.51
    # No allowed aspect ratio fits these images.
    assert crop.draw_box((1000, 10), 0) == (493, 0, 13, 10)
    assert crop.draw_box((10, 1000), 0) == (0, 493, 10, 13)


def test_boxes_depend_on_seed_and_position_alone():
    def draw(seed, position):
        return RandomCrop(224, seed).draw_box((375, 500), position)

    # A change here would change the crops of every resumed run.
    assert draw(3, 5) == (42, 61, 305, 320)
    assert len({draw(seed, position) for seed in range(5) for position in range(20)}) == 100
    crop = RandomCrop(224, seed=0)
    names = [crop.draw_interpolation(position) for position in range(200)]
    assert 70 < names.count("bicubic") < 130
    assert set(names) == {"bicubic", "bilinear"}
    areas = [math.prod(crop.draw_box((375, 500), position)[2:]) for position in range(200)]
    assert abs(np.corrcoef(areas, np.equal(names, "bicubic"))[0, 1]) < 0.2


def resized(image, box, size, interpolation):
    """A box of a Pillow image as Pillow resizes it."""
    top, left, height, width = box
    part = image.crop((left, top, left + width, top + height))
    resample = getattr(Image.Resampling, interpolation.upper())
    return np.asarray(part.resize((size, size), resample)).astype(int)


@pytest.mark.parametrize("simd", [True, False])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("box", [(20, 30, 250, 300), (0, 0, 427, 640), (400, 600, 5, 7)])
def test_crop_without_scaled_decode_is_pillows(large_photo, box, interpolation, simd, monkeypatch):
    if not simd:  # as on platforms without a wheel
        monkeypatch.setattr(images, "simd", None)
    image = StoredImage(encoded(large_photo, "PNG"), 3, "photo")
    got = images.crop_and_resize(image, box, 224, interpolation)
    differences = np.abs(got - resized(large_photo, box, 224, interpolation))
    assert np.mean(differences > 1) < 0.001
    assert differences.max() <= (8 if simd else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_crop_with_scaled_decode_is_close_and_not_displaced(large_photo, orientation):
    content = encoded(large_photo, "JPEG", quality=95, exif=turned(orientation))
    photo = large_photo.copy()
    photo.getexif()[0x0112] = orientation
    upright = ImageOps.exif_transpose(photo)
    for box in ((0, 0, *upright.size[::-1]), (101, 203, 300, 223), (7, 1, 211, 411)):
        got = images.crop_and_resize(StoredImage(content, 3, "photo"), box, 64, "bicubic")
        right = resized(upright, box, 64, "bicubic")
        assert np.abs(got - right).mean() < 2
        # A shift by one pixel would show.
        assert np.abs(got - np.roll(right, 1, axis=0)).mean() > (8 if orientation == 1 else 5)


@pytest.mark.parametrize(
    ("size", "image_size", "crop_fraction", "resized", "corner"),
    [  # from timm's create_transform(is_training=False); size and resized are (height, width)
        ((375, 500), 224, 0.9, (248, 330), (12, 53)),
        ((500, 375), 224, 0.875, (341, 256), (58, 16)),
        ((95, 100), 30, 0.95, (31, 32), (0, 1)),
        ((31, 38), 31, 1.0, (31, 38), (0, 4)),
    ],
)
def test_center_crop_is_timms(large_photo, size, image_size, crop_fraction, resized, corner):
    image = large_photo.resize(size[::-1])
    right = image.resize(resized[::-1], Image.Resampling.BICUBIC)
    right = right.crop((corner[1], corner[0], corner[1] + image_size, corner[0] + image_size))
    got = CenterCrop(image_size, crop_fraction)(StoredImage(np.asarray(image), 3, "photo"))
    np.testing.assert_array_equal(got, right)
