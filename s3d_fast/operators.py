"""Splitting operators: the splitting matrices of all filters of a layer, known by their products with vectors."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from s3d_fast import checks, ops
from s3d_fast.incoming import Incoming, incoming_edges


class Source(ABC):
    """Where operators that hold no data of their own get their products from, those of all layers at once."""

    @abstractmethod
    def matvec_all(
        self, operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str
    ) -> list[Tensor]:
        """Return the product of every operator of this source with its own vectors."""

    @abstractmethod
    def dense_all(self, operators: Sequence[SplittingOperator], backend: str) -> list[Tensor]:
        """Return the matrices of every operator of this source, each (M, D, D)."""


class SplittingOperator(ABC):
    """M symmetric D x D matrices, one per filter, that are never formed unless `dense` is asked for.

    Attributes:
        shape: (M, D).
        dtype: of the vectors and of the arithmetic.
        device: where the vectors live.
        source: where the products come from, if not from the operator itself.
        rows: N, where the matrices are sums over so many rows that can be added up cheaply; else None.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    source: Source | None = None
    rows: int | None = None

    @abstractmethod
    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        """Return S_j v_j for all filters j; V is (M, D), or (K, M, D) for K vectors per filter."""

    @abstractmethod
    def restrict(self, filters: Tensor) -> SplittingOperator:
        """Return the operator of the given filters alone; `filters` holds their indices."""

    def dense(self, backend: str = "auto") -> Tensor:
        """Return the matrices themselves, (M, D, D), column by column."""
        filters, width = self.shape
        basis = torch.eye(width, dtype=self.dtype, device=self.device)[:, None].expand(-1, filters, -1)
        # At most 64 columns at a time: a product with K vectors may need K times the memory of one.
        columns = [self.matvec(block.contiguous(), backend) for block in basis.split(64)]
        return torch.cat(columns).permute(1, 2, 0).contiguous()

    def common_part(self) -> Tensor | None:
        """Return what the rows have in common, (D,): their mean, in units of the root mean square of their lengths.

        It has a length of 1 if all rows are the same, and of nearly 0 if they have nothing in common. What comes close
        to it at little cost will do; None is for operators that have nothing to offer.
        """
        return None

    def stored_as(self, dtype: torch.dtype | None) -> SplittingOperator:
        """Return the operator with its rows and coefficients, where they are float32, in another dtype."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if dtype is not None and isinstance(value, Tensor) and value.dtype == torch.float32:
                setattr(other, name, value.to(dtype))
        return other

    @property
    def nbytes(self) -> int:
        """The memory that the operator holds on to."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def _describe(self, X: Tensor, C: Tensor, filters: int, width: int) -> None:
        checks.is_not_empty("X", X)
        checks.is_not_empty("C", C)
        self.shape = (filters, width)
        self.dtype = checks.compute_dtype(X.dtype)
        self.device = X.device

    def __repr__(self) -> str:
        filters, width = self.shape
        return f"{type(self).__name__}(M={filters}, D={width}, {self.dtype}, {self.device})"


class PointwiseOperator(SplittingOperator):
    """The filters of a linear layer or a 1 x 1 convolution: S_j = X^T diag(C[:, j]) X."""

    def __init__(
        self,
        X: Tensor,  # (N, D)
        C: Tensor,  # (N, M)
        *,
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        ops.check_rows(X, C, check_finite)
        self._describe(X, C, C.shape[1], X.shape[1] + bias)
        self.X, self.C, self.bias, self.rows = X, C, bias, len(X)

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        return ops.splitting_matvec(self.X, self.C, V, bias=self.bias, backend=backend, check_finite=False)

    def restrict(self, filters: Tensor) -> PointwiseOperator:
        return PointwiseOperator(self.X, _chosen(self.C, 1, filters), bias=self.bias, check_finite=False)

    def common_part(self) -> Tensor:
        return _common_part(self.X, self.bias)

    def dense(self, backend: str = "auto") -> Tensor:
        return ops.splitting_matrices(self.X, self.C, bias=self.bias, backend=backend, check_finite=False)


class ConvOperator(SplittingOperator):
    """The filters of a 2-d convolution of any kernel size; its rows are the patches of X."""

    def __init__(
        self,
        X: Tensor,  # (B, I, H, W)
        C: Tensor,  # (B, M, H', W')
        *,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (1, 1),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        self.kernel_size, self.stride, self.padding, self.dilation = ops.check_conv(
            X, C, kernel_size, stride, padding, dilation, check_finite
        )
        self._describe(X, C, C.shape[1], X.shape[1] * self.kernel_size[0] * self.kernel_size[1] + bias)
        self.X, self.C, self.bias = X, C, bias

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        return ops.conv_matvec(self.X, self.C, V, **self._geometry(), backend=backend, check_finite=False)

    def restrict(self, filters: Tensor) -> ConvOperator:
        return ConvOperator(self.X, _chosen(self.C, 1, filters), **self._geometry(), check_finite=False)

    def common_part(self) -> Tensor:
        """Return what the patches have in common, (D,), as if there were no borders."""
        return _common_part(self.X.movedim(1, -1), self.bias, repeats=self.kernel_size[0] * self.kernel_size[1])

    def _geometry(self) -> dict:
        names = ("kernel_size", "stride", "padding", "dilation", "bias")
        return {name: getattr(self, name) for name in names}


class EdgeConvOperator(SplittingOperator):
    """The filters of an EdgeConv layer, theta = [a, b] acting on edges [x_j - x_i, x_i] under a maximum over j."""

    def __init__(
        self,
        X: Tensor,  # (B, P, F)
        winner: Tensor,  # (B, P, M), int64
        C: Tensor,  # (B, P, M)
        *,
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        ops.check_edgeconv(X, winner, C, check_finite)
        self._describe(X, C, C.shape[2], 2 * X.shape[2] + bias)
        self.X, self.winner, self.C, self.bias = X, winner, C, bias
        self._incoming: Incoming | None = None

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        if self._incoming is None and ops.resolve_backend(backend, self.X, V) == "triton":
            # Sorted once: the winners stay the same from product to product.
            self._incoming = incoming_edges(self.winner)
        return ops.edgeconv_matvec(
            self.X,
            self.winner,
            self.C,
            V,
            bias=self.bias,
            backend=backend,
            check_finite=False,
            incoming=self._incoming,
        )

    def restrict(self, filters: Tensor) -> EdgeConvOperator:
        rest = EdgeConvOperator(
            self.X,
            _chosen(self.winner, 2, filters),
            _chosen(self.C, 2, filters),
            bias=self.bias,
            check_finite=False,
        )
        if self._incoming is not None:
            rest._incoming = self._incoming.restrict(filters)
        return rest

    def common_part(self) -> Tensor:
        """Return what edges from points to themselves have in common, (D,): those that win differ between filters."""
        points = _common_part(self.X, self.bias)
        return torch.cat([points.new_zeros(self.X.shape[-1]), points])

    @property
    def nbytes(self) -> int:
        """The memory that the operator holds on to."""
        return super().nbytes + sum(tensor.nbytes for tensor in self._incoming or ())


class DenseOperator(SplittingOperator):
    """Splitting matrices that were formed; `rows` is 0, since nothing is left to be added up."""

    def __init__(self, matrices: Tensor) -> None:  # (M, D, D)
        checks.is_tensor("matrices", matrices)
        checks.has_shape("matrices", matrices, ("M", matrices.shape[-1], matrices.shape[-1]))
        checks.is_not_empty("matrices", matrices)
        self.matrices, self.shape, self.rows = matrices, (len(matrices), matrices.shape[-1]), 0
        self.dtype, self.device = matrices.dtype, matrices.device

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        return torch.einsum("mde,...me->...md", self.matrices, V)

    def restrict(self, filters: Tensor) -> DenseOperator:
        return DenseOperator(self.matrices[filters])

    def dense(self, backend: str = "auto") -> Tensor:
        return self.matrices


class SumOperator(SplittingOperator):
    """The weighted sum of operators of one shape: the average over several batches of data."""

    def __init__(self, terms: Sequence[SplittingOperator], weights: Sequence[float] | None = None) -> None:
        if not terms:
            raise ValueError("terms must hold at least one operator, got none")
        self.terms = list(terms)
        self.weights = [1.0] * len(self.terms) if weights is None else list(weights)
        if len(self.weights) != len(self.terms):
            raise ValueError(f"weights must have {len(self.terms)} entries, one per term; got {len(self.weights)}")
        for term in self.terms:
            if not isinstance(term, SplittingOperator):
                raise TypeError(f"terms must be SplittingOperators, got {type(term).__name__}")
        first = self.terms[0]
        for term in self.terms[1:]:
            if (term.shape, term.dtype, term.device) != (first.shape, first.dtype, first.device):
                raise ValueError(f"terms must agree in shape, dtype and device, got {first} and {term}")
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device
        rows = [term.rows for term in self.terms]
        self.rows = None if None in rows else sum(count for count in rows if count is not None)

    @property
    def nbytes(self) -> int:
        """The memory that the terms hold on to."""
        return sum(term.nbytes for term in self.terms)

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        result = torch.zeros_like(V)
        for term, weight in zip(self.terms, self.weights, strict=True):
            result.add_(term.matvec(V, backend), alpha=weight)
        return result

    def restrict(self, filters: Tensor) -> SumOperator:
        return SumOperator([term.restrict(filters) for term in self.terms], self.weights)

    def common_part(self) -> Tensor | None:
        """Return the average of what the rows of each term have in common, (D,), by the sizes of the weights."""
        parts = [term.common_part() for term in self.terms]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        # Rows that are subtracted have a direction all the same.
        sizes = [abs(weight) for weight in self.weights]
        total = sum(sizes) or 1.0
        return torch.stack([part * (size / total) for part, size in zip(known, sizes, strict=True)]).sum(0)

    def dense(self, backend: str = "auto") -> Tensor:
        matrices = torch.zeros(*self.shape, self.shape[1], dtype=self.dtype, device=self.device)
        for term, weight in zip(self.terms, self.weights, strict=True):
            add_dense(matrices, term, weight, backend)
        return matrices


def _chosen(tensor: Tensor, dim: int, filters: Tensor) -> Tensor:
    """Return the entries of some filters, as indexing does, which takes longer."""
    return tensor.index_select(dim, torch.where(filters < 0, filters + tensor.shape[dim], filters))


def _common_part(X: Tensor, bias: bool, repeats: int = 1) -> Tensor:
    """Return what rows have in common that are the last dimension of X, each entry so many times, and 1 for a bias."""
    dims, dtype = tuple(range(X.dim() - 1)), checks.compute_dtype(X.dtype)
    rows = X.numel() // X.shape[-1]
    mean = X.mean(dims, dtype=dtype).repeat_interleave(repeats)
    length = math.sqrt(repeats / rows) * torch.linalg.vector_norm(X, dtype=dtype)
    if bias:
        mean, length = torch.cat([mean, mean.new_ones(1)]), torch.hypot(length, torch.ones_like(length))
    return mean / length.clamp(min=torch.finfo(dtype).tiny)


def add_dense(matrices: Tensor, operator: SplittingOperator, weight: float = 1.0, backend: str = "auto") -> None:
    """Add the matrices of an operator, times a weight, to `matrices` (M, D, D); those of rows in one pass over them."""
    if isinstance(operator, PointwiseOperator):
        rows = (operator.X, operator.C, weight)
        ops.add_splitting_matrices(matrices, *rows, bias=operator.bias, backend=backend, check_finite=False)
    else:
        matrices.add_(operator.dense(backend), alpha=weight)


def matvec_all(
    operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str = "auto"
) -> list[Tensor]:
    """Return the product of every operator with its own vectors: one step of a solver for all layers.

    All pointwise layers go through one grouped call; operators of one source are asked for together.
    """
    results: list[Tensor | None] = [None] * len(operators)
    for source, own in _by_source(operators).items():
        products = source.matvec_all([operators[i] for i in own], [vectors[i] for i in own], backend)
        for index, product in zip(own, products, strict=True):
            results[index] = product
    rows: list[tuple[int, PointwiseOperator, float]] = []
    for index, (operator, V) in enumerate(zip(operators, vectors, strict=True)):
        if operator.source is not None:
            continue
        terms = operator.terms if isinstance(operator, SumOperator) else [operator]
        weights = operator.weights if isinstance(operator, SumOperator) else [1.0]
        pointwise = [term for term in terms if isinstance(term, PointwiseOperator)]
        if len(pointwise) == len(terms):
            rows += [(index, term, weight) for term, weight in zip(pointwise, weights, strict=True)]
        else:
            results[index] = operator.matvec(V, backend)
    products = ops.splitting_matvec_grouped(
        [term.X for _, term, _ in rows],
        [term.C for _, term, _ in rows],
        [vectors[index] for index, _, _ in rows],
        bias=[term.bias for _, term, _ in rows],
        backend=backend,
        check_finite=False,
    )
    for (index, _, weight), product in zip(rows, products, strict=True):
        total = results[index]
        if total is None:
            results[index] = product if weight == 1 else product.mul_(weight)
        else:
            total.add_(product, alpha=weight)
    return [result for result in results if result is not None]


def dense_all(operators: Sequence[SplittingOperator], backend: str = "auto") -> Iterator[Tensor]:
    """Yield the matrices of every operator in turn; operators of one source are asked for together."""
    found: dict[int, Tensor] = {}
    for source, own in _by_source(operators).items():
        found.update(zip(own, source.dense_all([operators[i] for i in own], backend), strict=True))
    for index, operator in enumerate(operators):
        yield found.pop(index) if index in found else operator.dense(backend)


def _by_source(operators: Sequence[SplittingOperator]) -> dict[Source, list[int]]:
    """Return the places of the operators that have a source, by source."""
    places: dict[Source, list[int]] = {}
    for index, operator in enumerate(operators):
        if operator.source is not None:
            places.setdefault(operator.source, []).append(index)
    return places
