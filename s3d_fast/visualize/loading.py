"""Images and VGG-19 weights from files."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from safetensors import safe_open
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.data.images import IMAGENET_NORMALISE, Normalise
from s3d_fast.models.vgg import vgg19_of


def load_image(path: str | os.PathLike[str], size: int = 224, normalise: Normalise = IMAGENET_NORMALISE) -> Tensor:
    """Return an image as networks read it, (1, 3, size, size).

    Its shorter side is scaled to `size`, the middle of the longer one is kept, and colours are normalised.

    Args:
        path: of any image that Pillow reads.
        size: in pixels.
        normalise: as in the training of the network; by default as ImageNet's are.

    Raises:
        ValueError: the file is not an image, or size < 1.
        RuntimeError: Pillow is not installed; says how to get it.
        OSError: the file cannot be read.
    """
    require.count("size", size)
    pillow = require.library("PIL.Image", "images need Pillow", "'s3d_fast[images]'")
    image_ops = require.library("PIL.ImageOps", "images need Pillow", "'s3d_fast[images]'")
    with open(path, "rb") as file:
        try:
            # A camera held upright notes that in the file, and does not turn the pixels.
            upright = image_ops.exif_transpose(pillow.open(file)).convert("RGB")
        except Exception as error:
            raise ValueError(f"path: {os.fspath(path)} cannot be read as an image: {error}") from error
    square = image_ops.fit(upright, (size, size), pillow.Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, 3)
    return normalise(pixels.permute(2, 0, 1).unsqueeze(0))


def load_vgg19(path: str | os.PathLike[str]) -> nn.Module:
    """Return, in eval mode and float32, the VGG19 whose weights a file holds.

    The names must be those of torchvision's vgg19 or vgg19_bn, which are also those of `models.VGG19`: from
    features.0.weight to classifier.6.bias. Widths, classes and whether there are BatchNorms are read off the tensors,
    so that a grown network will do; the activation is taken to be ReLU.

    Args:
        path: of a safetensors file, or of one that torch.save made of a state dict. No code in it is ever run.

    Raises:
        ValueError: the file is neither, or holds another network.
        OSError: the file cannot be read.
    """
    tensors = _read_tensors(path)
    try:
        return vgg19_of(tensors).eval()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"path: {os.fspath(path)} does not hold the weights of a VGG19: {error}") from error


def _read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of one that torch.save made of a dict of tensors."""
    with open(path, "rb") as file:
        # The header of a safetensors file is JSON, behind eight bytes with its length.
        is_safetensors = file.read(9)[8:] == b"{"
    try:
        if is_safetensors:
            with safe_open(os.fspath(path), framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"path: {os.fspath(path)} is not a file of weights that is safe to read: {error}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"path: {os.fspath(path)} must hold a state dict, tensors by name, and nothing else")
    return {str(name): tensor for name, tensor in tensors.items()}
