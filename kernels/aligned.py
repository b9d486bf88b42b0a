"""Rows as tensor cores want them: aligned, and loaded in whole vectors. Other rows are copied first, chunk by chunk.

The kernels for single multiplications (IEEE products) take rows of any alignment. On tensor cores, tiles of such rows
would cross registers and shared memory entry by entry, with two barriers each. Copies that stay in the cache cost less,
and a solver makes them once: see `s3d_fast.operators.aligned`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import pad

from s3d_fast.base.padding import MULTIPLE, is_padded, padded_size, with_padding
from s3d_fast.kernels.options import TritonOptions

# A chunk has at least this many rows, so that launches have something to do.
LEAST_ROWS = 1024


def is_aligned(*tensors: Tensor) -> bool:
    """Return whether whole vectors of these matrices can be loaded.

    Addresses and strides are multiples of 16, rows are contiguous, and so are widths, unless zeros follow.
    """
    return all(
        tensor.stride(1) == 1
        and all(number % MULTIPLE == 0 for number in (tensor.data_ptr(), tensor.stride(0)))
        and (tensor.shape[1] % MULTIPLE == 0 or is_padded(tensor))
        for tensor in tensors
    )


def is_whole(X: Tensor, coefficients: Sequence[Tensor], vectors: int) -> bool:
    """Return whether kernels may load all these matrices in whole vectors.

    The columns of the coefficients of a second vector per filter must begin at a multiple of 16, too.
    """
    M = coefficients[0].shape[1]
    return is_aligned(X, *coefficients) and (vectors == M or M % MULTIPLE == 0)


def aligned(form: str, X: Tensor) -> Tensor:  # (N, D)
    """Return X, or a copy that is aligned if products have this form."""
    return X if form == "ieee" or is_aligned(X) else with_padding(X)


def by_aligned_rows(
    form: str,
    X: Tensor,  # (N, D)
    coefficients: Sequence[Tensor],  # (N, M) each
    V: Tensor,  # (F, ...), F = K M
    options: TritonOptions,
    product: Callable[[Tensor, Sequence[Tensor], Tensor], Tensor],
) -> Tensor:
    """Return product(X, coefficients, V), a sum over rows with the shape of V, from aligned X and coefficients.

    Several vectors per filter share its column of the coefficients. The number of columns is then made a multiple of
    16, so that the columns of the second vectors begin at one, too.
    """
    F, M = len(V), coefficients[0].shape[1]
    if form == "ieee" or is_whole(X, coefficients, F):
        return product(X, coefficients, V)
    extra = 0 if F == M else padded_size(M) - M
    if extra:
        V = pad(V.view(-1, M, V.shape[1]), (0, 0, 0, extra)).flatten(0, 1)
    bytes_per_row = sum(padded_size(own.shape[1]) * own.itemsize for own in (X, *coefficients))
    rows = max(LEAST_ROWS, options.scratch_bytes // bytes_per_row)
    total = None
    for x, *own in zip(X.split(rows), *(C.split(rows) for C in coefficients), strict=True):
        copies = [pad(c, (0, extra)) if extra else aligned(form, c) for c in own]
        part = product(aligned(form, x), copies, V)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.view(-1, M + extra, V.shape[1])[:, :M].reshape(F, -1) if extra else total
