"""Random changes to training samples, for whole batches at once, drawn from PyTorch's global generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Tries at a crop that fits into the image, each from four numbers, before the crop is put into the centre.
CROP_TRIES = 10

Box = tuple[float, float, float, float]


def pad_crop_flip(
    images: Tensor,  # (N, C, H, W), any dtype, on the CPU
    padding: int = 4,
) -> Tensor:  # the same shape and dtype
    """Surround images by zeros, crop them back to their size at random, and mirror every second one, at random."""
    count, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    both = torch.stack([padded, padded.flip(-1)])
    top, left = torch.randint(0, 2 * padding + 1, (2, count)).numpy()
    mirrored = torch.randint(0, 2, (count,)).numpy()
    # A view of all crops there are; numpy copies the chosen ones row by row, PyTorch would do so number by number.
    crops = np.lib.stride_tricks.sliding_window_view(both.numpy(), (height, width), axis=(-2, -1))
    return torch.from_numpy(crops[mirrored, np.arange(count), :, top, left])


def scale_and_jitter(
    clouds: Tensor,  # (N, P, 3)
    low: float = 2 / 3,
    high: float = 3 / 2,
    shift: float = 0.2,
    sigma: float = 0.01,
    clip: float = 0.02,
    points: int | None = None,
) -> Tensor:  # (N, points or P, 3)
    """Scale and shift every cloud along every axis, and move every point a little, as DGCNN's training does.

    Args:
        clouds: coordinates.
        low: smallest factor along an axis.
        high: largest one.
        shift: largest shift along an axis.
        sigma: standard deviation of a coordinate's jitter.
        clip: largest jitter of a coordinate.
        points: keep so many points of each cloud, in random order.

    Raises:
        ValueError: there are fewer points than asked for.
    """
    count, available, _ = clouds.shape
    if points is not None:
        if not 1 <= points <= available:
            raise ValueError(f"points must be from 1 to {available}, the points of a cloud; got {points}")
        chosen = torch.rand(count, available).topk(points, dim=1).indices
        clouds = clouds.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 3))
    factors = torch.empty(count, 1, 3).uniform_(low, high)
    shifts = torch.empty(count, 1, 3).uniform_(-shift, shift)
    jitter = torch.randn(clouds.shape).mul_(sigma).clamp_(-clip, clip)
    return jitter.add_(clouds * factors).add_(shifts)


def random_resized_crop(
    width: int,
    height: int,
    draws: Sequence[Sequence[float]] | np.ndarray,  # (tries, 4), uniform in [0, 1)
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Return the box (left, top, right, bottom) of a random crop: area by `scale`, width over height by `ratio`.

    The first row of `draws` that gives a box inside the image is used; if there is none, the largest box of a permitted
    ratio in the centre is.
    """
    smallest, largest = math.log(ratio[0]), math.log(ratio[1])
    for u_area, u_ratio, u_left, u_top in draws:
        area = width * height * (scale[0] + u_area * (scale[1] - scale[0]))
        shape = math.exp(smallest + u_ratio * (largest - smallest))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(u_left * (width - w + 1)), int(u_top * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_crop(width: int, height: int, size: int) -> Box:
    """Return the box that ends up as the centre once the shorter side is resized to size * 256 / 224."""
    side = min(width, height) * size / round(size * 256 / 224)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
