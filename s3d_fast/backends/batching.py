"""What `torch.vmap` does with the products torch.ops.s3d_fast.*: vectors of a batch are more vectors per filter.

Where only the vectors have the batch, one call computes the whole batch. Where rows or coefficients have it, the call
is repeated for each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The place of the vectors among the arguments of each product.
VECTORS = {
    "splitting_matvec": 2,
    "splitting_matvec_grouped": 2,
    "gated_matvec": 4,
    "joint_matvec": 2,
    "depthwise_matvec_grouped": 6,
    "tied_rows_matvec": 2,
    "edgeconv_matvec": 3,
}


def register() -> None:
    """Give every product its rule."""
    for name, place in VECTORS.items():
        torch.library.register_vmap(f"s3d_fast::{name}", _rule(getattr(torch.ops.s3d_fast, name), place))


def _rule(product: Callable[..., Any], place: int) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        others = [dim for at, dim in enumerate(in_dims) if at != place]
        if any(_has_batch(dim) for dim in others):
            return _one_by_one(product, info.batch_size, in_dims, arguments)
        given = list(arguments)
        vectors, dims = given[place], in_dims[place]
        if isinstance(vectors, Tensor):
            given[place] = _as_sets(vectors, dims)
            return _as_batch(product(*given), info.batch_size, vectors.dim() - 1), 0
        given[place] = [own if dim is None else _as_sets(own, dim) for own, dim in zip(vectors, dims, strict=True)]
        results = [
            result if dim is None else _as_batch(result, info.batch_size, own.dim() - 1)
            for result, own, dim in zip(product(*given), vectors, dims, strict=True)
        ]
        return results, [None if dim is None else 0 for dim in dims]

    return rule


def _as_sets(vectors: Tensor, dim: int) -> Tensor:
    """Return a batch of vectors, (M, D) or (K, M, D) each, as one tensor of sets, (K', M, D)."""
    return vectors.movedim(dim, 0).flatten(0, -3)


def _as_batch(sets: Tensor, size: int, dim: int) -> Tensor:
    """Undo `_as_sets` for results that have `dim` dimensions each; the batch comes first."""
    return sets if dim == 2 else sets.unflatten(0, (size, sets.shape[0] // size))


def _one_by_one(
    product: Callable[..., Any], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    calls = [
        product(*(_entry(argument, dim, number) for argument, dim in zip(arguments, in_dims, strict=True)))
        for number in range(size)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    results = [torch.stack(own) for own in zip(*calls, strict=True)]
    return results, [0] * len(results)


def _entry(argument: Any, dim: Any, number: int) -> Any:
    if isinstance(dim, list | tuple):
        return [_entry(own, own_dim, number) for own, own_dim in zip(argument, dim, strict=True)]
    return argument if dim is None else argument.select(dim, number)


def _has_batch(dim: Any) -> bool:
    return any(map(_has_batch, dim)) if isinstance(dim, list | tuple) else dim is not None
