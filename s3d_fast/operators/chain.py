"""Units whose channels pass several activations: S = sum over them of J^T C J, by one pass forward and one back."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.operators.operator import SplittingOperator

# What a step gets its tensors from, by name.
Tensors = Callable[[str], Tensor]
# Tangents at a place with curvature, and their product with that curvature.
Site = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Tangent:
    """Stands for the tangent that step number `step` makes, in the arguments of a call."""

    step: int


@dataclass(frozen=True)
class Kept:
    """Stands for the stored tensor of this name, in the arguments of a call."""

    name: str


@dataclass(frozen=True)
class Moved:
    """Stands for the direction in which a weight or a bias moves, in the arguments of a call."""

    is_bias: bool


@dataclass(frozen=True)
class BoundCall:
    """A call of a function whose arguments hold placeholders."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self, given: Callable[[Any], Any]) -> Any:
        """Return the result; `given` returns the value of a placeholder."""
        arguments = _filled(self.arguments, given)
        return self.function(*arguments, **{name: _filled(value, given) for name, value in self.keywords.items()})


def _filled(value: Any, given: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Tangent, Kept, Moved)):
        return given(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(one, given) for one in value)
    return value


class Step(ABC):
    """One step of a chain: how tangents pass it, and the curvature it adds."""

    @abstractmethod
    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        """Return the tangent that the step makes of those that earlier steps made."""

    def sites(self, made: Sequence[Any], tensors: Tensors) -> list[Site]:
        """Return the tangents at which the step has curvature, each with its product with that curvature."""
        return []

    def lengths(self, made: Sequence[Any], tensors: Tensors) -> Any:
        """Return a bound of |J| behind the step, from bounds before it; `tensors` returns absolute values."""
        return self.tangent(made, tensors)

    def sizes(self, made: Sequence[Any], tensors: Tensors) -> list[Tensor]:
        """Return a bound of |J|^T |C| |J| at every entry with curvature, from bounds of |J| and absolute values."""
        return []


@dataclass(frozen=True)
class Part:
    """Filters of a weight, one per channel.

    Attributes:
        start: where their parameters begin in theta.
        rows: the name of the tensor with their places along the weight's axis; None if they are all of it.
    """

    start: int
    rows: str | None


@dataclass(frozen=True)
class Write(Step):
    """A call that makes channels: the tangent of its output is linear in the direction in which its filters move.

    Attributes:
        call: the layer's call, with the directions of weight and bias as placeholders.
        view: the weight as the call takes it, from the weight as it is stored; None if they are the same.
        shape: the shape of the stored weight.
        row_axis: the axis of its filters.
        bias: the number of entries of the bias; None if no bias moves.
        parts: the filters; a layer whose output is divided into halves has two per channel.
    """

    call: BoundCall
    view: Callable[[Tensor], Tensor] | None
    shape: tuple[int, ...]
    row_axis: int
    bias: int | None
    parts: tuple[Part, ...]

    @property
    def width(self) -> int:
        """The parameters of a filter, including the bias."""
        return self.weight_width + (self.bias is not None)

    @property
    def weight_width(self) -> int:
        """The parameters of a filter without the bias."""
        return torch.Size(self.shape).numel() // self.shape[self.row_axis]

    @property
    def end(self) -> int:
        """Where the parameters of its last part end in theta."""
        return max(part.start for part in self.parts) + self.width

    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        raise NotImplementedError("a Write step starts from directions")

    def output(self, V: Tensor, tensors: Tensors, squared: bool = False) -> Tensor:
        """Return the tangent of the call's output for directions of the filters, (M, D); see `evaluated`."""
        rest = [size for axis, size in enumerate(self.shape) if axis != self.row_axis]
        weights, biases = [], []
        for part in self.parts:
            own = V[:, part.start : part.start + self.width]
            rows = None if part.rows is None else tensors(part.rows)
            weights.append(_placed(own[:, : self.weight_width].reshape(-1, *rest), rows, self.shape[self.row_axis]))
            if self.bias is not None:
                biases.append(_placed(own[:, -1], rows, self.bias))
        weight = _total(weights).movedim(0, self.row_axis)
        return self.evaluated(weight, _total(biases) if biases else None, tensors, squared)

    def evaluated(self, weight: Tensor, bias: Tensor | None, tensors: Tensors, squared: bool = False) -> Tensor:
        """Return the call's output for other weights, perhaps with the squares of what it reads."""
        weight = weight if self.view is None else self.view(weight)

        def given(placeholder: Any) -> Any:
            if isinstance(placeholder, Moved):
                return bias if placeholder.is_bias else weight
            x = tensors(placeholder.name)
            return x.square() if squared else x

        result: Tensor = self.call(given)
        return result


def _total(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _placed(values: Tensor, rows: Tensor | None, length: int) -> Tensor:
    if rows is None:
        return values
    return values.new_zeros(length, *values.shape[1:]).index_copy(0, rows.long(), values)


@dataclass(frozen=True)
class Linear(Step):
    """A call that is linear in the tangents it takes, less a constant if it has one."""

    call: BoundCall
    offset: str | None = None

    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        result = self._called(made, tensors)
        return result if self.offset is None else result - tensors(self.offset)

    def lengths(self, made: Sequence[Any], tensors: Tensors) -> Any:
        result = self._called(made, tensors)
        if self.offset is None:
            return result
        return result - self._called([one if one is None else torch.zeros_like(one) for one in made], tensors)

    def _called(self, made: Sequence[Any], tensors: Tensors) -> Any:
        return self.call(lambda one: made[one.step] if isinstance(one, Tangent) else tensors(one.name))


@dataclass(frozen=True)
class Scaled(Step):
    """One factor per entry: a BatchNorm in eval mode, a fixed gate."""

    source: int
    factor: str

    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        return made[self.source] * tensors(self.factor)


@dataclass(frozen=True)
class Total(Step):
    """A sum of tangents with constant factors, expanded to a shape."""

    sources: tuple[int, ...]
    factors: tuple[float, ...]
    shape: tuple[int, ...]

    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        result = _total(
            [
                made[source] if factor == 1 else factor * made[source]
                for source, factor in zip(self.sources, self.factors, strict=True)
            ]
        )
        return result if result.shape == self.shape else result.expand(self.shape)

    def lengths(self, made: Sequence[Any], tensors: Tensors) -> Any:
        return replace(self, factors=tuple(map(abs, self.factors))).tangent(made, tensors)


@dataclass(frozen=True)
class Curve(Step):
    """A function of corresponding entries.

    Attributes:
        sources: the steps that make its arguments' tangents.
        first: the names of its first derivatives, by argument.
        second: the names of gradient times second derivative, by pair of arguments; pairs with zeros are left out.
        shape: the shape of its result, to which the arguments are expanded.
        is_last: whether no curvature comes after it, so that nothing needs its tangent.
    """

    sources: tuple[int, ...]
    first: tuple[str, ...]
    second: Mapping[tuple[int, int], str]
    shape: tuple[int, ...]
    is_last: bool = False

    def _arguments(self, made: Sequence[Any]) -> list[Tensor]:
        return [made[source].expand(self.shape) for source in self.sources]

    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        if self.is_last:
            return None
        result = None
        for argument, name in zip(self._arguments(made), self.first, strict=True):
            term = argument * tensors(name)
            result = term if result is None else result + term
        return result

    def sites(self, made: Sequence[Any], tensors: Tensors) -> list[Site]:
        r = self._arguments(made)
        products: dict[int, Tensor] = {}
        for (i, j), name in self.second.items():
            C = tensors(name)
            for one, other in {(i, j), (j, i)}:
                term = C * r[other].detach()
                products[one] = products[one] + term if one in products else term
        return [(r[i], y) for i, y in products.items()]

    def sizes(self, made: Sequence[Any], tensors: Tensors) -> list[Tensor]:
        r = self._arguments(made)
        return [tensors(name) * r[i] * r[j] * (1 if i == j else 2) for (i, j), name in self.second.items()]


@dataclass(frozen=True)
class Maximum(Step):
    """A maximum over positions: the tangents of its winners, and the ties between winners and runners-up.

    Attributes:
        source: the step that makes the tangents of the values compared.
        winner, runner: the names of the flat places of winners and runners-up among these values.
        kernel: the name of gradient times kernel of the gap between the two; None leaves ties out.
        is_last: whether no curvature comes after it.
    """

    source: int
    winner: str
    runner: str
    kernel: str | None
    is_last: bool = False

    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        return None if self.is_last else made[self.source].take(tensors(self.winner).long())

    def sites(self, made: Sequence[Any], tensors: Tensors) -> list[Site]:
        if self.kernel is None:
            return []
        r = made[self.source]
        gap = r.take(tensors(self.winner).long()) - r.take(tensors(self.runner).long())
        return [(gap, tensors(self.kernel) * gap.detach())]

    def sizes(self, made: Sequence[Any], tensors: Tensors) -> list[Tensor]:
        if self.kernel is None:
            return []
        both = sum(made[self.source].take(tensors(place).long()) for place in (self.winner, self.runner))
        return [tensors(self.kernel) * both * both]


@dataclass(frozen=True)
class Differentiated(Step):
    """A call with curvature between different entries, such as an instance norm: automatic differentiation.

    Attributes:
        call: the call; its changing arguments are Kept tensors with the values that they have.
        sources: the steps that make the tangents of these arguments.
        names: the names of these arguments' values.
        gradient: the name of the gradient of the loss at its result.
    """

    call: BoundCall
    sources: tuple[int, ...]
    names: tuple[str, ...]
    gradient: str | None
    is_last: bool = False

    def evaluated(self, values: Mapping[str, Tensor], tensors: Tensors) -> Tensor:
        """Return the result for given values of the changing arguments."""
        result: Tensor = self.call(lambda one: values[one.name] if one.name in values else tensors(one.name))
        return result

    def tangent(self, made: Sequence[Any], tensors: Tensors) -> Any:
        if self.is_last:
            return None
        return _JacobianProduct.apply(self, tensors, *(made[source] for source in self.sources))

    def sites(self, made: Sequence[Any], tensors: Tensors) -> list[Site]:
        if self.gradient is None:
            return []
        r = [made[source] for source in self.sources]
        with torch.enable_grad():
            values = self._leaves(tensors)
            result = self.evaluated(values, tensors)
            leaves = list(values.values())
            gradients = torch.autograd.grad(result, leaves, tensors(self.gradient), create_graph=True)
            inner = sum(((g * one.detach()).sum() for g, one in zip(gradients, r, strict=True)), result.new_zeros(()))
            if not inner.requires_grad:
                return []
            products = torch.autograd.grad(inner, leaves, allow_unused=True, materialize_grads=True)
        return list(zip(r, products, strict=True))

    def lengths(self, made: Sequence[Any], tensors: Tensors) -> Any:
        raise NotImplementedError("what a call between entries makes of lengths is not known")

    def _leaves(self, tensors: Tensors) -> dict[str, Tensor]:
        return {name: tensors(name).detach().requires_grad_() for name in self.names}


class _JacobianProduct(torch.autograd.Function):
    """J r of a call at its values; its own derivative is the product with the transposed Jacobian."""

    @staticmethod
    def forward(ctx: Any, step: Differentiated, tensors: Tensors, *r: Tensor) -> Tensor:
        ctx.step, ctx.tensors = step, tensors
        with torch.enable_grad():
            values = step._leaves(tensors)
            result = step.evaluated(values, tensors)
            dual = torch.zeros_like(result, requires_grad=True)
            gradients = torch.autograd.grad(result, list(values.values()), dual, create_graph=True)
            (product,) = torch.autograd.grad(gradients, dual, r)
        return product

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> Any:
        with torch.enable_grad():
            values = ctx.step._leaves(ctx.tensors)
            result = ctx.step.evaluated(values, ctx.tensors)
            return (None, None, *torch.autograd.grad(result, list(values.values()), y))


class ChainOperator(SplittingOperator):
    """The filters of a unit with any chain: S = sum over its activations i of J_i^T diag(C_i) J_i, J_i = dz_i/dtheta.

    A product takes the tangents J_i v forward through the chain, multiplies them by the curvature C_i where there is
    any, and takes the results back. It is the definition that the fused forms are compared with. It is plain
    PyTorch, whatever the backend.

    Args:
        steps: the steps in order; the first ones are of type Write, one per call whose filters move.
        tensors: the tensors that steps name.
        filters: M.
    """

    def __init__(self, steps: Sequence[Step], tensors: Mapping[str, Tensor], filters: int) -> None:
        self.steps = tuple(steps)
        self.writes = tuple(step for step in self.steps if isinstance(step, Write))
        if not self.writes or any(not isinstance(step, Write) for step in self.steps[: len(self.writes)]):
            raise ValueError("steps must begin with at least one Write, and have no other after them")
        floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
        if not floats:
            raise ValueError("tensors must hold at least one tensor of floating point numbers")
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                require.finite(name, tensor)
            setattr(self, f"kept_{name}", tensor)
        self.shape = (filters, max(write.end for write in self.writes))
        self.dtype = dtypes.compute_dtype(max((t.dtype for t in floats), key=lambda dtype: dtype.itemsize))
        self.device = floats[0].device
        self.chosen: Tensor | None = None  # of the filters, if the operator is restricted
        self.all_filters = filters

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that a step names, in the dtype of the arithmetic."""
        tensor: Tensor = getattr(self, f"kept_{name}")
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        if V.dim() == 3:
            return torch.stack([self.matvec(one, backend) for one in V])
        if self.chosen is not None:
            full = V.new_zeros(self.all_filters, V.shape[1])
            return self._product(full.index_copy(0, self.chosen, V)).index_select(0, self.chosen)
        return self._product(V)

    def _product(self, V: Tensor) -> Tensor:
        with torch.enable_grad():
            V = V.detach().requires_grad_()
            return self._pulled_back([write.output(V, self.tensor) for write in self.writes], [V])[0]

    def _pulled_back(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        sites = self.sites(outputs)
        if not sites:
            return [torch.zeros_like(leaf) for leaf in leaves]
        return list(
            torch.autograd.grad(
                [r for r, _ in sites], leaves, [y for _, y in sites], allow_unused=True, materialize_grads=True
            )
        )

    def sites(self, outputs: Sequence[Tensor]) -> list[Site]:
        """Return all places with curvature, for tangents of the layers' outputs."""
        made: list[Any] = list(outputs)
        found: list[Site] = []
        for step in self.steps[len(self.writes) :]:
            found += step.sites(made, self.tensor)
            made.append(step.tangent(made, self.tensor))
        return found

    def magnitude(self) -> Tensor | None:
        """Return an upper bound of A_j: bounds of |J| pass every step; None if a step mixes the entries of a map."""
        if any(isinstance(step, Differentiated) for step in self.steps):
            return None

        def absolute(name: str) -> Tensor:
            tensor = self.tensor(name)
            return tensor.abs() if tensor.is_floating_point() else tensor

        with torch.enable_grad():
            # The sizes of filter j grow with the square of its factor: half the derivative is their sum.
            factors = torch.ones(self.all_filters, dtype=self.dtype, device=self.device, requires_grad=True)
            tiny = torch.finfo(self.dtype).tiny
            made: list[Any] = []
            for write in self.writes:
                squares = write.output(factors.square()[:, None].expand(-1, self.shape[1]), self.tensor, squared=True)
                # The derivative of the root is infinite at zero.
                made.append(squares.clamp(min=tiny).sqrt())
            total = factors.new_zeros(())
            for step in self.steps[len(self.writes) :]:
                total = total + sum(size.sum() for size in step.sizes(made, absolute))
                made.append(step.lengths(made, absolute))
            (sums,) = torch.autograd.grad(total, factors, allow_unused=True, materialize_grads=True)
        sums = sums / 2
        return sums if self.chosen is None else sums[self.chosen]

    def tangents(self, outputs: Sequence[Tensor]) -> list[Any]:
        """Return the tangents that all steps make of tangents of the layers' outputs."""
        made: list[Any] = list(outputs)
        for step in self.steps[len(self.writes) :]:
            made.append(step.tangent(made, self.tensor))
        return made

    def without_ties(self) -> ChainOperator:
        """Return the operator without the curvature of ties."""
        other = copy.copy(self)
        other.steps = tuple(replace(step, kernel=None) if isinstance(step, Maximum) else step for step in self.steps)
        return other

    def curvature_of(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the product of the curvature of q, as a function of the layers' outputs, with tangents of these."""
        with torch.enable_grad():
            leaves = [one.detach().to(self.dtype).requires_grad_() for one in outputs]
            return self._pulled_back(leaves, leaves)

    def restrict(self, filters: Tensor) -> ChainOperator:
        """Return the operator restricted to some filters; its products cost as much as those of all filters."""
        if len(filters) == 0:
            require.not_empty("filters", filters)
        rest = copy.copy(self)
        filters = torch.where(filters < 0, filters + self.shape[0], filters)
        rest.chosen = filters if self.chosen is None else self.chosen[filters]
        rest.shape = (len(filters), self.shape[1])
        return rest
