"""One batch: a forward and a backward pass, and the splitting operators made from their tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from s3d_fast.backends.operations import unchecked_curvature
from s3d_fast.base import require
from s3d_fast.base.losses import checked_loss
from s3d_fast.capture.folding import foldable, folded_convolution, module_scale, norm_scale
from s3d_fast.maths.activations import Activation, activation
from s3d_fast.network.calls import Call, shape
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.execution import Execution, in_order
from s3d_fast.network.export import slow_attention
from s3d_fast.network.graph import Graph, Unit, stored_tensors
from s3d_fast.network.tracing import graph_for
from s3d_fast.operators import ConvOperator, EdgeConvOperator, PointwiseOperator, SplittingOperator


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
        sharpness: the sharpness of the softplus that stands in for kinks of activations; None means the default.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], graph: Graph, sharpness: float | None
    ) -> None:
        self.model, self.loss_fn, self.graph, self.sharpness = model, loss_fn, graph, sharpness

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
            units = taps.units
            gradients = _gradients(loss, taps, units, index)
            while gradients:
                # From last to first; the tensors of each unit are freed before the next operator is made.
                unit, g = units[len(gradients) - 1], gradients.pop()
                assert unit.activation is not None
                act = activation(unit.activation, sharpness=self.sharpness)
                keep(unit.name, _operator(self.model, taps, unit, act, g, dtype))
                taps.forget(unit.name)
        return float(loss.detach())


class _Taps(Execution):
    """Evaluates the traced model and keeps, for every unit, the layer's input and the activation's input and output.

    It also keeps the layer's output if more than a BatchNorm stands between the layer and its activation.
    """

    def __init__(self, module: fx.GraphModule, model: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__(module, model)
        self.nodes = {node.name: node for node in module.graph.nodes}
        self.producers: dict[str, list[Unit]] = {}
        self.activations: dict[str, list[Unit]] = {}
        for unit in units:
            self.producers.setdefault(unit.producer_node, []).append(unit)
            self.activations.setdefault(unit.activation_node, []).append(unit)
        self.befores: dict[str, list[Unit]] = {}
        for unit in units:
            self.befores.setdefault(unit.before_node, []).append(unit)
        # A folded convolution has no output of its own, so units whose output is kept are not folded.
        needed = {unit.producer_node for unit in units if not unit.is_direct}
        self.folds = {conv: norm for conv, norm in foldable(module).items() if conv not in needed}
        self.folded = set(self.folds.values())
        self.is_direct = all(unit.is_direct for unit in units)
        self.units = units
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}

    def forget(self, unit: str) -> None:
        """Free the tensors kept for a unit."""
        for kept in (self.inputs, self.outputs, self.before, self.after):
            kept.pop(unit, None)

    def evaluate(self, n: fx.Node) -> Any:
        made = self.producers.get(n.name, ())
        for unit in made:
            self.inputs[unit.name] = self.env[self.nodes[unit.source_node]].detach()
        if n.name in self.folds:
            result = folded_convolution(n, self.nodes[self.folds[n.name]], self.env, self.module)
        elif n.name in self.folded:
            result = self.env[n.all_input_nodes[0]]
        else:
            result = super().evaluate(n)
        if made:
            # The units behind this layer need a gradient even if nothing before it requires one.
            result = result if result.requires_grad else result.detach().requires_grad_()
            for unit in made:
                if not unit.is_direct:
                    self.outputs[unit.name] = result
        for unit in self.befores.get(n.name, ()):
            self.before[unit.name] = result
        for unit in self.activations.get(n.name, ()):
            self.after[unit.name] = result
        return result


def _stand_in(model: nn.Module, graph: Graph, units: Sequence[Unit], runs: list[_Taps]) -> nn.Module:
    """Return a shallow copy of the model whose forward pass runs in taps; `runs` gets them."""
    stand_in = copy.copy(model)

    def forward(*arguments: Any, **keywords: Any) -> Any:
        found = graph_for(graph, model, arguments, keywords)
        taps = _Taps(found.module, model, [found.units[unit.name] for unit in units])
        runs.append(taps)
        return taps.run(*in_order(found.module, model, arguments, keywords))

    stand_in.__dict__["forward"] = forward
    # The graph contains what the model's own hooks do.
    for table in ("_forward_hooks", "_forward_pre_hooks"):
        stand_in.__dict__[table] = type(getattr(model, table))()
    return stand_in


def _gradients(loss: Tensor, taps: _Taps, units: Sequence[Unit], index: int) -> list[Tensor]:
    """Return dLoss/dh at the activation of every unit."""
    if not units:
        return []
    ends = [taps.after[unit.name] for unit in units]
    if not loss.requires_grad:
        raise ValueError(f"the loss of batch {index} does not depend on the model's units")
    # Keep the autograd graph only if `_coefficients` needs it; otherwise this pass frees it.
    retain = not taps.is_direct
    gradients = torch.autograd.grad(loss, ends, retain_graph=retain, allow_unused=True)
    found = []
    for unit, end, g in zip(units, ends, gradients, strict=True):
        # The loss does not depend on this unit, so its gradient is zero.
        g = torch.zeros_like(end) if g is None else g
        try:
            require.finite("g", g)
        except ValueError as error:
            raise ValueError(f"the gradient of batch {index} at unit {unit.name!r} is not finite") from error
        found.append(g)
    return found


def _operator(
    model: nn.Module, taps: _Taps, unit: Unit, act: Activation, g: Tensor, dtype: torch.dtype | None
) -> SplittingOperator:
    x = taps.inputs[unit.name]
    kept = x.dtype if dtype is None else dtype
    try:
        if unit.kind == "edgeconv":
            module = model.get_submodule(unit.name)
            assert isinstance(module, EdgeConv)
            winner, C = _winners(module, x, g, act)
            return EdgeConvOperator(x.to(kept), winner, C.to(kept))
        C = _coefficients(model, taps, unit, act, g)
        bias = unit.bias is not None
        if unit.kind == "conv":
            call = Call(taps.nodes[unit.producer_node])
            geometry = (shape(call["weight"])[2:], call["stride"], call["padding"], call["dilation"])
            return conv_operator(x.to(kept), C.to(kept), bias, *geometry)
        return PointwiseOperator(x.flatten(0, -2).to(kept), C.flatten(0, -2).to(kept), bias=bias)
    except ValueError as error:
        raise ValueError(f"unit {unit.name!r}: {error}") from error


def _coefficients(model: nn.Module, taps: _Taps, unit: Unit, act: Activation, g: Tensor) -> Tensor:
    """Return C = g act''(z) s^2, laid out like the layer's output a."""
    z = taps.before[unit.name].detach()
    # A registered activation may do more than it said.
    if g.shape != z.shape or g.dtype != z.dtype or g.device != z.device:
        raise ValueError(
            f"its activation must keep shape, dtype and device, got {tuple(z.shape)}, {z.dtype} on {z.device} -> "
            f"{tuple(g.shape)}, {g.dtype} on {g.device}"
        )
    axis = unit.activation_axis
    if unit.slope is not None:
        # A PReLU is a x + (1 - a) relu(x).
        slope = stored_tensors(model)[unit.slope].detach().to(z)
        g = g * (1 - (slope if len(slope) == 1 else slope.reshape(-1, *[1] * (z.dim() - 1 - axis))))
    scale = None if unit.norm_node is None else norm_scale(taps.nodes[unit.norm_node], taps.module).to(z.dtype)
    if scale is not None and len(scale) != z.shape[axis]:
        scale = scale.repeat_interleave(z.shape[axis] // len(scale))
    if unit.is_direct:
        return unchecked_curvature(g, z, act, scale, axis)
    # Every entry of the activation's input is z = s a + t for one entry of a, perhaps after a transposition or a
    # maximum over positions. The vector-Jacobian product from z to a brings g act''(z) s back to the layout of a, and
    # multiplies it by s once more.
    curvature = unchecked_curvature(g, z, act, axis=axis)
    if scale is not None:
        curvature = curvature * scale.reshape(-1, *[1] * (z.dim() - 1 - axis))
    (C,) = torch.autograd.grad(taps.before[unit.name], taps.outputs[unit.name], curvature, retain_graph=True)
    return C


def conv_operator(
    x: Tensor, C: Tensor, bias: bool, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any
) -> SplittingOperator:
    """Return the operator of a 2-d convolution: on rows if its kernel is 1 x 1 or its patches are few numbers."""
    stride, dilation = _pair(stride), _pair(dilation)
    if x.dim() == 3:
        x, C = x.unsqueeze(0), C.unsqueeze(0)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        x = F.pad(x, (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2))
    padding = (0, 0) if isinstance(padding, str) else _pair(padding)
    if kernel == (1, 1) and padding == (0, 0):
        rows = x[:, :, :: stride[0], :: stride[1]]
        return PointwiseOperator(
            rows.movedim(1, -1).flatten(0, -2), C.movedim(1, -1).flatten(0, -2).contiguous(), bias=bias
        )
    geometry: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    if x.shape[1] * kernel[0] * kernel[1] <= C.shape[1]:
        # The patches take no more memory than C. First layers are like this: few channels and many positions. There,
        # products over patches are several times faster than a convolution and its weight gradient.
        patches = F.unfold(x, **geometry)
        return PointwiseOperator(
            patches.mT.flatten(0, 1).contiguous(), C.flatten(2).mT.flatten(0, 1).contiguous(), bias=bias
        )
    return ConvOperator(x, C, **geometry, bias=bias)


def _pair(given: Any) -> tuple[int, int]:
    values = [int(one) for one in given] if isinstance(given, (list, tuple)) else [int(given)]
    return (values[0], values[-1])


def _winners(module: EdgeConv, x: Tensor, g: Tensor, act: Activation) -> tuple[Tensor, Tensor]:
    """Return, for every point and filter, the neighbour whose edge won the maximum, and its coefficient."""
    with torch.no_grad():
        neighbours = module.neighbours(x)
        z = module.edges(x, neighbours)
        slot = act(z).argmax(-2)
        winner = neighbours.gather(-1, slot)
        z = z.gather(-2, slot.unsqueeze(-2)).squeeze(-2)
        scale = module_scale(module.norm)
        C = unchecked_curvature(g.flatten(0, -2), z.flatten(0, -2), act, scale)
        return winner, C.view_as(z)
