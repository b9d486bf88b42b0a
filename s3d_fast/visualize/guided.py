"""Guided backpropagation (Springenberg et al., 2015) shows what a filter responds to in an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from s3d_fast.base import require
from s3d_fast.network.calls import Call
from s3d_fast.network.chains import named_activation
from s3d_fast.network.execution import Execution
from s3d_fast.network.graph import Graph, Unit
from s3d_fast.network.undisturbed import undisturbed

# Activations that pass positive inputs and stop negative ones, entirely or nearly.
RECTIFIERS = frozenset({"relu", "relu6", "leaky_relu", "elu", "hardswish", "silu", "gelu", "softplus"})


def guided_backpropagation(
    model: nn.Module, image: Tensor, graph: Graph, unit: str, filter: int, row: Tensor | None = None
) -> Tensor:
    """Return a grey picture, (H, W), of what a filter responds to in an image (Springenberg et al., 2015).

    The picture is the sum over colours of |dA/d image|, where A is the sum of the filter's activation over all
    positions. Every rectifier h = act(z) on the way, including the filter's own, passes back

        dA/dz = act'(z) max(dA/dh, 0)  where z > 0,  0 elsewhere.

    Rectifiers are ReLU, ReLU6, LeakyReLU, ELU, SiLU, GELU, softplus and Hardswish; everything else passes its ordinary
    gradient. A sums over all positions, not only the strongest, so that a small change of the filter cannot move the
    picture to another position. An inactive filter gives a black picture. The model is evaluated in eval mode and left
    as it was, even after an error.

    Args:
        model: the model that was traced.
        image: (1, channels, H, W), as the model reads it.
        graph: from `trace`, of the model as it is now.
        unit: the name of the filter's layer; a convolution or a linear layer.
        filter: its index.
        row: (D,), parameters to use instead of the filter's own; the bias, if there is one, comes last.

    Raises:
        ValueError, TypeError: a bad argument.
    """
    check_image(image)
    chosen = check_unit(model, graph, unit)
    require.count("filter", filter, at_least=0)
    if filter >= chosen.width:
        raise ValueError(f"filter must be below {chosen.width}, the filters of unit {unit!r}, got {filter}")
    if row is not None:
        require.tensor("row", row)
        require.shape("row", row, (chosen.fan_in,))
        require.finite("row", row)
    with undisturbed(model), torch.enable_grad():
        pixels = image.detach().clone().requires_grad_()
        response = _Guided(graph.module, model, chosen, filter, row).response(pixels)
        if not response.requires_grad:
            return torch.zeros_like(image[0, 0])
        (gradient,) = torch.autograd.grad(response, pixels, allow_unused=True, materialize_grads=True)
    return gradient[0].abs().sum(0)


class _Guided(Execution):
    """Evaluates the traced model up to a unit's activation, with rectifiers that guide the gradient."""

    def __init__(self, module: fx.GraphModule, model: nn.Module, unit: Unit, filter: int, row: Tensor | None) -> None:
        super().__init__(module, model)
        self.unit, self.filter, self.row = unit, filter, row
        self.layer = unit.filters[0].calls[0].node.name
        self.end, self.axis = first_activation(unit)
        self.activation: Tensor | None = None

    def response(self, pixels: Tensor) -> Tensor:
        """Return the sum of the filter's activation over all positions."""
        try:
            # Copy: the model may begin with an in-place operation.
            self.run(pixels.clone())
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(f"image cannot be evaluated by the model: {error}") from error
        assert self.activation is not None
        axis = self.axis
        # A flattened channel has several entries.
        entries = self.activation.shape[axis] // self.unit.width
        return self.activation.narrow(axis, self.filter * entries, entries).sum()

    def evaluate(self, n: fx.Node) -> Any:
        if self.activation is not None:
            # Nothing after the unit is needed.
            return None
        if n.name == self.layer and self.row is not None:
            return self._produce(n, self.row)
        result = self._rectify(n) if self._is_rectifier(n) else super().evaluate(n)
        if n is self.end:
            self.activation = result
        return result

    def _produce(self, n: fx.Node, row: Tensor) -> Tensor:
        """Return the layer's output with `row` in place of the chosen filter."""
        call = Call(n)
        weight, bias = call["weight"], call["bias"]
        before = {node: self.env[node] for node in (weight, bias) if node is not None}
        changed = before[weight].detach().clone()
        row = row.to(changed)
        changed[self.filter] = row[: changed[0].numel()].view_as(changed[0])
        self.env[weight] = changed
        if bias is not None:
            self.env[bias] = before[bias].detach().clone()
            self.env[bias][self.filter] = row[-1]
        result = super().evaluate(n)
        self.env.update(before)
        return result

    def _is_rectifier(self, n: fx.Node) -> bool:
        act = named_activation(n)
        return act is not None and act.name in RECTIFIERS

    def _rectify(self, n: fx.Node) -> Tensor:
        open_at = self.env[n.all_input_nodes[0]] > 0
        h = super().evaluate(n)
        # The values are h. A gradient passes only where the input was positive, and only if it is positive itself.
        guided = torch.where(open_at, h, h.detach())
        if guided.requires_grad:
            guided.register_hook(lambda g: g.clamp(min=0))
        return guided


def first_activation(unit: Unit) -> tuple[fx.Node, int]:
    """Return the first activation behind a unit's filters, and the axis of the channels in its result."""
    for link in unit.links:
        if link.kind == "maximum" and link.is_shifted:
            # The graph has the activation before this maximum.
            return link.inputs[0], link.axis
        if link.kind == "curve":
            return link.node, link.axis
    raise ValueError(f"unit must have an activation of its own, got {unit.name!r}")


def check_image(image: Tensor) -> None:
    """Raise unless `image` is one finite image, (1, channels, H, W)."""
    require.tensor("image", image)
    require.shape("image", image, (1, "channels", "H", "W"))
    require.not_empty("image", image)
    require.finite("image", image)


def check_unit(model: nn.Module, graph: Graph, unit: str) -> Unit:
    """Return the unit of this name; raise unless it is a convolution or linear and the graph is the model's."""
    chosen = graph.units.get(unit)
    if chosen is None:
        raise ValueError(f"unit must be one of {', '.join(graph.units) or 'none'}; got {unit!r}")
    if chosen.kind not in ("conv", "linear"):
        raise ValueError(f"unit must be a convolution or a linear layer, got {unit!r}, which is {chosen.kind}")
    graph.check_same(model)
    return chosen
