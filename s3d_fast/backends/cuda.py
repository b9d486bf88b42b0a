"""The Triton backend on CUDA tensors, through the operators: what PyTorch traces, differentiates and counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.dispatched import DispatchedBackend
from s3d_fast.backends.interface import Backend
from s3d_fast.kernels import options
from s3d_fast.maths.activations import Activation
from s3d_fast.maths.reference import KrylovState


class CudaBackend(DispatchedBackend):
    """The operators of `implementations`, which call `TritonBackend`.

    Nothing traces the steps of a solver: they call the kernels directly.
    """

    name = "triton"
    uses_incoming = True

    def rounds(self) -> bool:
        # A compiled graph uses the options in force when it runs.
        return not torch.compiler.is_compiling() and options.current().arithmetic == "medium"

    def why_not_dtype(self, dtype: torch.dtype) -> str:
        # The kernels support more than the operators promise.
        return super().why_not_dtype(dtype) if torch.compiler.is_compiling() else ""

    def why_not_activation(self, activation: Activation) -> str:
        return options.why_not_activation(activation)

    def krylov_extend(self, state: KrylovState, product: Tensor, step: int) -> None:
        _kernels().krylov_extend(state, product, step)

    def krylov_extend_grouped(
        self, *, states: Sequence[KrylovState], products: Sequence[Tensor], step: int, taken: Tensor
    ) -> None:
        _kernels().krylov_extend_grouped(states=states, products=products, step=step, taken=taken)

    def tridiagonal_extremes(self, *, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return _kernels().tridiagonal_extremes(alpha=alpha, beta=beta, length=length)

    def certified_widths(
        self, *, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor
    ) -> Tensor:
        return _kernels().certified_widths(alpha=alpha, beta=beta, length=length, values=values, growth=growth)


CUDA = CudaBackend()


def _kernels() -> Backend:
    # Triton takes long to import, and many machines do not have it.
    from s3d_fast.backends.triton import TRITON

    return TRITON
