"""One batch: a forward and a backward pass, and the splitting operators made from their tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from s3d_fast.base import require
from s3d_fast.base.losses import checked_loss
from s3d_fast.capture.curvature import Curvature
from s3d_fast.capture.folding import foldable, folded_convolution
from s3d_fast.capture.forms import unit_operator
from s3d_fast.capture.sampling import Sampling
from s3d_fast.capture.values import Values, wanted
from s3d_fast.network.calls import operation
from s3d_fast.network.execution import Execution, in_order
from s3d_fast.network.export import slow_attention
from s3d_fast.network.graph import Graph, Unit, stored_tensors
from s3d_fast.network.tracing import graph_for
from s3d_fast.operators import SplittingOperator


class Capturer(Protocol):
    """Makes the operators of one batch at a time."""

    model: nn.Module

    def __call__(
        self,
        batch: Any,
        index: int,
        units: Sequence[Any],
        keep: Callable[[str, SplittingOperator], object],
        dtype: torch.dtype | None = None,
    ) -> float:
        """Call `keep` with the name and operator of every unit on this batch, one by one; return the loss."""

    def check(self) -> None:
        """Raise ValueError if the model has other layers than when the capture began."""


class BatchCapture:
    """Captures one batch at a time; the caller must restore the model, with `undisturbed`.

    Args:
        model: the model that was traced, in eval mode.
        loss_fn: as for `capture`.
        graph: the graph of the model.
        curvature: which curvature the operators have.
        sampling: which rows they keep; None keeps all.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        graph: Graph,
        curvature: Curvature,
        sampling: Sampling | None = None,
    ) -> None:
        self.model, self.loss_fn, self.graph, self.curvature = model, loss_fn, graph, curvature
        self.sampling = sampling

    def check(self) -> None:
        """Raise ValueError if the model has other layers than when it was traced."""
        self.graph.check(self.model)

    def __call__(
        self,
        batch: Any,
        index: int,
        units: Sequence[Unit],
        keep: Callable[[str, SplittingOperator], object],
        dtype: torch.dtype | None = None,
    ) -> float:
        """Call `keep` with the name and operator of every unit on this batch, one by one; return the loss."""
        with torch.enable_grad(), slow_attention():
            runs: list[_Taps] = []
            loss = checked_loss(_stand_in(self.model, self.graph, units, runs), self.loss_fn, batch, index)
            if len(runs) != 1:
                raise ValueError(f"loss_fn must call the model exactly once per batch, got {len(runs)} calls")
            taps = runs.pop()
            gradients = _gradients(loss, taps, index)
        left = list(taps.units)
        values = Values(taps.module, taps.kept, gradients, stored_tensors(self.model))
        with torch.no_grad():
            while left:
                # From last to first; tensors that no other unit needs are freed before the next operator is made.
                unit = left.pop()
                keep(unit.name, self._operator(unit, values, dtype, index))
                taps.forget(unit, left, gradients)
        return float(loss.detach())

    def _operator(self, unit: Unit, values: Values, dtype: torch.dtype | None, index: int) -> SplittingOperator:
        windows = None if self.sampling is None else self.sampling.windows(unit, values, index)
        try:
            made = unit_operator(*(windows or (unit, values)), self.model, self.curvature)
        except ValueError as error:
            raise ValueError(f"unit {unit.name!r}: {error}") from error
        if self.sampling is not None and windows is None:
            samples = len(values.of(unit.filters[0].calls[0].node))
            made = self.sampling.rows(made, samples, unit.name, index)
        return made if dtype is None else made.in_dtype(dtype)


# Calls whose result depends on how their argument lies in memory.
BY_LAYOUT = frozenset({"aten.as_strided", "aten.view_as_real", "aten.view_as_complex", "aten.view.dtype"})


class _Taps(Execution):
    """Evaluates the traced model and keeps the values along the chains of some units."""

    def __init__(self, module: fx.GraphModule, model: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__(module, model)
        self.nodes = {node.name: node for node in module.graph.nodes}
        self.units = units
        self.wanted = {unit.name: wanted(unit) for unit in units}
        self.values = {name for values, _ in self.wanted.values() for name in values}
        self.graded = {name for _, graded in self.wanted.values() for name in graded}
        self.producers = {call.node.name for unit in units for one in unit.filters for call in one.calls}
        self.folds = foldable(module)
        self.folded = set(self.folds.values())
        self.kept: dict[str, Any] = {}

    def outputs(self, arguments: Sequence[Any]) -> Any:
        """Return what the model makes of its arguments; networks of 2-d convolutions run in channels_last."""
        if not self._is_faster_in_channels_last():
            return self.run(*arguments)
        # Losses may view the outputs in another shape.
        return tree_map_only(Tensor, Tensor.contiguous, self.run(*map(_channels_last, arguments)))

    def _is_faster_in_channels_last(self) -> bool:
        """Return whether to evaluate in channels_last, where the rows of a 1 x 1 convolution are a view of its input.

        Most filters are then 2-d convolutions in float32 on a CPU, for which PyTorch has kernels in both layouts.
        """
        calls = [call for unit in self.units for one in unit.filters for call in one.calls]
        values = [call.source.meta.get("val") for call in calls if operation(call.node) == "aten.conv2d"]
        fitting = [one for one in values if isinstance(one, Tensor) and one.dim() == 4 and one.dtype == torch.float32]
        if 2 * len(fitting) <= len(calls) or any(one.device.type != "cpu" for one in fitting):
            return False
        return not any(node.op == "call_function" and operation(node) in BY_LAYOUT for node in self.nodes.values())

    def forget(self, unit: Unit, left: Sequence[Unit], gradients: dict[str, Tensor]) -> None:
        """Free the tensors that only this unit needs."""
        values, graded = self.wanted[unit.name]
        others = [self.wanted[one.name] for one in left]
        for name in values:
            if not any(name in needed for needed, _ in others):
                self.kept.pop(name, None)
        for name in graded:
            if not any(name in needed for _, needed in others):
                gradients.pop(name, None)

    def evaluate(self, n: fx.Node) -> Any:
        if n.name in self.folds:
            result = folded_convolution(n, self.nodes[self.folds[n.name]], self.env, self.module)
        elif n.name in self.folded:
            result = self.env[n.all_input_nodes[0]]
        else:
            result = super().evaluate(n)
        if n.name in self.producers and isinstance(result, Tensor):
            # The units behind this layer need a gradient even if nothing before it requires one.
            result = result if result.requires_grad else result.detach().requires_grad_()
        if n.name in self.values or n.name in self.graded:
            self.kept[n.name] = result
        return result


def _channels_last(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.dim() == 4:
        return argument.contiguous(memory_format=torch.channels_last)
    return argument


def _stand_in(model: nn.Module, graph: Graph, units: Sequence[Unit], runs: list[_Taps]) -> nn.Module:
    """Return a shallow copy of the model whose forward pass runs in taps; `runs` gets them."""
    stand_in = copy.copy(model)

    def forward(*arguments: Any, **keywords: Any) -> Any:
        found = graph_for(graph, model, arguments, keywords)
        taps = _Taps(found.module, model, [found.units[unit.name] for unit in units])
        runs.append(taps)
        return taps.outputs(in_order(found.module, model, arguments, keywords))

    stand_in.__dict__["forward"] = forward
    # The graph contains what the model's own hooks do.
    for table in ("_forward_hooks", "_forward_pre_hooks"):
        stand_in.__dict__[table] = type(getattr(model, table))()
    return stand_in


def _gradients(loss: Tensor, taps: _Taps, index: int) -> dict[str, Tensor]:
    """Return dLoss/dh at every call with curvature, by node."""
    names = [name for name in taps.nodes if name in taps.graded]
    if not names:
        return {}
    if not loss.requires_grad:
        raise ValueError(f"the loss of batch {index} does not depend on the model's units")
    ends = [taps.kept[name] for name in names]
    open_ends = [end for end in ends if end.requires_grad]
    gradients = iter(torch.autograd.grad(loss, open_ends, allow_unused=True))
    found: dict[str, Tensor] = {}
    for name, end in zip(names, ends, strict=True):
        # Where the loss does not depend on a value, its gradient is zero.
        g = next(gradients) if end.requires_grad else None
        g = torch.zeros_like(end) if g is None else g
        try:
            require.finite("g", g)
        except ValueError as error:
            unit = next(unit.name for unit in taps.units if name in taps.wanted[unit.name][1])
            raise ValueError(f"the gradient of batch {index} at unit {unit!r} is not finite") from error
        if g.dim() == 4 and end.is_contiguous(memory_format=torch.channels_last):
            g = g.contiguous(memory_format=torch.channels_last)
        found[name] = g.detach()
    return found
