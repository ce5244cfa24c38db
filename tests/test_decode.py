import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from structinit_jax.data.decode import BadImageError, EncodedImage, decode_image


@pytest.fixture(scope="module")
def photo():
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("flower.jpg")).resize((96, 64))


def encoded(image, image_format, **options):
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def distance(pixels, image):
    """Mean absolute difference to a Pillow image of the same mode."""
    expected = np.asarray(image).reshape(pixels.shape)
    return np.abs(pixels.astype(float) - expected).mean()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("mode", "image_format"),
    [
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("L", "PNG"),
        ("P", "PNG"),
        ("1", "PNG"),
        ("P", "GIF"),
        ("RGB", "WEBP"),
        ("CMYK", "TIFF"),
        ("RGB", "BMP"),
    ],
)
def test_every_kind_looks_like_the_picture(photo, mode, image_format, channels):
    content = encoded(photo.convert(mode), image_format)
    pixels = decode_image(content, channels, "picture")
    assert pixels.shape == (64, 96, channels)
    assert pixels.dtype == np.uint8
    right = Image.open(io.BytesIO(content)).convert("RGB" if channels == 3 else "L")
    assert distance(pixels, right) == 0
    if mode != "1":
        assert distance(pixels, photo.convert(mode).convert("RGB").convert(right.mode)) < 12


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_sixteen_bits_keep_the_upper_eight(image_format):
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = decode_image(encoded(Image.fromarray(values), image_format), 3, "deep")
    np.testing.assert_array_equal(pixels, np.repeat((values // 256)[..., None], 3, axis=2))


def test_transparent_palette(photo):
    content = encoded(photo.convert("P"), "PNG", transparency=bytes(range(256)))
    right = Image.open(io.BytesIO(content)).convert("RGBA").convert("RGB")
    assert distance(decode_image(content, 3, "palette"), right) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation(photo, orientation, image_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(photo, image_format, exif=exif)
    right = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    image = EncodedImage(content, 3, "turned")
    assert image.size == right.size[::-1]
    assert distance(image.decode(), right) == 0


@pytest.mark.parametrize("orientation", [1, 6])
def test_scaled_decode_is_large_enough_and_alike(photo, orientation):
    large = photo.resize((960, 640), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(large, "JPEG", quality=95, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    image = EncodedImage(content, 3, "large")
    width, height = upright.size
    for part in (0.9, 0.5, 0.3, 0.2, 0.05):
        wanted = (int(part * height), int(part * width))
        pixels = image.decode(at_least=wanted)
        assert pixels.shape[0] >= wanted[0]
        assert pixels.shape[1] >= wanted[1]
        assert (pixels.shape[0] < height) == (part <= 0.5)
        box = upright.resize(pixels.shape[1::-1], Image.Resampling.BOX)
        assert distance(pixels, box) < 2


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.9])
def test_truncated_images_are_refused_by_name(photo, image_format, kept):
    content = encoded(photo, image_format)
    with pytest.raises(BadImageError, match=r"^cat\.img: cannot be decoded .*on_bad_image='skip'"):
        decode_image(content[: int(kept * len(content))], 3, "cat.img")


def test_images_of_unknown_range_are_refused(photo):
    for mode, word in (("I", "32-bit"), ("F", "floating-point")):
        content = encoded(photo.convert("L").convert(mode), "TIFF")
        with pytest.raises(BadImageError, match=f"^deep.tif: its pixels are {word}"):
            decode_image(content, 3, "deep.tif")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about odd metadata
def test_damage_never_ends_in_another_error(photo):
    rng = np.random.default_rng(0)
    for image_format in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"):
        content = np.frombuffer(encoded(photo, image_format), np.uint8)
        for _ in range(40):
            damaged = content.copy()
            damaged[rng.integers(0, len(content), 8)] = rng.integers(0, 256, 8)
            try:
                pixels = decode_image(damaged.tobytes(), 3, "damaged")
            except BadImageError:
                continue
            assert pixels.dtype == np.uint8
            assert pixels.shape[2] == 3
