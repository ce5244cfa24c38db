"""Decodes a stored image.

JPEGs are decoded by libjpeg-turbo (simplejpeg), which returns Pillow's pixels in half the time and
can decode at a fraction of the size. Pillow decodes every other format, and CMYK JPEGs.
"""

import functools
import hashlib
import io
import math
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, UnidentifiedImageError

from structinit_jax.errors import InputError

PIL_MODES = {1: "L", 3: "RGB"}
# JPEG color spaces that libjpeg-turbo decodes as Pillow does, and what they are decoded to.
JPEG_SPACES = {"Gray": "GRAY", "YCbCr": "RGB", "RGB": "RGB"}
# Markers of a JPEG. The frame header holds the size; C4, C8 and CC are not frames.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
END_OF_IMAGE = b"\xff\xd9"
TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width


class BadImageError(InputError):
    """An image is missing or cannot be decoded; `problem` names it and says what is wrong."""

    def __init__(self, problem: str):
        super().__init__(
            f"{problem}. Replace it with an intact image; a new run leaves such images out with"
            " --config.data.on_bad_image=skip."
        )
        self.problem = problem


class JpegHeader(NamedTuple):
    """What is known of a JPEG before it is decoded."""

    height: int  # as stored, before applying the orientation
    width: int
    space: str  # color space to decode it to
    orientation: int
    frame: int  # offset of the frame header; 0 if the file is truncated


class StoredImage:
    """An image that is decoded on demand, to 1 or 3 channels.

    `data` is an encoded file, or pixels: uint8 [h, w] or [h, w, 1 or 3]. Error messages call the
    image `name`.

    - Gray, palette, CMYK and YCCK images are converted to RGB, or to gray for one channel, as
      Pillow converts them.
    - 16-bit values of PNG and TIFF keep their upper 8 bits. Those of PGM, which Pillow reads as
      32-bit values, and floating-point images are refused, because their range is unknown.
    - Transparency is dropped, as in timm and torchvision.
    - The EXIF orientation is applied. (timm and torchvision ignore it.)
    - Only the first picture of an animation or a multi-page file is read.
    - Truncated files are refused. Damage in a JPEG that Pillow tolerates is ignored.

    `size` and `decode` raise `BadImageError` if the image is truncated, damaged or not supported.
    """

    def __init__(self, data: bytes | np.ndarray, channels: int, name: str):
        self.name = name
        self._data = data
        self._channels = channels

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, after applying the orientation.

        Formats other than JPEG are decoded for this.
        """
        if self._jpeg is None:
            return self._pixels.shape[:2]
        height = self._jpeg.height
        width = self._jpeg.width
        return (width, height) if self._jpeg.orientation in TRANSPOSED else (height, width)

    def decode(self) -> np.ndarray:
        """Returns the pixels, uint8 [h, w, C]."""
        pixels, _ = self.decode_top(self.size[0])
        return pixels

    def decode_top(self, rows: int, reduction: float = 1.0) -> tuple[np.ndarray, float]:
        """Returns the upper `rows` of the image or more, uint8 [h, w, C], and their scale.

        The scale of a JPEG is 1, 1/2, 3/8, 1/4 or 1/8, but at least `1 / reduction`; what is below
        the rows is not decoded, and damage there goes unnoticed. Other images have the scale 1.
        """
        if self._jpeg is None:
            return self._pixels, 1.0
        height, width, space, orientation, frame = self._jpeg
        data = self._data
        eighths = next((n for n in (1, 2, 3, 4) if n * reduction >= 8), 8)
        # The interpolation of colors needs the pixels below.
        end = rows + 16 // eighths
        if ends_early := frame > 0 and orientation == 1 and end < height:
            height = end
            # A decoder stops at the height in the header.
            parts = (data[: frame + 5], height.to_bytes(2, "big"), memoryview(data)[frame + 7 :])
            data = b"".join(parts)
        try:
            pixels = simplejpeg.decode_jpeg(
                data,
                space,
                min_height=math.ceil(height * eighths / 8),
                min_width=math.ceil(width * eighths / 8),
                min_factor=1 if eighths == 8 else 2,
                strict=not ends_early,  # it warns of the bytes that are left
            )
        except ValueError:
            # simplejpeg stops at the first warning. Pillow goes on, but refuses a truncated file.
            return self._pixels, 1.0
        if pixels.shape[-1] != self._channels:
            pixels = from_pillow(to_pillow(pixels), self._channels)
        return _turn(pixels, orientation), eighths / 8

    def checksum(self) -> bytes:
        """Returns the SHA-256 of the encoded file, or of the pixels and their shape."""
        if isinstance(self._data, bytes):
            return hashlib.sha256(self._data).digest()
        return hashlib.sha256(f"{self._data.shape}".encode() + self._data.tobytes()).digest()

    @functools.cached_property
    def _jpeg(self) -> JpegHeader | None:
        """The header of a JPEG that simplejpeg can decode."""
        if not (isinstance(self._data, bytes) and self._data.startswith(b"\xff\xd8")):
            return None
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(self._data)
            frame, exif = _find_frame(self._data)
        except (ValueError, IndexError):  # Pillow reads it, or says what is wrong
            return None
        if space not in JPEG_SPACES:  # CMYK
            return None
        orientation = _orientation(functools.partial(_parse_exif, exif)) if exif else 1
        is_truncated = self._data.rfind(END_OF_IMAGE, frame) < 0
        return JpegHeader(
            height, width, JPEG_SPACES[space], orientation, frame=0 if is_truncated else frame
        )

    @functools.cached_property
    def _pixels(self) -> np.ndarray:
        """The pixels as Pillow decodes them, uint8 [h, w, C]."""
        try:
            return self._decode()
        except Exception as error:  # each format's decoder has errors of its own
            # The text of this one contains a memory address.
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
            raise BadImageError(f"{self.name}: cannot be decoded ({reason})") from error

    def _decode(self):
        is_array = isinstance(self._data, np.ndarray)
        image = to_pillow(self._data) if is_array else Image.open(io.BytesIO(self._data))
        image.load()  # Pillow turns a TIFF here and removes its orientation.
        orientation = _orientation(image.getexif)
        if image.mode.startswith("I;16"):  # Pillow itself clips at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):
            raise ValueError(f"pixels of mode {image.mode} have no known range: convert to 8 bits")
        if "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns when it drops a palette's
        return _turn(from_pillow(image, self._channels), orientation)


def to_pillow(pixels: np.ndarray) -> Image.Image:
    """Converts pixels, uint8 [h, w] or [h, w, 1 or 3], to an image of Pillow."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


def from_pillow(image: Image.Image, channels: int) -> np.ndarray:
    """Converts an image of Pillow to pixels of 1 (gray) or 3 (color) channels, uint8 [h, w, C]."""
    mode = PIL_MODES[channels]
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], channels)


def _find_frame(jpeg):
    """Returns the offset of the frame header of a JPEG, and the Exif data before it, or b''."""
    exif = b""
    at = 2
    while jpeg[at + 1] not in FRAMES:
        # 255 again is padding.
        end = at + 1 if jpeg[at + 1] == 255 else at + 2 + int.from_bytes(jpeg[at + 2 : at + 4])
        if jpeg[at + 4 : at + 10] == b"Exif\0\0":
            exif = jpeg[at + 4 : end]
        at = end
    return at, exif


def _parse_exif(exif):
    """Parses Exif data as Pillow does, which opens no JPEG of more than 179 million pixels."""
    tags = Image.Exif()
    tags.load(exif)
    return tags


def _orientation(read_exif):
    """Returns the orientation that Exif tags give; 1 is upright."""
    try:
        return read_exif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged tags
        return 1


def _turn(pixels, orientation):
    """Returns a view of pixels [h, w, C] that is upright."""
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels
