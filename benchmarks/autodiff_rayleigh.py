"""Rayleigh-quotient descent by automatic differentiation, the method of the paper's appendix.

Every neuron's output gets an extra term y/2 act''(z) (s v.x)^2. At y = 0 the network is unchanged, and the derivative
of its loss with respect to y is v^T S v / 2 for all neurons at once. The gradient of the quotient with respect to v
gives the direction of descent. Every step evaluates the network forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast.network.graph import Graph


class AutodiffRayleigh:
    """Descent and ascent on the Rayleigh quotients of all units of a model of convolutions with BatchNorm.

    Args:
        model: evaluated in eval mode.
        graph: from `s3d_fast.trace`.
        starts: unit vectors (M, D) by unit.
    """

    def __init__(
        self, model: nn.Module, graph: Graph, loss_fn: Callable[[Tensor, Tensor], Tensor], starts: dict[str, Tensor]
    ) -> None:
        self.model, self.graph, self.loss_fn = model, graph, loss_fn
        # Two vectors per filter, for the two ends.
        self.V = {name: torch.stack([start, start]).requires_grad_() for name, start in starts.items()}

    def quotients(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the quotients (2, M) of all units, differentiable with respect to their vectors."""
        seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.model.eval()
        outputs = self._outputs(x, seen)
        loss = self.loss_fn(outputs, y)
        gradients = torch.autograd.grad(loss, [h for _, _, h in seen.values()])
        result = {}
        for (name, (inputs, z, _)), g in zip(seen.items(), gradients, strict=True):
            unit, V = self.graph.units[name], self.V[name]
            conv, norm = self.model.get_submodule(name), self.model.get_submodule(str(unit.norm))
            scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            coefficients = (g * unit.activation.second(z) * scale[:, None, None] ** 2).detach()
            filters = V.reshape(-1, *conv.weight.shape[1:])
            along = F.conv2d(inputs, filters, None, conv.stride, conv.padding).unflatten(1, V.shape[:2])
            result[name] = (coefficients[:, None] * along**2).sum((0, 3, 4)) / (V**2).sum(-1)
        return result

    def step(self, x: Tensor, y: Tensor, rate: dict[str, Tensor]) -> None:
        """Move the vectors of all units along the gradients of their quotients, with one rate per filter."""
        quotients = self.quotients(x, y)
        names = list(quotients)
        total = torch.stack([quotient.sum() for quotient in quotients.values()]).sum()
        signs = torch.tensor([-1.0, 1.0])[:, None, None]
        for name, gradient in zip(names, torch.autograd.grad(total, [self.V[name] for name in names]), strict=True):
            with torch.no_grad():
                V = self.V[name] + signs * rate[name] * gradient
                self.V[name] = F.normalize(V, dim=-1).requires_grad_()

    def _outputs(self, x: Tensor, seen: dict[str, tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Return the model's output; store input, activation input and activation output of every unit in `seen`."""
        handles, inputs = [], {}
        modules = dict(self.model.named_modules())

        def keep_input(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
                inputs[name] = arguments[0].detach()

            return hook

        def keep_ends(name: str) -> Callable[..., Tensor]:
            def hook(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
                output = output if output.requires_grad else output.requires_grad_()
                seen[name] = (inputs[name], arguments[0].detach(), output)
                return output

            return hook

        for unit in self.graph:
            # The activation is the module after the unit's BatchNorm, in a Sequential.
            parent, _, index = str(unit.norm).rpartition(".")
            handles.append(modules[unit.name].register_forward_hook(keep_input(unit.name)))
            handles.append(modules[f"{parent}.{int(index) + 1}"].register_forward_hook(keep_ends(unit.name)))
        try:
            return self.model(x)
        finally:
            for handle in handles:
                handle.remove()
