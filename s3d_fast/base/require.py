"""Argument checks at the public boundary: each error names the argument, what was wanted and what was given."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from s3d_fast.base.dtypes import FLOAT_DTYPES


def tensor(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a floating-point tensor of a supported dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16, got {value.dtype}")


def shape(name: str, tensor: Tensor, wanted: Sequence[int | str]) -> None:
    """Raise ValueError unless `tensor` has the wanted shape; a string names a dimension of any size."""
    matches = tensor.dim() == len(wanted) and all(
        isinstance(want, str) or got == want for got, want in zip(tensor.shape, wanted, strict=True)
    )
    if not matches:
        shape = ", ".join(str(want) for want in wanted)
        raise ValueError(f"{name} must have shape ({shape}), got {tuple(tensor.shape)}")


def agreement(name: str, tensor: Tensor, like_name: str, like: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise unless `tensor` has the dtype of `like` (or `dtype`, if given) and is on its device.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the devices differ.
    """
    wanted = like.dtype if dtype is None else dtype
    if tensor.dtype != wanted:
        raise TypeError(f"{name} must be {wanted} to go with {like_name} ({like.dtype}), got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {tensor.device}")


def finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError if `tensor` holds NaN or Inf.

    A finite sum proves that every entry is finite, and needs no extra memory. If the sum is not finite, it may have
    overflowed: only then is every entry checked. Inside `torch.compile` nothing is checked: reading a number would
    divide the graph.
    """
    if torch.compiler.is_compiling() or tensor.numel() == 0 or bool(torch.isfinite(tensor.sum())):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ValueError(f"{name} must be finite, got {bad} NaN or Inf entries of {tensor.numel()}")


def not_empty(name: str, tensor: Tensor) -> None:
    """Raise ValueError if `tensor` has no entries."""
    if tensor.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")


def weight_bound(c: float) -> None:
    """Raise ValueError unless c, the bound on the sum of absolute weights, is a finite number of at least 1."""
    if not (_is_number(c) and math.isfinite(c) and c >= 1):
        raise ValueError(f"c must be a finite number >= 1, got {c!r}")


def copy_count(m: int) -> None:
    """Raise ValueError unless m, the number of copies, is 2, 3 or 4."""
    if isinstance(m, bool) or m not in (2, 3, 4):
        raise ValueError(f"m must be 2, 3 or 4, got {m!r}")


def positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a positive finite number."""
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a number between 0 and 1, both excluded."""
    if not (_is_number(value) and 0 < value < 1):
        raise ValueError(f"{name} must be a number in (0, 1), got {value!r}")


def number(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number."""
    if not (_is_number(value) and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def not_negative(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")


def below_one(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1)."""
    not_negative(name, value)
    if value >= 1:
        raise ValueError(f"{name} must be below 1, got {value!r}")


def share(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in (0, 1]."""
    positive(name, value)
    if value > 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value!r}")


def pair(name: str, value: object, at_least: int) -> tuple[int, int]:
    """Return a pair of integers, given as a pair or as one integer for both; raise ValueError otherwise."""
    pair = [value, value] if isinstance(value, Integral) else value
    if isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(n, Integral) for n in pair):
        first, second = int(pair[0]), int(pair[1])
        if min(first, second) >= at_least:
            return first, second
    raise ValueError(f"{name} must be two integers >= {at_least}, got {value!r}")


def count(name: str, value: int, at_least: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `at_least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be an integer >= {at_least}, got {value!r}")


def choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def library(module: str, what: str, install: str) -> Any:
    """Import and return an optional library.

    Raises:
        RuntimeError: it is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"{what}, which is not installed: pip install {install}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
