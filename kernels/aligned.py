"""Rows as tensor cores want them: in bfloat16 planes, aligned, and loaded in whole vectors.

Rows that are not stored like that are copied first, in chunks of `scratch_bytes`. Copies that stay in the cache cost
little, but a solver makes them once: see `prepared`, and `s3d_fast.operators.prepared`. The kernels for IEEE products
take rows of any alignment as they are. No kernel takes rows that are so far apart that offsets inside a tile leave 32
bits: these are copied as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from s3d_fast.base.padding import MULTIPLE, is_padded, padded_size, same_rows, with_padding, without_padding
from s3d_fast.kernels.launch import Launch, on_device, part_size
from s3d_fast.kernels.options import TritonOptions
from s3d_fast.kernels.products import row_storage, split_launch

# The scratch memory is taken to hold at least this many rows, so that launches have something to do.
LEAST_ROWS = 1024
# No tile has more rows.
MOST_ROWS = 256
# An attribute of rows that a solver prepared: their planes.
_PLANES = "_s3d_fast_planes"


def is_near(*tensors: Tensor) -> bool:
    """Return whether 32 bits hold the offsets inside every tile of these rows, which have their last axis."""
    return all((MOST_ROWS - 1) * own.stride(-2) + (own.shape[-1] - 1) * own.stride(-1) < 2**31 for own in tensors)


def is_aligned(*tensors: Tensor) -> bool:
    """Return whether whole vectors of these rows, their last axis, can be loaded.

    Their entries are contiguous; addresses, strides and widths are multiples of 16, or zeros follow up to one.
    """
    return all(
        tensor.stride(-1) == 1
        and all(number % MULTIPLE == 0 for number in (tensor.data_ptr(), *tensor.stride()[:-1]))
        and (tensor.shape[-1] % MULTIPLE == 0 or is_padded(tensor))
        for tensor in tensors
    )


def is_whole(X: Tensor, coefficients: Sequence[Tensor], vectors: int) -> bool:
    """Return whether kernels may load all these matrices in whole vectors.

    The columns of the coefficients of a second vector per filter must begin at a multiple of 16, too.
    """
    M = coefficients[0].shape[1]
    return is_aligned(X, *coefficients) and (vectors == M or M % MULTIPLE == 0)


def aligned(form: str, C: Tensor) -> Tensor:  # (N, M)
    """Return coefficients as products of this form read them, copied if they must be."""
    return C if _is_ready(form, C) else _copied(C)


def _copied(X: Tensor) -> Tensor:
    """Return a copy of rows that can be loaded in whole vectors."""
    copy = with_padding(X)
    if not is_near(copy):
        raise ValueError(f"Triton kernels take rows of at most {2**31 // MOST_ROWS} columns, got {X.shape[-1]}")
    return copy


def _is_ready(form: str, *tensors: Tensor) -> bool:
    return is_near(*tensors) and (form == "ieee" or is_aligned(*tensors))


def ready_planes(form: str, X: Tensor) -> Tensor | None:  # (..., D) -> (planes, N, D)
    """Return rows as products of this form read them, if they are there: as they are, or planes that they carry."""
    storage = row_storage(form, X.dtype)
    if form == "ieee":
        rows = X.flatten(0, -2)
        return same_rows(rows[None], X) if is_near(rows) else None
    if storage == (1, X.dtype):
        view = _aligned_view(X)
        return None if view is None else same_rows(view[None], X)
    known = getattr(X, _PLANES, None)
    return known if known is not None and len(known) == storage[0] else None


def _aligned_view(X: Tensor) -> Tensor | None:
    """Return all rows as one matrix, if no copy is needed and whole vectors of it can be loaded."""
    try:
        rows = X.view(-1, X.shape[-1])
    except RuntimeError:
        return None
    if len(rows) == 1:
        # PyTorch gives a view any stride along an axis of one entry.
        rows = rows.as_strided(rows.shape, (padded_size(X.shape[-1]), rows.stride(1)))
    rows = same_rows(rows, X)
    return rows if is_near(rows) and is_aligned(rows) else None


def in_planes(form: str, X: Tensor) -> Tensor:  # (..., D) -> (planes, N, D)
    """Return rows as products of this form read them, copied if they must be."""
    known = ready_planes(form, X)
    if known is not None:
        return known
    rows = X.flatten(0, -2)
    if row_storage(form, X.dtype) == (1, X.dtype):
        padded = _copied(rows)
        return same_rows(padded[None], padded)
    launch, planes = split_rows(form, rows)
    with on_device(X):
        launch.run()
    return planes


def copied_at_once(form: str, X: Tensor, options: TritonOptions) -> int:  # (samples, ..., D)
    """Return how many samples of X may be copied for products of this form at once; all if none must be copied."""
    if ready_planes(form, X) is not None or X.numel() == 0:
        return len(X)
    return part_size(len(X), max(1, options.scratch_bytes // _copy_bytes(row_storage(form, X.dtype), X[:1])))


def split_rows(form: str, X: Tensor) -> tuple[Launch, Tensor]:  # (N, D)
    """Return the launch that writes the planes of rows, and the planes (planes, N, D), which zeros follow."""
    storage, columns = row_storage(form, X.dtype), range(X.shape[1])
    # Distances of columns are 32-bit numbers in the kernel.
    rows = X if X.stride(1) == 1 else X.contiguous()
    launch, planes = split_launch(rows, form, storage, False, columns, name="split, rows")
    return launch, without_padding(planes, X.shape[1])


def prepared_bytes(form: str, X: Tensor, is_multiplied: bool) -> int:
    """Return the memory that `prepared` takes; float64 rows stay as they are."""
    if X.dtype == torch.float64:
        return 0
    count, dtype = row_storage(form, X.dtype) if is_multiplied else (1, X.dtype)
    is_stored = (count, dtype) == (1, X.dtype)
    is_ready = _aligned_view(X) is not None if is_stored else ready_planes(form, X) is not None
    return 0 if is_ready else _copy_bytes((count, dtype), X)


def _copy_bytes(storage: tuple[int, torch.dtype], X: Tensor) -> int:
    count, dtype = storage
    return count * dtype.itemsize * X.shape[:-1].numel() * padded_size(X.shape[-1])


def prepared(form: str, X: Tensor, is_multiplied: bool) -> Tensor:
    """Return X with what products of this form would else make every time: planes of rows that they multiply, zeros."""
    if prepared_bytes(form, X, is_multiplied) == 0:
        return X
    if not is_multiplied or row_storage(form, X.dtype) == (1, X.dtype):
        return with_padding(X)
    # The planes live as long as this tensor, which shares the memory of X.
    own = X.view_as(X)
    setattr(own, _PLANES, in_planes(form, X))
    return own


def by_aligned_rows(
    form: str,
    X: Tensor,  # (N, D)
    coefficients: Sequence[Tensor],  # (N, M) each
    V: Tensor,  # (F, ...), F = K M
    options: TritonOptions,
    product: Callable[[Tensor, Sequence[Tensor], Tensor], Tensor],
) -> Tensor:
    """Return product(X in planes, coefficients, V), a sum over rows with the shape of V, all rows aligned.

    Several vectors per filter share its column of the coefficients. The number of columns is then made a multiple of
    16, so that the columns of the second vectors begin at one, too.
    """
    F, M, known = len(V), coefficients[0].shape[1], ready_planes(form, X)
    if known is not None and _is_ready(form, *coefficients) and (form == "ieee" or is_whole(known, coefficients, F)):
        return product(known, coefficients, V)
    extra = 0 if F == M or form == "ieee" else padded_size(M) - M
    if extra:
        V = pad(V.view(-1, M, V.shape[1]), (0, 0, 0, extra)).flatten(0, 1)
    count, dtype = row_storage(form, X.dtype)
    sizes = [count * dtype.itemsize * padded_size(X.shape[1])]
    sizes += [own.itemsize * padded_size(own.shape[1]) for own in coefficients]
    rows = part_size(len(X), max(LEAST_ROWS, options.scratch_bytes // sum(sizes)))
    parts = X.split(rows) if known is None else [same_rows(own, known) for own in known.split(rows, 1)]
    total = None
    for x, *own in zip(parts, *(C.split(rows) for C in coefficients), strict=True):
        copies = [pad(c, (0, extra)) if extra else aligned(form, c) for c in own]
        part = product(in_planes(form, x) if known is None else x, copies, V)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.view(-1, M + extra, V.shape[1])[:, :M].reshape(F, -1) if extra else total
