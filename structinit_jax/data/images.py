"""Decodes a stored image.

JPEGs are decoded by libjpeg-turbo (simplejpeg), which returns Pillow's pixels in half the time and
can decode at a fraction of the size. Pillow decodes every other format, and CMYK JPEGs.
"""

import functools
import hashlib
import io

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, UnidentifiedImageError

from structinit_jax.errors import InputError

PIL_MODES = {1: "L", 3: "RGB"}
# JPEG color spaces that libjpeg-turbo decodes as Pillow does, and what they are decoded to.
JPEG_SPACES = {"Gray": "GRAY", "YCbCr": "RGB", "RGB": "RGB"}
MAX_EXIF_START = 65_536  # bytes into a JPEG; searching all of it takes longer
TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width


class BadImageError(InputError):
    """An image is missing or cannot be decoded; `problem` names it and says what is wrong."""

    def __init__(self, problem: str):
        super().__init__(
            f"{problem}. Replace it with an intact image, or start a new run with"
            " config.data.on_bad_image='skip'."
        )
        self.problem = problem


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
        height, width, _, orientation = self._jpeg
        return (width, height) if orientation in TRANSPOSED else (height, width)

    def decode(self, at_least: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Returns the pixels, uint8 [h, w, C].

        A JPEG may be decoded at a smaller size, in eighths of its own, that has at least the given
        height and width. (0, 0) decodes the full size.
        """
        return self._pixels if self._jpeg is None else self._decode_jpeg(at_least)

    def checksum(self) -> bytes:
        """Returns the SHA-256 of the encoded file, or of the pixels and their shape."""
        if isinstance(self._data, bytes):
            return hashlib.sha256(self._data).digest()
        return hashlib.sha256(f"{self._data.shape}".encode() + self._data.tobytes()).digest()

    @functools.cached_property
    def _jpeg(self) -> tuple[int, int, str, int] | None:
        """Height, width, color space and orientation of a JPEG that simplejpeg can decode."""
        if not (isinstance(self._data, bytes) and self._data.startswith(b"\xff\xd8")):
            return None
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(self._data)
        except ValueError:  # Pillow reads it, or says what is wrong
            return None
        if space not in JPEG_SPACES:  # CMYK
            return None
        orientation = 1
        if b"Exif\0\0" in self._data[:MAX_EXIF_START]:
            orientation = _orientation(Image.open(io.BytesIO(self._data)))
        return height, width, JPEG_SPACES[space], orientation

    def _decode_jpeg(self, at_least):
        _, _, space, orientation = self._jpeg
        height, width = at_least[::-1] if orientation in TRANSPOSED else at_least
        factor = 2 if any(at_least) else 1
        scale = dict(min_height=height, min_width=width, min_factor=factor)
        try:
            pixels = simplejpeg.decode_jpeg(self._data, space, **scale)
        except ValueError:
            # simplejpeg stops at the first warning. Pillow goes on, but refuses a truncated file.
            return self._pixels
        if pixels.shape[-1] != self._channels:
            pixels = from_pillow(to_pillow(pixels), self._channels)
        return _turn(pixels, orientation)

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
        image.load()  # which turns a TIFF
        orientation = _orientation(image)
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


def _orientation(image):
    """Returns the EXIF orientation of an image; 1 is upright."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged tags
        return 1


def _turn(pixels, orientation):
    """Returns a view of pixels [h, w, C] that is upright."""
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels
