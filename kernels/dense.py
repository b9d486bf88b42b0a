"""Dense S by batched products of PyTorch: a few launches for a layer, where one product per filter would be many."""

from __future__ import annotations

import torch
from torch import Tensor

from s3d_fast.kernels.options import current
from s3d_fast.maths.reference import with_ones


def splitting_matrices(*, X: Tensor, C: Tensor, bias: bool, dtype: torch.dtype) -> Tensor:
    """Return S (M, D, D), as `s3d_fast.maths.reference.splitting_matrices` defines it.

    X^T diag(c) is stored for as many filters and rows at once as `scratch_bytes` has room for.
    """
    rows = (with_ones(X) if bias else X).to(dtype)
    (N, D), M = rows.shape, C.shape[1]
    S = rows.new_zeros(M, D, D)
    at_once = max(1, current().scratch_bytes // (max(1, D) * rows.itemsize))
    chunk = min(max(1, N), at_once)
    filters = max(1, at_once // chunk)
    for begin in range(0, N, chunk):
        part, coefficients = rows[begin : begin + chunk], C[begin : begin + chunk].to(dtype)
        for first in range(0, M, filters):
            own = slice(first, first + filters)
            left = part.mT * coefficients[:, own].mT[:, None, :]
            S[own].baddbmm_(left, part.expand(len(left), *part.shape))
    return S
