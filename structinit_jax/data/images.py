"""Decodes, crops and resizes stored images.

Evaluation uses the center of an image (`CenterCrop`); training can use random boxes (`RandomCrop`).

JPEGs are decoded by libjpeg-turbo (simplejpeg), which returns the same pixels as Pillow in half the
time and can decode at a fraction of the size. Pillow decodes all other formats and CMYK JPEGs.
Images with another number of channels than 1 and 3 are pixels, in memory or in a .npy file.
"""

import dataclasses
import functools
import hashlib
import io
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, UnidentifiedImageError

from structinit_jax import rngs
from structinit_jax.errors import InputError, require

try:
    import cykooz_resizer as simd  # six times as fast as Pillow
except ImportError:  # there is no wheel for this platform, for example ARM Linux
    simd = None

PIL_MODES = {1: "L", 3: "RGB"}  # by the number of channels
NPY = b"\x93NUMPY"  # how a .npy file begins
JPEG_MODES = {"Gray": "GRAY", "YCbCr": "RGB", "RGB": "RGB"}  # by color space; Pillow decodes CMYK
START_OF_SCAN = 0xDA  # marker of a JPEG
UPRIGHT = 1  # EXIF orientation
# EXIF orientations of images that are made upright by swapping axes, then reversing rows, columns.
TRANSPOSED = (5, 6, 7, 8)
ROWS_REVERSED = (3, 4, 7, 8)
COLUMNS_REVERSED = (2, 3, 6, 7)

RATIO = (3 / 4, 4 / 3)  # smallest and largest width / height of random boxes, as in timm
ATTEMPTS = 10  # as in torchvision


class BadImageError(InputError):
    """An image is missing or cannot be decoded; the message names the image and the reason."""


# -- decoding --------------------------------------------------------------------------------------


class JpegHeader(NamedTuple):
    """What is known about a JPEG before it is decoded."""

    height: int  # as stored, before applying the orientation
    width: int
    mode: str  # of the pixels that simplejpeg returns
    orientation: int


class StoredImage:
    """An image that is read and decoded on demand, to a number of channels.

    `stored` is a file path, the content of a file (bytes or an array [n]), or pixels: uint8 [h, w]
    or [h, w, C]. Error messages call the image `name`.

    - A .npy file (`numpy.save`) holds pixels. Pixels of 1 or 3 channels are converted from gray to
      color or back; with any other number, they must have the channels asked for.
    - Gray, palette, CMYK and YCCK images are converted to RGB, or to gray for one channel, as
      Pillow converts them.
    - 16-bit PNG and TIFF images keep their upper 8 bits. 16-bit PGM images, which Pillow reads as
      32-bit values, and floating-point images are rejected because their range is unknown.
    - Transparency is dropped, as in timm and torchvision.
    - The EXIF orientation is applied. (timm and torchvision ignore it.)
    - Only the first picture of an animation or a multi-page file is read.
    - Truncated files are rejected. JPEG damage that Pillow tolerates is ignored.

    Anything that needs the file or its pixels raises `BadImageError` if the image is missing,
    truncated, damaged or not supported.
    """

    def __init__(self, stored: Any, channels: int, name: str):
        if isinstance(stored, bytearray | memoryview) or getattr(stored, "ndim", 0) == 1:
            stored = bytes(stored)
        needs = "the path or content of an image file, or pixels, uint8 [h, w] or [h, w, C]"
        fits = isinstance(stored, str | os.PathLike | bytes | np.ndarray)
        require(name, stored, needs, fits)
        self.name = name
        self._stored = stored
        self._channels = channels

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, after applying the orientation.

        Images in formats other than JPEG have to be decoded first.
        """
        if self._jpeg is None:
            return self._pixels.shape[:2]
        height = self._jpeg.height
        width = self._jpeg.width
        return (width, height) if self._jpeg.orientation in TRANSPOSED else (height, width)

    def decode(self) -> np.ndarray:
        """Returns the pixels, uint8 [h, w, C]."""
        pixels, _, orientation = self.decode_scaled(1.0)
        return _turn(pixels, orientation)

    def decode_scaled(self, reduction: float) -> tuple[np.ndarray, float, int]:
        """Returns pixels, uint8 [h, w, C], their scale, and the orientation to apply to them.

        A JPEG is decoded at the smallest of the scales 1/8, 1/4, 3/8, 1/2 that is at least
        `1 / reduction`. If there is none, or if Pillow decodes the image, the scale is 1. The last
        row and column of scaled pixels can be incomplete.
        """
        if self._jpeg is None:
            return self._pixels, 1.0, UPRIGHT
        height, width, mode, orientation = self._jpeg
        eighths = next((n for n in (1, 2, 3, 4) if n * reduction >= 8), 8)
        try:
            pixels = simplejpeg.decode_jpeg(
                self._data,
                mode,
                min_height=math.ceil(height * eighths / 8),
                min_width=math.ceil(width * eighths / 8),
            )
        except ValueError:
            # simplejpeg stops at the first warning. Pillow continues, but rejects truncated files.
            return self._pixels, 1.0, UPRIGHT
        return _convert(pixels, self._channels), eighths / 8, orientation

    def num_bytes(self) -> int:
        """Returns the stored size in bytes, without opening a file."""
        if isinstance(self._stored, str | os.PathLike):
            try:
                return os.stat(self._stored).st_size
            except OSError as error:
                raise BadImageError(f"{self.name}: {error.strerror}") from error
        return self._stored.nbytes if isinstance(self._stored, np.ndarray) else len(self._stored)

    def checksum(self) -> bytes:
        """Returns the SHA-256 of the encoded file, or of the pixels and their shape."""
        if isinstance(self._data, bytes):
            return hashlib.sha256(self._data).digest()
        return hashlib.sha256(f"{self._data.shape}".encode() + self._data.tobytes()).digest()

    @functools.cached_property
    def _data(self) -> bytes | np.ndarray:
        """The content of the file, or the pixels."""
        if not isinstance(self._stored, str | os.PathLike):
            return self._stored
        try:
            return Path(self._stored).read_bytes()
        except OSError as error:
            raise BadImageError(f"{self.name}: {error.strerror}") from error

    @functools.cached_property
    def _jpeg(self) -> JpegHeader | None:
        """The header of a JPEG that simplejpeg can decode."""
        if not isinstance(self._data, bytes) or self._channels not in PIL_MODES:
            return None
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(self._data)
        except ValueError:  # another format, or damage that Pillow describes
            return None
        if space not in JPEG_MODES:
            return None
        orientation = _orientation(functools.partial(_read_exif, self._data))
        return JpegHeader(height, width, JPEG_MODES[space], orientation)

    @functools.cached_property
    def _pixels(self) -> np.ndarray:
        """The upright pixels of anything but a JPEG, uint8 [h, w, C]."""
        data = self._data
        try:
            if isinstance(data, bytes) and data.startswith(NPY):
                data = np.load(io.BytesIO(data), allow_pickle=False)
            if isinstance(data, np.ndarray):
                return _convert(data, self._channels)
            return _decode_with_pillow(data, self._channels)
        except Exception as error:  # each format's decoder raises its own errors
            # The text of UnidentifiedImageError contains a memory address.
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
            raise BadImageError(f"{self.name}: cannot be decoded ({reason})") from error


def can_convert(found: int, channels: int) -> bool:
    """Whether images can be converted from one number of channels to another."""
    return found == channels or {found, channels} <= PIL_MODES.keys()


def _convert(pixels, channels):
    """Converts pixels [h, w] or [h, w, C] to a number of channels."""
    image = pixels[..., None] if pixels.ndim == 2 else pixels
    fits = image.ndim == 3 and can_convert(image.shape[-1], channels)
    if pixels.dtype != np.uint8 or not pixels.size or not fits:
        given = f"{pixels.dtype} {list(pixels.shape)}"
        raise ValueError(f"pixels must be uint8 [h, w, {channels}], not {given}")
    return image if image.shape[-1] == channels else _from_pillow(_to_pillow(image), channels)


def _decode_with_pillow(data, channels):
    if channels not in PIL_MODES:
        raise ValueError(f"it is not a .npy file, which alone can have channels={channels}")
    image = Image.open(io.BytesIO(data))
    image.load()  # Pillow rotates a TIFF here and removes its orientation tag.
    image.info.pop("xmp", None)  # where `getexif` also looks, unlike `_read_exif`
    orientation = _orientation(image.getexif)
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: convert to 8 bits")
    if "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns when it drops a palette's transparency
    return _turn(_from_pillow(image, channels), orientation)


def _to_pillow(pixels):
    """Converts pixels, uint8 [h, w, 1 or 3], to a Pillow image."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _from_pillow(image, channels):
    """Converts a Pillow image to pixels with 1 (gray) or 3 (color) channels, uint8 [h, w, C]."""
    mode = PIL_MODES[channels]
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], channels)


def _read_exif(jpeg):
    """Reads the Exif data of a JPEG from the segments before its first scan."""
    tags = Image.Exif()
    at = 2
    while jpeg[at + 1] != START_OF_SCAN:
        # A repeated 255 is padding.
        end = at + 1 if jpeg[at + 1] == 255 else at + 2 + int.from_bytes(jpeg[at + 2 : at + 4])
        if jpeg[at + 4 : at + 10] == b"Exif\0\0":
            tags.load(jpeg[at + 4 : end])
            break  # a second segment continues the first
        at = end
    return tags


def _orientation(read_exif):
    """Returns the orientation in the Exif data that `read_exif` returns."""
    try:
        return read_exif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # damaged tags
        return UPRIGHT


def _turn(pixels, orientation):
    """Returns an upright view of pixels [h, w, C]."""
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in ROWS_REVERSED:
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in COLUMNS_REVERSED else pixels


# -- cropping --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CenterCrop:
    """Resizes an image bicubically and takes the central square, as timm does.

    The shorter side is resized to `image_size / fraction` pixels; ImageNet evaluation usually uses
    a fraction of 0.875, and 1 keeps all of a square image.
    """

    image_size: int
    fraction: float = 1.0

    def __call__(self, image: StoredImage, position: int = 0) -> np.ndarray:
        """Crops an image to uint8 [image_size, image_size, C]; `position` is not used."""
        pixels = image.decode()
        shorter = math.floor(self.image_size / self.fraction)
        shape = pixels.shape[:2]
        height, width = (int(shorter * side / min(shape)) for side in shape)
        # timm and torchvision round half to even, as Python does.
        top, left = (round((side - self.image_size) / 2) for side in (height, width))
        if min(shape) != shorter:
            pixels = _by_channel(_pillow_resize, pixels, (width, height), "bicubic")
        return pixels[top : top + self.image_size, left : left + self.image_size]


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """Random resized crop (Szegedy et al. 2015) with timm's distribution.

    Aspect ratios are log-uniform. Crops are resized bicubically or bilinearly with equal
    probability, with antialiasing. A crop depends only on the seed and on the position of the image
    in the training stream.
    """

    image_size: int
    seed: int
    scale: tuple[float, float] = (0.08, 1.0)  # smallest and largest share of the image's area

    def __call__(self, image: StoredImage, position: int) -> np.ndarray:
        """Crops an image to uint8 [image_size, image_size, C]."""
        box = self.draw_box(image.size, position)
        return crop_and_resize(image, box, self.image_size, self.draw_interpolation(position))

    def draw_box(self, size: tuple[int, int], position: int) -> tuple[int, int, int, int]:
        """Draws a box (top, left, height, width) inside an image of the given height and width.

        If no attempt fits the image, returns the largest central box with an allowed aspect ratio.
        """
        height, width = size
        bits = rngs.host_bits(self.seed, position, rngs.BOX, 4 * ATTEMPTS)
        uniforms = ((bits >> np.uint64(11)) * 2.0**-53).reshape(ATTEMPTS, 4)  # in [0, 1)
        for area, ratio, down, across in uniforms.tolist():
            area = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            low, high = map(math.log, RATIO)
            ratio = math.exp(low + ratio * (high - low))
            box_height = round(math.sqrt(area / ratio))
            box_width = round(math.sqrt(area * ratio))
            if 0 < box_height <= height and 0 < box_width <= width:
                top = int(down * (height - box_height + 1))
                left = int(across * (width - box_width + 1))
                return top, left, box_height, box_width
        box_height = min(height, round(width / RATIO[0]))
        box_width = min(width, round(height * RATIO[1]))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width

    def draw_interpolation(self, position: int) -> str:
        """Returns 'bicubic' or 'bilinear'."""
        bits = rngs.host_bits(self.seed, position, rngs.INTERPOLATION, 1)
        return ("bilinear", "bicubic")[int(bits[0]) >> 63]


def crop_and_resize(
    image: StoredImage, box: tuple[int, int, int, int], image_size: int, interpolation: str
) -> np.ndarray:
    """Decodes a box of an image and resizes it to uint8 [image_size, image_size, C].

    The box is (top, left, height, width) in pixels; `interpolation` is 'bicubic' or 'bilinear'. As
    with Pillow's `draft`, a JPEG is decoded at a fraction of its size if the box still has at least
    `image_size` pixels in each direction. (timm and torchvision decode at full size.)
    """
    top, left, height, width = box
    pixels, scale, orientation = image.decode_scaled(min(height, width) / image_size)
    # The stored pixels are cropped, and the crop is turned: a scaled image that was turned first
    # could begin with an incomplete row or column, which would displace the crop.
    rows, columns = image.size
    if orientation in ROWS_REVERSED:
        top = rows - top - height
    if orientation in COLUMNS_REVERSED:
        left = columns - left - width
    if orientation in TRANSPOSED:
        top, left, height, width = left, top, width, height
    bottom = (top + height) * scale
    right = (left + width) * scale
    top = top * scale
    left = left * scale
    # Cropped first, as in timm, so that pixels outside the box do not bleed into its edge.
    y = math.floor(top)
    x = math.floor(left)
    inside = pixels[y : math.ceil(bottom), x : math.ceil(right)]
    corners = (left - x, top - y, right - x, bottom - y)
    resized = _by_channel(_resize, inside, corners, image_size, interpolation)
    return _turn(resized, orientation)


def _by_channel(resize, pixels, *options):
    """Calls a function that resizes gray and color pixels; others are resized by channel."""
    channels = pixels.shape[-1]
    if channels in PIL_MODES:
        return resize(pixels, *options)
    planes = np.split(pixels, channels, axis=-1)
    return np.concatenate([resize(plane, *options) for plane in planes], axis=-1)


def _resize(pixels, box, size, interpolation):
    """Resizes a box (left, top, right, bottom) to a square.

    Pillow and SIMD round in different places: in photographs, 3 values in 10,000 differ by more
    than 1.
    """
    height, width, channels = pixels.shape
    if simd is None:
        return _pillow_resize(pixels, (size, size), interpolation, box)
    left, top, right, bottom = box
    pixel_type = {1: simd.PixelType.U8, 3: simd.PixelType.U8x3}[channels]
    filters = {"bicubic": simd.FilterType.catmull_rom, "bilinear": simd.FilterType.bilinear}
    options = simd.ResizeOptions(
        simd.ResizeAlg.convolution(filters[interpolation]),
        crop_box=simd.CropBox(left, top, right - left, bottom - top),
    )
    result = simd.ImageData(size, size, pixel_type)
    source = simd.ImageData(width, height, pixel_type, pixels.tobytes())
    simd.Resizer().resize(source, result, options)
    return np.frombuffer(result.get_buffer(), np.uint8).reshape(size, size, channels)


def _pillow_resize(pixels, size, interpolation, box=None):
    resample = getattr(Image.Resampling, interpolation.upper())
    return _from_pillow(_to_pillow(pixels).resize(size, resample, box), pixels.shape[-1])
