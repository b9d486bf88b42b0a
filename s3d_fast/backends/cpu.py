"""The CPU backend: the kernels of the C++ extension."""

from __future__ import annotations

import torch
from torch import Tensor

from s3d_fast.backends import cpu_options
from s3d_fast.backends.dispatched import DispatchedBackend, call
from s3d_fast.maths.reference import ConvGeometry, PoolTies

# Maxima over more positions than this do not fit into a tile of rows.
MOST_TIED_ROWS = 96


class CpuBackend(DispatchedBackend):
    """C++ with AVX-512, AVX2 or portable loops, chosen at run time."""

    name = "cpu"
    uses_symmetry = True

    def rounds(self) -> bool:
        # The compiler cannot trace how options are kept.
        return not torch.compiler.is_compiling() and cpu_options.current().precision == "medium"

    def tied_matvec(
        self, *, X: Tensor, C: Tensor, V: Tensor, ties: PoolTies, geometry: ConvGeometry, bias: bool
    ) -> Tensor:
        if not is_on_rows(X, geometry):
            return super().tied_matvec(X=X, C=C, V=V, ties=ties, geometry=geometry, bias=bias)
        rows, coefficients = (maps.permute(0, 2, 3, 1).flatten(0, 2) for maps in (X, C))
        return call("tied_rows_matvec", rows, coefficients, V, *ties, bias, self.rounds())


CPU = CpuBackend()


def is_on_rows(X: Tensor, geometry: ConvGeometry) -> bool:
    """Return whether the maps of a 1 x 1 convolution are rows in memory, as those of sampled windows are."""
    is_pointwise = geometry == ((1, 1), (1, 1), (0, 0), (1, 1))
    is_small = X.shape[2] * X.shape[3] <= MOST_TIED_ROWS
    return is_pointwise and is_small and X.permute(0, 2, 3, 1).is_contiguous()
