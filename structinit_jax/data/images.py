"""Decodes a stored image.

JPEGs are decoded by libjpeg-turbo (simplejpeg), which returns Pillow's pixels in half the time and
can decode at a fraction of the size. Every other format goes through Pillow.
"""

import contextlib
import io
import struct

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from structinit_jax.errors import InputError

PIL_MODES = {1: "L", 3: "RGB"}
# JPEG color spaces that libjpeg-turbo converts as Pillow does.
JPEG_MODES = {"Gray": "L", "YCbCr": "RGB", "RGB": "RGB"}
MAX_EXIF_START = 65_536  # bytes into a JPEG; searching all of it takes longer


class BadImageError(InputError):
    """An image cannot be decoded, or the meaning of its values is unknown.

    Args:
      problem: What is wrong with which image.
    """

    def __init__(self, problem: str):
        super().__init__(
            f"{problem}. Replace it with an intact image, or leave it out with"
            " config.data.on_bad_image='skip'."
        )
        self.problem = problem


class StoredImage:
    """An image whose header has been read; the pixels are decoded on demand.

    - Gray, palette, CMYK and YCCK images are converted to RGB, or to gray for one channel, as
      Pillow converts them.
    - 16-bit values keep their upper 8 bits. 32-bit and floating-point images are refused, because
      their range is unknown.
    - Transparency is dropped, as in timm and torchvision.
    - The EXIF orientation is applied. (timm and torchvision ignore it.)
    - Only the first picture of an animation or a multi-page file is read.
    - Truncated files are refused. Damage in a JPEG that Pillow tolerates is ignored.

    Args:
      data: An encoded file, or pixels: uint8 [h, w] or [h, w, 1 or 3].
      channels: Number of channels to decode to, 1 or 3.
      name: Name of the image in error messages.

    Attributes:
      size: Height and width in pixels, after applying the orientation.

    Raises:
      BadImageError: The header is damaged or the kind of image is not supported.
    """

    def __init__(self, data: bytes | np.ndarray, channels: int, name: str):
        self.name, self._data, self._mode = name, data, PIL_MODES[channels]
        self._jpeg_mode = None  # of a JPEG that simplejpeg decodes
        self._transposed = False  # by the EXIF orientation
        with self._explain():
            if isinstance(data, np.ndarray):
                self.size = data.shape[:2]
            # Pillow is slow on headers, so it reads only those of other formats or with EXIF tags.
            elif not self._is_jpeg() or b"Exif\0\0" in data[:MAX_EXIF_START]:
                self._read_header()
            else:
                self._read_jpeg_header()

    def decode(self, at_least: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Returns the pixels, uint8 [h, w, C].

        Args:
          at_least: Height and width that suffice: a JPEG may be decoded at a smaller size, in
            eighths of its own, that is no smaller than this. (0, 0) decodes the full size.

        Raises:
          BadImageError: The image is truncated, or of a kind that is not supported.
        """
        with self._explain():
            read = self._decode if self._jpeg_mode is None else self._decode_jpeg
            pixels = read(at_least)
        return pixels[..., None] if pixels.ndim == 2 else pixels

    def content(self) -> bytes:
        """Returns the bytes of a JPEG, or the pixels of other formats.

        The bytes of a PNG depend on the version of the program that prepared the data set.
        """
        return self._data if self._is_jpeg() else self.decode().tobytes()

    def _is_jpeg(self):
        return isinstance(self._data, bytes) and self._data.startswith(b"\xff\xd8")

    def _read_jpeg_header(self):
        import simplejpeg  # imported here so that other formats can be read without it

        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(self._data)
        except ValueError:
            space = None
        if space in JPEG_MODES:
            self.size, self._jpeg_mode = (height, width), JPEG_MODES[space]
        else:
            self._read_header()  # Pillow reads it, or says what is wrong

    def _read_header(self):
        image, orientation = Image.open(io.BytesIO(self._data)), 1
        self.size = image.height, image.width
        if image.format != "TIFF":  # whose orientation Pillow applies to the size, too
            with contextlib.suppress(Exception):  # damaged tags
                orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        self._transposed = 5 <= orientation <= 8
        if self._transposed:
            self.size = self.size[::-1]
        if self._is_jpeg() and image.mode in ("L", "RGB") and not 2 <= orientation <= 8:
            self._jpeg_mode = image.mode

    def _decode_jpeg(self, at_least):
        import simplejpeg

        try:
            pixels = simplejpeg.decode_jpeg(
                self._data,
                {"L": "GRAY", "RGB": "RGB"}[self._jpeg_mode],
                min_height=at_least[0],
                min_width=at_least[1],
                min_factor=2 if any(at_least) else 1,
            )
        except ValueError:
            # It stops at the first warning. Pillow goes on, but refuses a truncated file.
            return self._decode()
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        if self._jpeg_mode == self._mode:
            return pixels
        return np.asarray(Image.fromarray(pixels).convert(self._mode))

    def _decode(self, at_least=(0, 0)):
        if isinstance(self._data, np.ndarray):
            pixels = self._data[..., 0] if self._data.shape[2:] == (1,) else self._data
            image = Image.fromarray(np.ascontiguousarray(pixels))
        else:
            image = Image.open(io.BytesIO(self._data))
            if any(at_least):
                image.draft(None, at_least if self._transposed else at_least[::-1])
            with contextlib.suppress(SyntaxError, struct.error):  # damaged tags
                image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow itself clips at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):
            raise ValueError("32-bit and floating-point values have no known range: convert them")
        if "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns when it drops a palette's transparency
        return np.asarray(image if image.mode == self._mode else image.convert(self._mode))

    @contextlib.contextmanager
    def _explain(self):
        try:
            yield
        except UnidentifiedImageError as error:  # its text contains a memory address
            raise BadImageError(f"{self.name}: cannot be decoded (unknown format)") from error
        except Exception as error:  # each format's decoder has errors of its own
            raise BadImageError(f"{self.name}: cannot be decoded ({error})") from error
