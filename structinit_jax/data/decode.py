"""Encoded images of any kind -> uint8 pixels, or a refusal that names the image.

JPEGs go through libjpeg-turbo (simplejpeg), which gives the bits of Pillow in half the time and can
decode at a fraction of the size; everything else goes through Pillow.
"""

import io

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import DecompressionBombError

from structinit_jax.errors import InputError

PIL_MODES = {1: "L", 3: "RGB"}
# Colour spaces that libjpeg-turbo decodes to what Pillow makes of them.
JPEG_MODES = {"Gray": "L", "YCbCr": "RGB", "RGB": "RGB"}
# How a stored image becomes the one to look at, by the value of the EXIF tag "Orientation".
UPRIGHT = {
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].swapaxes(0, 1),
    8: lambda image: np.rot90(image, 1),
}
# What Pillow and simplejpeg raise for damaged files; struct.error is no OSError or ValueError.
DECODER_ERRORS = (OSError, ValueError, SyntaxError, EOFError, IndexError, DecompressionBombError)


class BadImageError(InputError):
    """An image cannot be decoded, or not without guessing what its values mean."""


class EncodedImage:
    """An image whose header is read, to be decoded once the wanted size is known.

    - Grey, palette, CMYK and YCCK images become RGB (or grey, for one channel) as in Pillow.
    - Of 16 bits, the upper 8 are kept. 32-bit and floating-point images are refused, since nothing
      says which value is white.
    - Transparency is dropped, as timm and torchvision do.
    - The EXIF orientation is applied, for TFDS sets as for folders. (timm and torchvision ignore
      it: there, a photograph taken sideways stays on its side.)
    - Of an animation or a multi-page file, the first picture counts.

    Args:
      encoded: The file's bytes.
      channels: 1 or 3.
      name: What messages call the image: its path, or its data set and number.

    Raises:
      BadImageError: The header is damaged, or the kind is one that is refused.
    """

    def __init__(self, encoded: bytes, channels: int, name: str):
        self._encoded, self._mode, self.name = encoded, PIL_MODES[channels], name
        self._orientation, self._jpeg_mode = 1, None
        try:
            # Pillow takes long over a header: it reads those of other kinds, or with metadata.
            if encoded[:2] == b"\xff\xd8" and b"Exif\0\0" not in encoded:
                self._read_jpeg_header()
            if self._jpeg_mode is None:
                self._read_header()
        except DECODER_ERRORS as error:
            raise self._bad(error) from error
        if self._jpeg_mode is None and self._file.mode in ("I", "F"):
            raise BadImageError(
                f"{name}: its pixels are {'32-bit' if self._file.mode == 'I' else 'floating-point'}"
                " numbers of unknown range; images of 8 or 16 bits are needed. Convert it."
            )

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._encoded)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, upright."""
        width, height = self._stored_size
        return (width, height) if self._orientation in (5, 6, 7, 8) else (height, width)

    def decode(self, at_least: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Decodes the pixels.

        Args:
          at_least: Height and width that are enough. A JPEG may then come back at a half, a quarter
            or an eighth (or three of them) of its size, never smaller than this; (0, 0) asks for
            all there is.

        Returns:
          uint8 [h, w, C].

        Raises:
          BadImageError: The image is damaged or ends too early.
        """
        if self._orientation in (5, 6, 7, 8):
            at_least = at_least[::-1]
        try:
            if self._jpeg_mode is not None:
                pixels = self._decode_jpeg(at_least)
            else:
                pixels = np.asarray(_converted(self._file, self._mode))
        except DECODER_ERRORS as error:
            raise self._bad(error) from error
        pixels = UPRIGHT.get(self._orientation, lambda image: image)(pixels)
        return pixels[..., None] if pixels.ndim == 2 else pixels

    def _read_jpeg_header(self) -> None:
        import simplejpeg  # here, so that everything but JPEGs works without it

        height, width, space, _ = simplejpeg.decode_jpeg_header(self._encoded)
        if width * height <= Image.MAX_IMAGE_PIXELS:  # else Pillow has its say
            self._stored_size, self._jpeg_mode = (width, height), JPEG_MODES.get(space)

    def _read_header(self) -> None:
        self._file = Image.open(io.BytesIO(self._encoded))
        self._stored_size, self._orientation = self._file.size, _orientation(self._file)
        if self._file.format in ("JPEG", "MPO") and self._file.mode in ("L", "RGB"):
            self._jpeg_mode = self._file.mode

    def _decode_jpeg(self, at_least: tuple[int, int]) -> np.ndarray:
        import simplejpeg

        pixels = simplejpeg.decode_jpeg(
            self._encoded,
            {"L": "GRAY", "RGB": "RGB"}[self._jpeg_mode],
            min_height=at_least[0],
            min_width=at_least[1],
            min_factor=2 if any(at_least) else 1,
        )
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        if self._jpeg_mode == self._mode:
            return pixels
        return np.asarray(Image.fromarray(pixels).convert(self._mode))

    def _bad(self, error: Exception) -> BadImageError:
        unknown = isinstance(error, UnidentifiedImageError)  # its text shows an address in memory
        reason = "no known image format" if unknown else str(error).rstrip(".")
        return BadImageError(
            f"{self.name}: cannot be decoded ({reason}). Replace or delete it, or"
            " leave such images out with data.on_bad_image='skip'."
        )


def _orientation(image: Image.Image) -> int:
    """The EXIF tag's value; 1 means upright."""
    if image.format == "TIFF":
        return 1  # Pillow turns these while it loads them
    if image.format in ("JPEG", "MPO") and "exif" not in image.info:
        return 1  # saves the search, which for other formats may have to decode
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns when a palette's transparency is dropped
    return image if image.mode == mode else image.convert(mode)


def decode_image(encoded: bytes, channels: int, name: str) -> np.ndarray:
    """Decodes an image in full.

    Args:
      encoded: The file's bytes.
      channels: 1 or 3.
      name: What messages call the image.

    Returns:
      uint8 [h, w, C], converted as `EncodedImage` says.

    Raises:
      BadImageError: The image is damaged, or of a kind that is refused.
    """
    return EncodedImage(encoded, channels, name).decode()
