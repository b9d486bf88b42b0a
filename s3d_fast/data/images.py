"""Decoding and normalisation of images."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.data.augment import CROP_TRIES, centre_crop, random_resized_crop


@dataclass(frozen=True)
class Normalise:
    """images -> (images / 255 - mean) / std, by channel; bytes become float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:  # (N, C, H, W) -> the same, float32
        """Return normalised images."""
        factors = torch.tensor([1 / (255 * std) for std in self.std])
        offsets = torch.tensor([-mean / std for mean, std in zip(self.mean, self.std, strict=True)])
        # Two in-place passes over freshly written data are faster than one addcmul, which broadcasts badly.
        return images.to(torch.float32).mul_(factors[:, None, None]).add_(offsets[:, None, None])


def normalise(mean: Sequence[float], std: Sequence[float]) -> Normalise:
    """Return a function that normalises bytes 0..255 to mean 0 and standard deviation 1 per channel.

    Args:
        mean: mean of each channel, on the scale 0..1.
        std: standard deviation of each channel, on the same scale.

    Raises:
        ValueError: mean and std differ in length or are empty, or a standard deviation is not positive.
    """
    if len(mean) != len(std) or not std or min(std) <= 0:
        raise ValueError(f"mean and std must be equally many numbers, std > 0; got {tuple(mean)} and {tuple(std)}")
    return Normalise(tuple(mean), tuple(std))


IMAGENET_NORMALISE = normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


# Far above any photograph of ImageNet. At so many pixels Pillow warns, and goes on.
MOST_BYTES, MOST_PIXELS = 1 << 26, 89_478_485
# What files of photographs hold; a .JPEG of ImageNet is a PNG.
PHOTOGRAPHS = ("JPEG", "PNG")


def open_image(stream: IO[bytes], formats: Sequence[str]) -> Any:
    """Return an image as Pillow opens it; the content decides on the format, and must be one of those given.

    Without a list, Pillow tries every format it knows, and starts Ghostscript for some of them.

    Raises:
        ValueError: the image has more than `MOST_PIXELS` pixels.
        Exception: whatever Pillow raises on other formats and on damaged files.
    """
    pillow = require.library("PIL.Image", "images need Pillow", "'s3d_fast[images]'")
    with warnings.catch_warnings():
        # Pillow warns of sizes above its own limit; ours is checked below.
        warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
        image = pillow.open(stream, formats=tuple(formats))
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, more than {MOST_PIXELS}")
    return image


def read_bytes(file: str, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file, starting at `offset`; the rest of the file if `size` is negative.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too short, or the bytes are more than `MOST_BYTES`.
    """
    with open(file, "rb") as stream:
        length = os.fstat(stream.fileno()).st_size - offset if size < 0 else size
        if length > MOST_BYTES:
            raise ValueError(f"it has {length} bytes, more than {MOST_BYTES}")
        stream.seek(offset)
        data = stream.read(size)
    if len(data) < size:
        raise ValueError(f"the file ends after {len(data)} of the {size} bytes at {offset}")
    return data


def decode(
    data: bytes,
    size: int,
    generator: np.random.Generator | None = None,
) -> np.ndarray:  # (3, size, size), uint8
    """Return a square RGB crop of a JPEG, resized: the centre or, given a generator, a random crop, mirrored or not."""
    pillow = require.library("PIL.Image", "JPEG images need Pillow", "'s3d_fast[images]'")
    image = open_image(io.BytesIO(data), PHOTOGRAPHS)
    width, height = image.size
    mirrored = False
    if generator is None:
        box = centre_crop(width, height, size)
    else:
        # Draw all numbers at once: how many are used depends on the image, how many are drawn must not.
        *draws, last = generator.random(4 * CROP_TRIES + 1)
        box = random_resized_crop(width, height, np.reshape(draws, (CROP_TRIES, 4)))
        mirrored = last < 0.5
    left, top, right, bottom = box
    # The decoder can shrink by 2, 4 or 8. Rounding up keeps at least `size` pixels of the crop.
    image.draft(None, (-int(-width * size // (right - left)), -int(-height * size // (bottom - top))))
    if image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("RGB")
    across, down = image.width / width, image.height / height
    scaled = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
    image = image.resize((size, size), pillow.Resampling.BILINEAR, box=scaled)
    pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    return (pixels[:, ::-1] if mirrored else pixels).transpose(2, 0, 1)
