"""Images and VGG-19 weights from files."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.base.tensor_files import is_pickled, read_pickled, read_safetensors
from s3d_fast.data.images import IMAGENET_NORMALISE, Normalise, open_image
from s3d_fast.models.vgg import vgg19_of

PICTURES = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM")


def load_image(path: str | os.PathLike[str], size: int = 224, normalise: Normalise = IMAGENET_NORMALISE) -> Tensor:
    """Return an image as networks read it, (1, 3, size, size).

    The shorter side is scaled to `size`, the middle of the longer side is kept, and the colours are normalised.

    Args:
        path: a JPEG, PNG, WebP, GIF, BMP or PPM; the content decides, not the name.
        size: height and width in pixels.
        normalise: the normalisation that the network was trained with; ImageNet's by default.

    Raises:
        ValueError: the file is not an image, or size < 1.
        RuntimeError: Pillow is not installed; the message says how to install it.
        OSError: the file cannot be read.
    """
    require.count("size", size)
    pillow = require.library("PIL.Image", "images need Pillow", "'s3d_fast[images]'")
    image_ops = require.library("PIL.ImageOps", "images need Pillow", "'s3d_fast[images]'")
    with open(path, "rb") as file:
        try:
            # Cameras record their orientation in the file instead of rotating the pixels.
            upright = image_ops.exif_transpose(open_image(file, PICTURES)).convert("RGB")
        except Exception as error:
            raise ValueError(f"path: {os.fspath(path)} cannot be read as an image: {error}") from error
    square = image_ops.fit(upright, (size, size), pillow.Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, 3)
    return normalise(pixels.permute(2, 0, 1).unsqueeze(0))


def load_vgg19(path: str | os.PathLike[str]) -> nn.Module:
    """Return the VGG19 whose weights a file holds, in eval mode and float32.

    The tensors must have the names of torchvision's vgg19 or vgg19_bn, from features.0.weight to classifier.6.bias;
    `models.VGG19` uses the same names. Widths, classes and BatchNorms are read off the tensors, so grown networks load
    too. The activation is assumed to be ReLU.

    Args:
        path: a safetensors file, or a state dict saved by torch.save. No code in it is ever run.

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
    """Return the tensors of a safetensors file, or of a dict of tensors saved by torch.save."""
    try:
        tensors = read_pickled(path) if is_pickled(path) else read_safetensors(path)[0]
    except ValueError as error:
        raise ValueError(f"path: {os.fspath(path)} is not a file of weights that is safe to read: {error}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"path: {os.fspath(path)} must hold a state dict, tensors by name, and nothing else")
    return {str(name): tensor for name, tensor in tensors.items()}
