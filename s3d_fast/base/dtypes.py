"""The dtypes that rows are stored in, and those that arithmetic is done in."""

from __future__ import annotations

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)
COMPUTE_DTYPES = (torch.float32, torch.float64)
FLOAT_DTYPES = COMPUTE_DTYPES + HALF_DTYPES


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic on rows stored as `stored` is done in: float32 for the 16-bit ones."""
    return torch.float32 if stored in HALF_DTYPES else stored
