"""Decodes, crops and resizes one stored image.

JPEGs are decoded by libjpeg-turbo (simplejpeg), which returns Pillow's pixels in half the time and
can decode at a fraction of the size. Every other format goes through Pillow.
"""

import dataclasses
import io
import math
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from structinit_jax.errors import InputError

try:
    import cykooz_resizer as simd  # six times as fast as Pillow
except ImportError:  # there is no wheel for this platform, for example ARM Linux
    simd = None

PIL_MODES = {1: "L", 3: "RGB"}
# JPEG color spaces that libjpeg-turbo converts as Pillow does.
JPEG_MODES = {"Gray": "L", "YCbCr": "RGB", "RGB": "RGB"}
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
CROP_ATTEMPTS = 10
# Counters of one Philox key. They differ from those of the epoch order.
BOX_COUNTER = np.array([0, 0, 0, 1], np.uint64)
INTERPOLATION_COUNTER = np.array([0, 0, 0, 2], np.uint64)


class BadImageError(InputError):
    """An image cannot be decoded, or the meaning of its values is unknown."""


class StoredImage:
    """An image whose header has been read; the pixels are decoded on demand.

    - Gray, palette, CMYK and YCCK images are converted to RGB, or to gray for one channel, as
      Pillow converts them.
    - 16-bit values keep their upper 8 bits. 32-bit and floating-point images, whose range is
      unknown, are refused.
    - Transparency is dropped, as in timm and torchvision.
    - The EXIF orientation is applied. (timm and torchvision ignore it.)
    - Only the first picture of an animation or a multi-page file is read.

    Args:
      data: An encoded file, or pixels: uint8 [h, w] or [h, w, 1 or 3].
      channels: Number of channels to decode to, 1 or 3.
      name: Name of the image in error messages.

    Raises:
      BadImageError: The header is damaged or the kind of image is not supported.
    """

    def __init__(self, data: bytes | np.ndarray, channels: int, name: str):
        self.name, self._data, self._mode = name, data, PIL_MODES[channels]
        self._upright, self._jpeg_mode = UPRIGHT[1], None
        if isinstance(data, np.ndarray):
            self._read_array()
            return
        try:
            # Pillow is slow on headers, so it reads only those of other formats or with EXIF tags.
            if data[:2] == b"\xff\xd8" and not _may_have_exif(data):
                self._read_jpeg_header()
            if self._jpeg_mode is None:
                self._read_header()
        except Exception as error:  # each format's decoder has errors of its own
            raise self._bad(error) from error
        kind = {"I": "32-bit", "F": "floating-point"}
        if self._jpeg_mode is None and self._file.mode in kind:
            raise BadImageError(
                f"{name}: its pixels are {kind[self._file.mode]} numbers of unknown range. Convert"
                " it to 8 or 16 bits."
            )

    @property
    def num_bytes(self) -> int:
        """Stored size."""
        return self._data.nbytes if isinstance(self._data, np.ndarray) else len(self._data)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, after applying the orientation."""
        width, height = self._stored_size
        return (width, height) if self._upright[0] else (height, width)

    def decode(self, at_least: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Returns the pixels, uint8 [h, w, C].

        Args:
          at_least: Height and width that suffice: a JPEG may be decoded at a smaller size, in
            eighths of its own, that is no smaller than this. (0, 0) decodes the full size.

        Raises:
          BadImageError: The image is damaged or truncated.
        """
        swap, down, across = self._upright
        try:
            if self._jpeg_mode is not None:
                pixels = self._decode_jpeg(at_least[::-1] if swap else at_least)
            else:
                pixels = np.asarray(_convert(self._file, self._mode))
        except Exception as error:
            raise self._bad(error) from error
        pixels = (pixels.swapaxes(0, 1) if swap else pixels)[::down, ::across]
        return pixels[..., None] if pixels.ndim == 2 else pixels

    def _read_array(self):
        pixels = self._data
        if pixels.ndim == 3 and pixels.shape[-1] == 1:
            pixels = pixels[..., 0]
        if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or pixels.shape[2:] == (3,)):
            raise BadImageError(
                f"{self.name}: pixels need to be uint8 [h, w] or [h, w, 1 or 3], got {pixels.dtype}"
                f" {list(pixels.shape)}."
            )
        self._file = Image.fromarray(np.ascontiguousarray(pixels))
        self._stored_size = self._file.size

    def _read_jpeg_header(self):
        import simplejpeg  # imported here so that other formats can be read without it

        height, width, space, _ = simplejpeg.decode_jpeg_header(self._data)
        if width * height <= Image.MAX_IMAGE_PIXELS:  # otherwise Pillow warns or refuses
            self._stored_size, self._jpeg_mode = (width, height), JPEG_MODES.get(space)

    def _read_header(self):
        self._file = file = Image.open(io.BytesIO(self._data))
        self._stored_size, is_jpeg = file.size, file.format in ("JPEG", "MPO")
        # Pillow applies the orientation of a TIFF while loading. For formats other than JPEG, the
        # search for EXIF tags may have to decode the image.
        if file.format != "TIFF" and not (is_jpeg and "exif" not in file.info):
            orientation = file.getexif().get(ExifTags.Base.Orientation, 1)
            self._upright = UPRIGHT.get(orientation, UPRIGHT[1])
        if is_jpeg and file.mode in ("L", "RGB"):
            self._jpeg_mode = file.mode

    def _decode_jpeg(self, at_least):
        import simplejpeg

        pixels = simplejpeg.decode_jpeg(
            self._data,
            {"L": "GRAY", "RGB": "RGB"}[self._jpeg_mode],
            min_height=at_least[0],
            min_width=at_least[1],
            min_factor=2 if any(at_least) else 1,
        )
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        if self._jpeg_mode == self._mode:
            return pixels
        return np.asarray(Image.fromarray(pixels).convert(self._mode))

    def _bad(self, error):
        # Pillow's text for an unknown format contains a memory address.
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "unknown image format" if unknown else str(error).rstrip(".")
        return BadImageError(
            f"{self.name}: cannot be decoded ({reason}). Replace or delete it, or leave out such"
            " images with config.data.on_bad_image='skip'."
        )


def _may_have_exif(data):
    """Returns whether a JPEG has EXIF tags, by its segments; searching all of it takes longer."""
    start = 2
    while start + 4 <= len(data) and data[start] == 0xFF:
        marker = data[start + 1]
        if marker == 0xDA:  # start of the pixels
            return False
        if marker == 0xE1 and data[start + 4 : start + 10] == b"Exif\0\0":
            return True
        start += 2 + int.from_bytes(data[start + 2 : start + 4])
    return True  # an unusual header


def _convert(image, mode):
    if image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns when it drops a palette's transparency
    return image if image.mode == mode else image.convert(mode)


def resize_and_center_crop(
    pixels: np.ndarray, image_size: int, crop_fraction: float = 1.0
) -> np.ndarray:
    """Resizes an image, uint8 [h, w, C], bicubically and takes the central square.

    The shorter side is resized to `image_size / crop_fraction` pixels; ImageNet evaluation usually
    takes 0.875, and 1 keeps the whole of a square image. Returns uint8 [image_size, image_size, C].
    """
    height, width = pixels.shape[:2]
    scale = round(image_size / crop_fraction) / min(height, width)
    if scale != 1:
        pixels = _pillow_resize(pixels, (round(width * scale), round(height * scale)), "bicubic")
    top = (pixels.shape[0] - image_size) // 2
    left = (pixels.shape[1] - image_size) // 2
    return pixels[top : top + image_size, left : left + image_size]


def _pillow_resize(pixels, size, interpolation, box=None):
    image = np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    resample = getattr(Image.Resampling, interpolation.upper())
    resized = np.asarray(Image.fromarray(image).resize(size, resample, box))
    return resized[..., None] if resized.ndim == 2 else resized


class Box(NamedTuple):
    """A rectangle in an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """Random resized crop (Szegedy et al. 2015), distributed as timm's.

    A crop depends only on the seed and on the position of the image in the training stream.

    Attributes:
      seed: Non-negative seed.
      scale: Smallest and largest area, as fractions of the image's area.
      ratio: Smallest and largest width / height, sampled uniformly in the logarithm.
      interpolation: 'bicubic', 'bilinear' (both antialiased) or 'random', one of them per image.
    """

    seed: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bicubic"

    def __call__(self, image: StoredImage, position: int, image_size: int) -> np.ndarray:
        """Crops an image. Returns uint8 [image_size, image_size, C]."""
        box = self.draw_box(image.size, position)
        return crop_and_resize(image, box, image_size, self.draw_interpolation(position))

    def draw_box(self, size: tuple[int, int], position: int) -> Box:
        """Draws a box inside an image of the given height and width.

        If no attempt fits into the image, the box is the largest central one of an allowed ratio.
        """
        height, width = size
        bits = self._random_bits(position, BOX_COUNTER, 4 * CROP_ATTEMPTS)
        uniforms = ((bits >> np.uint64(11)) * 2.0**-53).reshape(CROP_ATTEMPTS, 4)  # in [0, 1)
        for area, ratio, down, across in uniforms.tolist():
            area = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            low, high = map(math.log, self.ratio)
            ratio = math.exp(low + ratio * (high - low))
            box_height, box_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < box_height <= height and 0 < box_width <= width:
                top = int(down * (height - box_height + 1))
                left = int(across * (width - box_width + 1))
                return Box(top, left, box_height, box_width)
        box_height = min(height, max(1, round(width / self.ratio[0])))
        box_width = min(width, max(1, round(height * self.ratio[1])))
        return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)

    def draw_interpolation(self, position: int) -> str:
        """Returns 'bicubic' or 'bilinear'."""
        if self.interpolation != "random":
            return self.interpolation
        bits = self._random_bits(position, INTERPOLATION_COUNTER, 1)
        return ("bilinear", "bicubic")[int(bits[0]) >> 63]

    def _random_bits(self, position, counter, count):
        # NumPy guarantees the raw output of Philox across versions, unlike that of Generator.
        key = np.array([self.seed, position], np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count)


def crop_and_resize(
    image: StoredImage, box: Box, image_size: int, interpolation: str
) -> np.ndarray:
    """Decodes a box of an image and resizes it to uint8 [image_size, image_size, C].

    `interpolation` is 'bicubic' or 'bilinear'.
    A JPEG is decoded at a fraction of its size if the box still has `image_size` pixels each way.
    """
    full, sides = image.size, (box.height, box.width)
    at_least = (math.ceil(size * image_size / side) for size, side in zip(full, sides, strict=True))
    pixels = image.decode(tuple(at_least))
    height, width = pixels.shape[:2]
    # The decoded size is rounded up, but its pixels are exact eighths apart.
    scale = round(8 * max(height, width) / max(full)) / 8
    top, bottom = box.top * scale, min((box.top + box.height) * scale, height)
    left, right = box.left * scale, min((box.left + box.width) * scale, width)
    # Cut out first, as timm does, so that pixels outside the box do not bleed into its edge.
    y, x = math.floor(top), math.floor(left)
    inside = pixels[y : math.ceil(bottom), x : math.ceil(right)]
    return _resize(inside, (left - x, top - y, right - x, bottom - y), image_size, interpolation)


def _resize(pixels, box, size, interpolation):
    """Resizes a box (left, top, right, bottom) to a square.

    Pillow and SIMD round in different places: 3 values in 10,000 differ by more than 1.
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
