"""Random augmentation of training samples, a whole batch at a time, drawn from PyTorch's global generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Random crops to try, four random numbers each, before falling back to a centre crop.
CROP_TRIES = 10

Box = tuple[float, float, float, float]


def pad_crop_flip(
    images: Tensor,  # (N, C, H, W), any dtype, on the CPU
    padding: int = 4,
) -> Tensor:  # the same shape and dtype
    """Pad images with zeros, crop each back to its size at a random place, and mirror each with probability 1/2."""
    count, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    both = torch.stack([padded, padded.flip(-1)])
    top, left = torch.randint(0, 2 * padding + 1, (2, count)).numpy()
    mirrored = torch.randint(0, 2, (count,)).numpy()
    # A view of every possible crop. numpy copies the chosen crops row by row; PyTorch would copy number by number.
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
        high: largest factor along an axis.
        shift: largest shift along an axis.
        sigma: standard deviation of a coordinate's jitter.
        clip: largest jitter of a coordinate.
        points: keep this many points of each cloud, in random order; all by default.

    Raises:
        ValueError: points is below 1 or exceeds the points of a cloud.
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
    """Return the box (left, top, right, bottom) of a random crop.

    `scale` bounds the crop's share of the area, and `ratio` its width over height. The first row of `draws` that gives
    a box inside the image is used. If no row does, the result is the largest centred box of a permitted ratio.
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
    """Return the box that becomes the central size x size crop when the shorter side is resized to size * 256 / 224."""
    side = min(width, height) * size / round(size * 256 / 224)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
