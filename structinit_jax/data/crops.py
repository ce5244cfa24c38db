"""Crops and resizes images: at the center for evaluation, at random boxes for training."""

import dataclasses
import math

import numpy as np
from PIL import Image

from structinit_jax import rngs
from structinit_jax.data.images import StoredImage, from_pillow, to_pillow

try:
    import cykooz_resizer as simd  # six times as fast as Pillow
except ImportError:  # there is no wheel for this platform, for example ARM Linux
    simd = None

RATIO = (3 / 4, 4 / 3)  # smallest and largest width / height of random boxes, as in timm
ATTEMPTS = 10  # as in torchvision


def resize_and_center_crop(
    pixels: np.ndarray, image_size: int, crop_fraction: float = 1.0
) -> np.ndarray:
    """Resizes an image, uint8 [h, w, C], bicubically and takes the central square, as timm does.

    The shorter side is resized to `image_size / crop_fraction` pixels; ImageNet evaluation usually
    takes 0.875, and 1 keeps the whole of a square image. Returns uint8 [image_size, image_size, C].
    """
    shorter = math.floor(image_size / crop_fraction)
    shape = pixels.shape[:2]
    height, width = (int(shorter * side / min(shape)) for side in shape)
    # timm and torchvision round a half to the even number, as Python does.
    top, left = (round((side - image_size) / 2) for side in (height, width))
    if min(shape) != shorter:
        pixels = _pillow_resize(pixels, (width, height), "bicubic")
    return pixels[top : top + image_size, left : left + image_size]


def _pillow_resize(pixels, size, interpolation, box=None):
    resample = getattr(Image.Resampling, interpolation.upper())
    return from_pillow(to_pillow(pixels).resize(size, resample, box), pixels.shape[-1])


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """Random resized crop (Szegedy et al. 2015), distributed as timm's.

    Aspect ratios are uniform in the logarithm, and crops are resized bicubically or bilinearly with
    equal probability, both antialiased. A crop depends only on the seed and on the position of the
    image in the training stream.
    """

    seed: int
    scale: tuple[float, float] = (0.08, 1.0)  # smallest and largest share of the image's area

    def __call__(self, image: StoredImage, position: int, image_size: int) -> np.ndarray:
        """Crops an image. Returns uint8 [image_size, image_size, C]."""
        box = self.draw_box(image.size, position)
        return crop_and_resize(image, box, image_size, self.draw_interpolation(position))

    def draw_box(self, size: tuple[int, int], position: int) -> tuple[int, int, int, int]:
        """Draws a box (top, left, height, width) inside an image of the given height and width.

        If no attempt fits into the image, the box is the largest central one of an allowed ratio.
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
        box_height = min(height, max(1, round(width / RATIO[0])))
        box_width = min(width, max(1, round(height * RATIO[1])))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width

    def draw_interpolation(self, position: int) -> str:
        """Returns 'bicubic' or 'bilinear'."""
        bits = rngs.host_bits(self.seed, position, rngs.INTERPOLATION, 1)
        return ("bilinear", "bicubic")[int(bits[0]) >> 63]


def crop_and_resize(
    image: StoredImage, box: tuple[int, int, int, int], image_size: int, interpolation: str
) -> np.ndarray:
    """Decodes a box of an image and resizes it to uint8 [image_size, image_size, C].

    The box is (top, left, height, width) in pixels, `interpolation` 'bicubic' or 'bilinear'. A JPEG
    is decoded at a fraction of its size if the box still has `image_size` pixels each way, as with
    Pillow's `draft`. Decoding ends below the box, as with TensorFlow's `decode_and_crop_jpeg`; this
    changes no pixel. (timm and torchvision decode whole images.)
    """
    top, left, height, width = box
    pixels, scale = image.decode_top(top + height, min(height, width) / image_size)
    bottom = (top + height) * scale
    right = (left + width) * scale
    top = top * scale
    left = left * scale
    # Cut out first, as timm does, so that pixels outside the box do not bleed into its edge.
    y = math.floor(top)
    x = math.floor(left)
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
