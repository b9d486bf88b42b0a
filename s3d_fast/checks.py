"""Checks at the public boundary: each raises an error that names the argument, what it got and what it wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)
COMPUTE_DTYPES = (torch.float32, torch.float64)
FLOAT_DTYPES = COMPUTE_DTYPES + HALF_DTYPES


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic on rows stored as `stored` is done in: float32 for the 16-bit ones."""
    return torch.float32 if stored in HALF_DTYPES else stored


def is_tensor(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a floating-point tensor of a supported dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16, got {value.dtype}")


def has_shape(name: str, tensor: Tensor, wanted: Sequence[int | str]) -> None:
    """Raise ValueError unless `tensor` has the wanted shape; a string stands for any size and is its name."""
    matches = tensor.dim() == len(wanted) and all(
        isinstance(want, str) or got == want for got, want in zip(tensor.shape, wanted, strict=True)
    )
    if not matches:
        shape = ", ".join(str(want) for want in wanted)
        raise ValueError(f"{name} must have shape ({shape}), got {tuple(tensor.shape)}")


def agrees(name: str, tensor: Tensor, like_name: str, like: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise unless `tensor` has the device of `like`, and its dtype (or `dtype` where that is given)."""
    wanted = like.dtype if dtype is None else dtype
    if tensor.dtype != wanted:
        raise TypeError(f"{name} must be {wanted} to go with {like_name} ({like.dtype}), got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {tensor.device}")


def is_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError if `tensor` holds NaN or Inf.

    A finite sum proves that every entry is finite without writing anything; only a sum that is not finite,
    which overflow can also cause, is worth looking at entry by entry.
    """
    if tensor.numel() == 0 or bool(torch.isfinite(tensor.sum())):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ValueError(f"{name} must be finite, got {bad} NaN or Inf entries of {tensor.numel()}")


def is_not_empty(name: str, tensor: Tensor) -> None:
    """Raise ValueError if `tensor` has no entries."""
    if tensor.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")


def is_weight_bound(c: float) -> None:
    """Raise ValueError unless c, the bound on the sum of absolute weights, is a finite number of at least 1."""
    if not (_is_number(c) and math.isfinite(c) and c >= 1):
        raise ValueError(f"c must be a finite number >= 1, got {c!r}")


def is_copy_count(m: int) -> None:
    """Raise ValueError unless m, the number of copies, is 2, 3 or 4."""
    if isinstance(m, bool) or m not in (2, 3, 4):
        raise ValueError(f"m must be 2, 3 or 4, got {m!r}")


def is_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a positive finite number."""
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def is_number(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number."""
    if not (_is_number(value) and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def is_pair(name: str, value: object, at_least: int) -> tuple[int, int]:
    """Return a pair of integers, given as such or as one integer for both; raise ValueError if it is not that."""
    pair = [value, value] if isinstance(value, Integral) else value
    if isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(n, Integral) for n in pair):
        first, second = int(pair[0]), int(pair[1])
        if min(first, second) >= at_least:
            return first, second
    raise ValueError(f"{name} must be two integers >= {at_least}, got {value!r}")


def is_count(name: str, value: int, at_least: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `at_least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be an integer >= {at_least}, got {value!r}")


def is_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
