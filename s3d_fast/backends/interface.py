"""The operations that every backend provides.

Arguments are checked before they get here: by `operations`, or when an operator is built. A backend checks them again
only where a bad value would make it access memory out of bounds. An operation takes at most one tensor by position: the
others go by name, so that mypy sees a call that confuses two of them. Shapes: N rows, D parameters per filter, M
filters, K vectors per filter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.maths.activations import Activation
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import ConvGeometry, DepthwiseStage, EdgeTies, KrylovState, PoolTies, Widening


class Backend(ABC):
    """One way to carry out the operations; `maths.reference` defines each of them."""

    name: str
    # Whether `splitting_matrices` computes only one triangle: forming S then costs D / 4 products instead of D / 2.
    uses_symmetry: bool = False
    # Whether `edgeconv_matvec` needs `incoming`, which callers should then make once for many products.
    uses_incoming: bool = False

    @abstractmethod
    def why_not_dtype(self, dtype: torch.dtype) -> str:
        """Return why the backend cannot compute in this dtype; empty if it can. Rows may always be 16-bit."""

    @abstractmethod
    def why_not_activation(self, activation: Activation) -> str:
        """Return why `curvature_coefficients` cannot take this activation; empty if it can."""

    def prepared_bytes(self, X: Tensor, is_multiplied: bool) -> int:
        """Return the memory that `prepared` takes; 0 if products read X as it is."""
        return 0

    def prepared(self, X: Tensor, is_multiplied: bool) -> Tensor:
        """Return X with what products would else copy every time; X are rows that they multiply, or coefficients."""
        return X

    @abstractmethod
    def splitting_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
        """Return S_j v_j for all filters of one layer."""

    @abstractmethod
    def splitting_matvec_grouped(
        self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Sequence[Tensor], bias: Sequence[bool]
    ) -> list[Tensor]:
        """Return S_j v_j for all filters of many layers."""

    @abstractmethod
    def gated_matvec(self, *, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
        """Return S_j v_j for all gated units of one layer; c22 = None is zero."""

    @abstractmethod
    def depthwise_matvec(
        self,
        *,
        X: Tensor,
        C: Sequence[Tensor],
        d: Sequence[Tensor],
        weight: Sequence[Tensor],
        stages: Sequence[DepthwiseStage],
        V: Tensor,
        bias: bool,
    ) -> Tensor:
        """Return S_j v_j for all pointwise filters of a layer that depthwise stages follow."""

    @abstractmethod
    def depthwise_matvec_grouped(
        self,
        *,
        X: Sequence[Tensor],
        C: Sequence[Sequence[Tensor]],
        d: Sequence[Sequence[Tensor]],
        weight: Sequence[Sequence[Tensor]],
        stages: Sequence[Sequence[DepthwiseStage]],
        V: Sequence[Tensor],
        bias: Sequence[bool],
    ) -> list[Tensor]:
        """Return S_j v_j for all filters of many such layers."""

    @abstractmethod
    def depthwise_row_norms(self, *, X: Tensor, d: Tensor, weight: Tensor, stage: DepthwiseStage, bias: bool) -> Tensor:
        """Return |J|^2 for the activation behind the first depthwise stage, in the dtype of the computation."""

    @abstractmethod
    def splitting_matrices(self, *, X: Tensor, C: Tensor, bias: bool) -> Tensor:
        """Return the matrices S_j of one layer, in the dtype of the computation."""

    @abstractmethod
    def add_splitting_matrices(self, *, S: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
        """Add `weight` times the matrices of one layer to S."""

    @abstractmethod
    def conv_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, geometry: ConvGeometry, bias: bool) -> Tensor:
        """Return S_j v_j for all filters of a convolution."""

    @abstractmethod
    def edgeconv_matvec(
        self,
        *,
        X: Tensor,
        winner: Tensor,
        C: Tensor,
        V: Tensor,
        bias: bool,
        incoming: Incoming | None,
        ties: EdgeTies | None,
    ) -> Tensor:
        """Return S_j v_j for all filters of an EdgeConv layer; `incoming` is `incoming_edges(winner)`, if known."""

    @abstractmethod
    def tied_matvec(
        self, *, X: Tensor, C: Tensor, V: Tensor, ties: PoolTies, geometry: ConvGeometry, bias: bool
    ) -> Tensor:
        """Return S_j v_j for all filters of a convolution with maxima over positions behind it."""

    @abstractmethod
    def curvature_coefficients(
        self,
        *,
        g: Tensor,
        z: Tensor,
        activation: Activation,
        scale: Tensor | None,
        axis: int,
        inplace: bool,
        row_norm: Tensor | None = None,
        bandwidth: Tensor | None = None,
    ) -> Tensor:
        """Return C = g act''(z) s^2; with `inplace`, written over g.

        With `row_norm` and `bandwidth`, kinks have the sharpness 1 / (bandwidth * row_norm).
        """

    @abstractmethod
    def activation_slopes(self, *, z: Tensor, activation: Activation, scale: Tensor | None, axis: int) -> Tensor:
        """Return act'(z) s."""

    @abstractmethod
    def grow_weights(self, widenings: Sequence[Widening]) -> list[Tensor]:
        """Return every tensor after its widening.

        Raises:
            IndexError, RuntimeError: an index is out of range.
        """

    @abstractmethod
    def krylov_extend(self, state: KrylovState, product: Tensor, step: int) -> None:
        """Take one Lanczos step in every space of `state`; `product` is S q."""

    @abstractmethod
    def krylov_extend_grouped(
        self, *, states: Sequence[KrylovState], products: Sequence[Tensor], step: int, taken: Tensor
    ) -> None:
        """Take the same step for many layers; `taken`, int64 on the device, is `step` and becomes step + 1.

        Where the host need not know the step, nothing but the contents of tensors differs from step to step.
        """

    @abstractmethod
    def joint_matvec(self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Tensor, bias: Sequence[bool]) -> Tensor:
        """Return S_j v_j for channels that several layers write."""

    @abstractmethod
    def top_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the largest and the second largest value of every column."""

    @abstractmethod
    def gather_patches(
        self, *, maps: Tensor, places: Tensor, kernel: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        """Return patches of maps as rows."""

    @abstractmethod
    def tridiagonal_extremes(self, *, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return the extreme eigenpairs of symmetric tridiagonal matrices."""

    @abstractmethod
    def certified_widths(
        self, *, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor
    ) -> Tensor:
        """Return how far beyond the extreme eigenvalues of T those of S can lie."""

    @abstractmethod
    def symmetric_extremes(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """Return the extreme eigenpairs of symmetric matrices."""
