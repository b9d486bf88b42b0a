"""Rows that zeros follow in memory, up to a multiple of 16 entries: kernels for GPUs then load whole vectors."""

from __future__ import annotations

from torch import Tensor

MULTIPLE = 16
# Attributes of tensors: a padded copy has its width before the zeros, and a view of it has the copy.
_WIDTH, _WHOLE = "_s3d_fast_width", "_s3d_fast_whole"


def padded_size(size: int) -> int:
    """Return the least multiple of 16 that is not smaller."""
    return -(-size // MULTIPLE) * MULTIPLE


def with_padding(X: Tensor) -> Tensor:
    """Return a copy of X with its shape; behind every row, its last axis, memory holds zeros up to a multiple of 16."""
    *leading, width = X.shape
    # New memory has the strides of its shape. `contiguous` keeps any stride of an axis with one entry.
    whole = X.new_empty(*leading, padded_size(width))
    whole[..., :width] = X
    whole[..., width:] = 0
    return without_padding(whole, width)


def without_padding(whole: Tensor, width: int) -> Tensor:
    """Return the first columns of rows whose other columns are zeros, as `with_padding` does."""
    setattr(whole, _WIDTH, width)
    view = whole[..., :width]
    setattr(view, _WHOLE, whole)
    return view


def same_rows(view: Tensor, X: Tensor) -> Tensor:
    """Return a view of rows of X, known as padded if X is: in inference mode, views forget what they are of."""
    if getattr(X, _WHOLE, None) is not None:
        setattr(view, _WHOLE, getattr(X, _WHOLE))
    return view


def is_padded(X: Tensor) -> bool:
    """Return whether X is what `with_padding` or `without_padding` returned, or some of its rows."""
    whole = getattr(X, _WHOLE, X._base)
    width = getattr(whole, _WIDTH, None)
    if whole is None or width is None or X.stride(-1) != 1:
        return False
    # A view of other columns, or of a smaller number of them, is not followed by zeros.
    return X.storage_offset() % whole.shape[-1] + X.shape[-1] == width
