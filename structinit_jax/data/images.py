"""Decodes a stored image.

JPEGs are decoded by libjpeg-turbo (simplejpeg), which returns Pillow's pixels in half the time and
can decode at a fraction of the size. Every other format goes through Pillow.
"""

import contextlib
import io

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from structinit_jax.errors import InputError

PIL_MODES = {1: "L", 3: "RGB"}
# JPEG color spaces that libjpeg-turbo converts as Pillow does.
JPEG_MODES = {"Gray": "L", "YCbCr": "RGB", "RGB": "RGB"}
MAX_EXIF_START = 65_536  # bytes into a JPEG; searching all of it takes longer
# EXIF orientation -> whether to swap height and width, then the steps along rows and columns.
UPRIGHT = {
    1: (False, 1, 1),
    2: (False, 1, -1),
    3: (False, -1, -1),
    4: (False, -1, 1),
    5: (True, 1, 1),
    6: (True, 1, -1),
    7: (True, -1, -1),
    8: (True, -1, 1),
}


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
        self._upright, self._jpeg_mode = UPRIGHT[1], None
        with self._explain():
            if isinstance(data, np.ndarray):
                pixels = data[..., 0] if data.shape[2:] == (1,) else data
                self._file = Image.fromarray(np.ascontiguousarray(pixels))
                width, height = self._file.size
            # Pillow is slow on headers, so it reads only those of other formats or with EXIF tags.
            elif data[:2] == b"\xff\xd8" and b"Exif\0\0" not in data[:MAX_EXIF_START]:
                width, height = self._read_jpeg_header()
            else:
                width, height = self._read_header()
        self.size = (width, height) if self._upright[0] else (height, width)

    def decode(self, at_least: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Returns the pixels, uint8 [h, w, C].

        Args:
          at_least: Height and width that suffice: a JPEG may be decoded at a smaller size, in
            eighths of its own, that is no smaller than this. (0, 0) decodes the full size.

        Raises:
          BadImageError: The image is truncated, or of a kind that is not supported.
        """
        swap, down, across = self._upright
        with self._explain():
            if self._jpeg_mode is not None:
                pixels = self._decode_jpeg(at_least[::-1] if swap else at_least)
            else:
                pixels = np.asarray(self._convert(self._file))
        pixels = (pixels.swapaxes(0, 1) if swap else pixels)[::down, ::across]
        return pixels[..., None] if pixels.ndim == 2 else pixels

    def content(self) -> bytes:
        """Returns the bytes of a JPEG, or the pixels of other formats.

        The bytes of a PNG depend on the version of the program that prepared the data set.
        """
        return self._data if self._jpeg_mode is not None else self.decode().tobytes()

    def _read_jpeg_header(self):
        import simplejpeg  # imported here so that other formats can be read without it

        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(self._data)
        except ValueError:
            space = None
        if space not in JPEG_MODES:  # Pillow reads it, or says what is wrong
            return self._read_header()
        self._jpeg_mode = JPEG_MODES[space]
        return width, height

    def _read_header(self):
        self._file = file = Image.open(io.BytesIO(self._data))
        size, is_jpeg = file.size, file.format in ("JPEG", "MPO")
        if file.format != "TIFF":  # whose orientation Pillow applies while loading
            with contextlib.suppress(Exception):  # damaged tags
                orientation = file.getexif().get(ExifTags.Base.Orientation)
                self._upright = UPRIGHT.get(orientation, UPRIGHT[1])
        if is_jpeg and file.mode in ("L", "RGB"):
            self._jpeg_mode = file.mode
        return size

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
            return np.asarray(self._convert(Image.open(io.BytesIO(self._data))))
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        if self._jpeg_mode == self._mode:
            return pixels
        return np.asarray(Image.fromarray(pixels).convert(self._mode))

    def _convert(self, image):
        if image.mode.startswith("I;16"):  # Pillow itself clips at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):
            raise ValueError("32-bit and floating-point values have no known range: convert them")
        if "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns when it drops a palette's transparency
        return image if image.mode == self._mode else image.convert(self._mode)

    @contextlib.contextmanager
    def _explain(self):
        try:
            yield
        except UnidentifiedImageError as error:  # its text contains a memory address
            raise BadImageError(f"{self.name}: cannot be decoded (unknown format)") from error
        except Exception as error:  # each format's decoder has errors of its own
            raise BadImageError(f"{self.name}: cannot be decoded ({error})") from error
