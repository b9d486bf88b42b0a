"""Block Lanczos: the largest eigenvalues of several symmetric matrices, with several vectors of each at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from s3d_fast.base import require

Name = TypeVar("Name")
# A direction that is shorter than this, relative to what it was before, lies in the space that is there already.
DEPENDENT = 1e-7


def largest_eigenpairs(
    product: Callable[[dict[Name, Tensor]], Mapping[Name, Tensor]],
    start: Mapping[Name, Tensor],  # (K, D) each
    steps: int,
) -> dict[Name, tuple[Tensor, Tensor]]:
    """Return Ritz values and vectors of symmetric matrices, the largest first: (K,) and (K, D) of each, in float64.

    They are optimal in the space of  V, A V, ..., A^(steps-1) V.  `extremal_eigenpairs` finds one pair at each end for
    thousands of matrices; this finds many pairs of a few. A matrix whose space is complete takes no further products.

    Args:
        product: returns A V for the rows V of each matrix; it may be asked for some of the matrices only.
        start: the first vectors, K rows; at most D of them are independent, and so are the results.
        steps: how many products.
    """
    require.count("steps", steps)
    basis: dict[Name, Tensor] = {}
    images: dict[Name, Tensor] = {}
    block = {name: rows.double() for name, rows in start.items()}
    for _ in range(steps):
        new = {
            name: own
            for name, rows in block.items()
            if len(own := _orthonormal(rows, basis.get(name, rows.new_zeros(0, rows.shape[1]))))
        }
        if not new:
            break
        found = product(new)
        for name, rows in new.items():
            image = found[name].to(rows)
            basis[name] = torch.cat([basis[name], rows]) if name in basis else rows
            images[name] = torch.cat([images[name], image]) if name in images else image
        block = {name: found[name].to(rows) for name, rows in new.items()}
    pairs = {}
    for name, rows in start.items():
        if name not in basis:
            pairs[name] = (rows.new_zeros(0).double(), rows.new_zeros(0, rows.shape[1]).double())
            continue
        projected = basis[name] @ images[name].mT
        values, vectors = torch.linalg.eigh((projected + projected.mT) / 2)
        kept = min(len(rows), len(values))
        pairs[name] = values.flip(0)[:kept], (vectors.mT @ basis[name]).flip(0)[:kept]
    return pairs


def _orthonormal(rows: Tensor, basis: Tensor) -> Tensor:
    """Return an orthonormal basis of what rows add to a space; both as rows."""
    lengths = rows.norm(dim=1)
    rows = rows[lengths > 0] / lengths[lengths > 0].unsqueeze(1)
    # Twice is enough: the second time removes what rounding has left.
    for _ in range(2):
        rows = rows - (rows @ basis.mT) @ basis
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    own = directions[sizes > DEPENDENT]
    own = own - (own @ basis.mT) @ basis
    return torch.linalg.qr(own.mT).Q.mT if len(own) else own
