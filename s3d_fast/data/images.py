"""Images between files and networks: decoding, and normalisation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

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
        # Two passes in place over what was just written are faster than one addcmul, which broadcasts badly.
        return images.to(torch.float32).mul_(factors[:, None, None]).add_(offsets[:, None, None])


def normalise(mean: Sequence[float], std: Sequence[float]) -> Normalise:
    """Return the function that takes bytes 0..255 to numbers of mean 0 and deviation 1, by channel.

    Args:
        mean: of each channel, on the scale 0..1.
        std: standard deviation of each channel, on the same scale.

    Raises:
        ValueError: the two differ in length, or a deviation is not positive.
    """
    if len(mean) != len(std) or not std or min(std) <= 0:
        raise ValueError(f"mean and std must be equally many numbers, std > 0; got {tuple(mean)} and {tuple(std)}")
    return Normalise(tuple(mean), tuple(std))


IMAGENET_NORMALISE = normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def read_bytes(file: str, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset` on; all of the file if `size` is negative.

    Raises:
        OSError: the file cannot be read.
        ValueError: it ends before.
    """
    with open(file, "rb") as stream:
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
    """Return a square RGB crop of a JPEG, resized: the centre, or with a generator a random one, mirrored or not."""
    pillow = require.library("PIL.Image", "JPEG images need Pillow", "'s3d_fast[images]'")
    image = pillow.open(io.BytesIO(data))
    width, height = image.size
    mirrored = False
    if generator is None:
        box = centre_crop(width, height, size)
    else:
        # All numbers at once: how many of them are used depends on the image, what is drawn does not.
        *draws, last = generator.random(4 * CROP_TRIES + 1)
        box = random_resized_crop(width, height, np.reshape(draws, (CROP_TRIES, 4)))
        mirrored = last < 0.5
    left, top, right, bottom = box
    # The decoder drops detail (by 2, 4 or 8) that the crop does not need: ceilings, so that it keeps `size` pixels.
    image.draft(None, (-int(-width * size // (right - left)), -int(-height * size // (bottom - top))))
    if image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("RGB")
    across, down = image.width / width, image.height / height
    scaled = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
    image = image.resize((size, size), pillow.Resampling.BILINEAR, box=scaled)
    pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    return (pixels[:, ::-1] if mirrored else pixels).transpose(2, 0, 1)
