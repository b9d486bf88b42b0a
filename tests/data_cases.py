"""Small images and batches that tests of data share."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from s3d_fast import data
from s3d_fast.data import Entry

WORKERS = min(2, len(os.sched_getaffinity(0)))
# Python 3.12 and later warn about every fork after another test has started threads.
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def as_is(inputs: Tensor) -> Tensor:
    return inputs.float()


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def smooth_image(width: int, height: int, number: int = 0) -> Image.Image:
    """Return an image without detail, so that all ways to resize it agree; red grows to the right, green downwards."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, np.full_like(down, 20 * number)], -1).astype(np.uint8))


def jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95)
    return stream.getvalue()


def write_jpegs(folder: Path, count: int) -> list[Entry]:
    entries = []
    for number in range(count):
        file = folder / f"{number}.jpg"
        file.write_bytes(jpeg(smooth_image(60 + number, 50, number)))
        entries.append(Entry(str(file), 0, -1, number % 3))
    return entries


def epoch(batches: data.Batches) -> tuple[Tensor, Tensor]:
    parts = list(batches)
    assert len(parts) == len(batches)
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def samples_of(x: Tensor) -> set[bytes]:
    return {sample.numpy().tobytes() for sample in x}
