"""The dtypes for storing rows and for arithmetic."""

from __future__ import annotations

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)
COMPUTE_DTYPES = (torch.float32, torch.float64)
FLOAT_DTYPES = COMPUTE_DTYPES + HALF_DTYPES
# Of the winners and runners-up of EdgeConv.
INDEX_DTYPES = (torch.int32, torch.int64)


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype for arithmetic on rows stored as `stored`: float32 for 16-bit dtypes, else `stored`."""
    return torch.float32 if stored in HALF_DTYPES else stored
