"""One batch: a forward and a backward pass, and the splitting operators made from their tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from s3d_fast.backends.operations import unchecked_curvature
from s3d_fast.base import require
from s3d_fast.base.losses import checked_loss
from s3d_fast.capture.folding import foldable, folded_convolution, norm_scale
from s3d_fast.maths.activations import Activation, activation
from s3d_fast.network import fx_calls
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.graph import Graph, Unit
from s3d_fast.operators import ConvOperator, EdgeConvOperator, PointwiseOperator, SplittingOperator


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

    def __call__(
        self,
        batch: Any,
        index: int,
        units: Sequence[Unit],
        keep: Callable[[str, SplittingOperator], object],
        dtype: torch.dtype | None = None,
    ) -> float:
        """Call `keep` with the name and operator of every unit on this batch, one by one; return the loss."""
        taps = _Taps(self.graph.module, units)
        with torch.enable_grad():
            loss = _evaluate(self.loss_fn, _stand_in(self.model, taps), taps, batch, index)
            gradients = _gradients(loss, taps, units, index)
            while gradients:
                # From last to first; the tensors of each unit are freed before the next operator is made.
                unit, g = units[len(gradients) - 1], gradients.pop()
                act = activation(unit.activation, sharpness=self.sharpness)
                keep(unit.name, _operator(self.model, taps, unit, act, g, dtype))
                taps.forget(unit.name)
        return float(loss.detach())


class _Taps(fx.Interpreter):
    """Evaluates the traced model and keeps, for every unit, the layer's input and the activation's input and output.

    It also keeps the layer's output if more than a BatchNorm stands between the layer and its activation.
    """

    def __init__(self, module: fx.GraphModule, units: Sequence[Unit]) -> None:
        super().__init__(module)
        self.producers = {unit.producer_node: unit.name for unit in units}
        self.direct = {unit.name: _is_direct(module, unit) for unit in units}
        self.activations = {unit.activation_node: unit.name for unit in units}
        # A folded convolution has no output of its own, so units whose output is kept are not folded.
        needed = {unit.producer_node for unit in units if not self.direct[unit.name]}
        self.folds = {conv: norm for conv, norm in foldable(module).items() if conv not in needed}
        self.folded = set(self.folds.values())
        self.overwritten = fx_calls.overwritten(module, self.producers)
        self.clear()

    def clear(self) -> None:
        self.env = {}
        self.calls = 0
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}

    def forget(self, unit: str) -> None:
        """Free the tensors kept for a unit."""
        for kept in (self.inputs, self.outputs, self.before, self.after):
            kept.pop(unit, None)

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls += 1
        return super().run(*arguments, **keywords)

    def run_node(self, n: fx.Node) -> Any:
        unit, act_unit = self.producers.get(n.name), self.activations.get(n.name)
        if unit is not None:
            x = self.env[n.all_input_nodes[0]].detach()
            self.inputs[unit] = x.clone() if n in self.overwritten else x
        elif act_unit is not None:
            argument = n.all_input_nodes[0]
            self.before[act_unit] = self.env[argument]
            if fx_calls.is_inplace(n, self.submodules):
                self.env[argument] = self.env[argument].clone()
        if n.name in self.folds:
            conv, norm = (self.submodules[str(node.target)] for node in (n, next(iter(n.users))))
            result = folded_convolution(conv, norm, self.env[n.all_input_nodes[0]])
        elif n.name in self.folded:
            result = self.env[n.all_input_nodes[0]]
        else:
            result = super().run_node(n)
        if unit is not None:
            # The units behind this layer need a gradient even if nothing before it requires one.
            result = result if result.requires_grad else result.detach().requires_grad_()
            if not self.direct[unit]:
                self.outputs[unit] = result
        if act_unit is not None:
            self.after[act_unit] = result
        own = unit is not None or act_unit is not None
        return result.clone() if own and fx_calls.may_change(n, self.submodules) else result


def _is_direct(module: fx.GraphModule, unit: Unit) -> bool:
    """Return whether at most a BatchNorm stands between the layer and its activation."""
    nodes = {node.name: node for node in module.graph.nodes}
    before = nodes[unit.activation_node].all_input_nodes[0]
    if unit.norm is not None and before.op == "call_module" and before.target == unit.norm:
        before = before.all_input_nodes[0]
    elif unit.norm is not None:
        return False
    return before.name == unit.producer_node


def _stand_in(model: nn.Module, taps: _Taps) -> nn.Module:
    """Return a shallow copy of the model, with the same submodules, whose forward pass runs in the taps."""
    stand_in = copy.copy(model)
    signature = inspect.signature(model.forward)

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if keywords:
            bound = signature.bind(*arguments, **keywords)
            bound.apply_defaults()
            arguments = tuple(bound.arguments.values())
        return taps.run(*arguments)

    stand_in.__dict__["forward"] = forward
    return stand_in


def _evaluate(loss_fn: Callable[[Any, Any], Tensor], model: nn.Module, taps: _Taps, batch: Any, index: int) -> Tensor:
    loss = checked_loss(model, loss_fn, batch, index)
    if taps.calls != 1:
        raise ValueError(f"loss_fn must call the model exactly once per batch, got {taps.calls} calls")
    return loss


def _gradients(loss: Tensor, taps: _Taps, units: Sequence[Unit], index: int) -> list[Tensor]:
    """Return dLoss/dh at the activation of every unit."""
    if not units:
        return []
    ends = [taps.after[unit.name] for unit in units]
    if not loss.requires_grad:
        raise ValueError(f"the loss of batch {index} does not depend on the model's units")
    # Keep the autograd graph only if `_coefficients` needs it; otherwise this pass frees it.
    retain = not all(taps.direct.values())
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
    module = model.get_submodule(unit.name)
    x = taps.inputs[unit.name]
    kept = x.dtype if dtype is None else dtype
    try:
        if isinstance(module, EdgeConv):
            winner, C = _winners(module, x, g, act)
            return EdgeConvOperator(x.to(kept), winner, C.to(kept))
        C = _coefficients(model, taps, unit, act, g)
        bias = module.bias is not None
        if isinstance(module, nn.Conv2d):
            return _conv_operator(module, x.to(kept), C.to(kept), bias)
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
    scale = None if unit.norm is None else norm_scale(model.get_submodule(unit.norm)).to(z.dtype)
    axis = unit.activation_axis
    if scale is not None and len(scale) != z.shape[axis]:
        scale = scale.repeat_interleave(z.shape[axis] // len(scale))
    if taps.direct[unit.name]:
        return unchecked_curvature(g, z, act, scale, axis)
    # Every entry of the activation's input is z = s a + t for one entry of a, perhaps after a transposition or a
    # maximum over positions. The vector-Jacobian product from z to a brings g act''(z) s back to the layout of a, and
    # multiplies it by s once more.
    curvature = unchecked_curvature(g, z, act, axis=axis)
    if scale is not None:
        curvature = curvature * scale.reshape(-1, *[1] * (z.dim() - 1 - axis))
    (C,) = torch.autograd.grad(taps.before[unit.name], taps.outputs[unit.name], curvature, retain_graph=True)
    return C


def _conv_operator(module: nn.Conv2d, x: Tensor, C: Tensor, bias: bool) -> SplittingOperator:
    padding = _explicit_padding(module)
    top_left_equal = padding[0] == padding[1] and padding[2] == padding[3]
    if module.padding_mode != "zeros" or not top_left_equal:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, padding, mode=mode)
        padding = (0, 0, 0, 0)
    if module.kernel_size == (1, 1) and padding == (0, 0, 0, 0):
        rows = x[:, :, :: module.stride[0], :: module.stride[1]]
        return PointwiseOperator(
            rows.movedim(1, -1).flatten(0, -2), C.movedim(1, -1).flatten(0, -2).contiguous(), bias=bias
        )
    geometry: dict[str, Any] = {
        "kernel_size": module.kernel_size,
        "stride": module.stride,
        "padding": (padding[2], padding[0]),
        "dilation": module.dilation,
    }
    if x.shape[1] * module.kernel_size[0] * module.kernel_size[1] <= C.shape[1]:
        # The patches take no more memory than C. First layers are like this: few channels and many positions. There,
        # products over patches are several times faster than a convolution and its weight gradient.
        patches = F.unfold(x, **geometry)
        return PointwiseOperator(
            patches.mT.flatten(0, 1).contiguous(), C.flatten(2).mT.flatten(0, 1).contiguous(), bias=bias
        )
    return ConvOperator(x, C, **geometry, bias=bias)


def _explicit_padding(module: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return the padding as F.pad takes it: left, right, top, bottom."""
    if module.padding == "valid":
        return (0, 0, 0, 0)
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2)
    assert isinstance(module.padding, tuple)
    height, width = module.padding
    return (width, width, height, height)


def _winners(module: EdgeConv, x: Tensor, g: Tensor, act: Activation) -> tuple[Tensor, Tensor]:
    """Return, for every point and filter, the neighbour whose edge won the maximum, and its coefficient."""
    with torch.no_grad():
        neighbours = module.neighbours(x)
        z = module.edges(x, neighbours)
        slot = act(z).argmax(-2)
        winner = neighbours.gather(-1, slot)
        z = z.gather(-2, slot.unsqueeze(-2)).squeeze(-2)
        scale = norm_scale(module.norm)
        C = unchecked_curvature(g.flatten(0, -2), z.flatten(0, -2), act, scale)
        return winner, C.view_as(z)
