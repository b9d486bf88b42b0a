"""The trial of proposed filters: a copy of the network that has all of them, and its plain gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from s3d_fast.base.losses import checked_loss
from s3d_fast.base.world import World
from s3d_fast.network.graph import READ, Filters, Graph, stored_tensors
from s3d_fast.network.growing import AxisGrowth, Growth
from s3d_fast.network.wrapping import inside
from s3d_fast.solvers.block_lanczos import largest_eigenpairs
from s3d_fast.splitting.plan import SplitPlan
from s3d_fast.splitting.proposals import Proposals
from s3d_fast.splitting.surgery import apply_splits
from s3d_fast.splitting.unit_changes import unit_changes

# Derivatives at filters of length 0 are differences over this share of a filter's length.
NEAR_ZERO = 0.1


class Trial:
    """Evaluates proposed filters on a copy of the network that has all of them."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        batches: Collection[Any],
        graph: Graph,
        world: World,
    ) -> None:
        self.model, self.loss_fn, self.batches, self.graph, self.world = inside(model), loss_fn, batches, graph, world
        self.count = world.sum(len(batches))[0]

    def measured(self, proposals: Mapping[str, Proposals]) -> dict[str, Proposals]:
        """Return the proposals with their slopes, and with the statistics of their BatchNorms."""
        grown = Grown(self, proposals)
        grown.find_statistics()
        gradients = grown.gradients()
        return {
            name: replace(own, slope=grown.slopes(name, gradients), statistics=grown.statistics(name))
            for name, own in proposals.items()
        }

    def ascended(self, proposals: Mapping[str, Proposals]) -> dict[str, tuple[Proposals, Tensor]]:
        """Return the proposals, each with the direction (K, D) in which half the squared slope of a filter rises.

        That is J^T g, where g is the gradient at the output weights and J its derivative by the filter.
        """
        grown = Grown(self, proposals)
        ascents = grown.ascents(grown.gradients())
        return {name: (own, ascents[name]) for name, own in proposals.items()}

    def singular(self, proposals: Mapping[str, Proposals], products: int) -> dict[str, Proposals]:
        """Return the proposals along the singular vectors of J, the derivative of g at filters of length 0.

        J^T J is one matrix for a unit: all filters are given the followers of one channel, whose BatchNorm is shifted
        so that its output is 0 for a filter of zeros. Both J and J^T are taken by central differences, which are exact
        for linear units and for those with a kink at 0.
        """
        stands_for = {name: _of_one_channel(own, self.graph, self.model) for name, own in proposals.items()}

        def product(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
            up, down = (
                Grown(self, {name: _along(stands_for[name], sign * rows) for name, rows in vectors.items()})
                for sign in (1.0, -1.0)
            )
            high, low = up.gradients(), down.gradients()
            # A common factor of the differences changes no eigenvector.
            along = {name: high[name] - low[name] for name in high}
            raised, lowered = up.ascents(along), down.ascents(along)
            return {name: (raised[name] + lowered[name]).cpu() for name in vectors}

        found = largest_eigenpairs(product, {name: own.theta.cpu() for name, own in proposals.items()}, products)
        result = {}
        for name, own in proposals.items():
            directions = found[name][1].to(own.theta)
            theta = own.theta.clone()
            # A unit has at most as many directions as parameters; further filters stay at random.
            theta[: len(directions)] = directions * own.theta[: len(directions)].norm(dim=1, keepdim=True)
            result[name] = replace(own, theta=theta)
        return result


def _along(own: Proposals, directions: Tensor) -> Proposals:
    """Return filters like a unit's first proposal along some directions, short enough to count as 0."""
    count = len(directions)
    length = NEAR_ZERO * float(own.theta[0].norm())
    return replace(
        own,
        theta=(length * directions).to(own.theta),
        like=own.like[:1] * count,
        slope=torch.zeros(count, dtype=torch.float64),
        reach=own.reach[:1].repeat(count),
        statistics={name: values[:1].repeat(count) for name, values in own.statistics.items()},
    )


def _of_one_channel(own: Proposals, graph: Graph, model: nn.Module) -> Proposals:
    """Return the first proposal, with a BatchNorm that gives 0 for a filter of zeros."""
    norm = graph.units[own.unit].norm
    module = None if norm is None else model.get_submodule(norm)
    if not isinstance(module, _BatchNorm) or module.running_mean is None or module.running_var is None:
        return replace(own.take([0]), statistics={})
    channel = own.like[0]
    scale = 1.0 if module.weight is None else float(module.weight.detach()[channel])
    shift = 0.0 if module.bias is None else float(module.bias.detach()[channel])
    spread = (float(module.running_var[channel]) + module.eps) ** 0.5
    mean = module.running_mean.new_tensor([shift * spread / scale if scale else 0.0])
    statistics = {f"{norm}.running_mean": mean, f"{norm}.running_var": module.running_var[channel : channel + 1]}
    return replace(own.take([0]), statistics=statistics)


class Grown:
    """A copy of the network with all proposed filters."""

    def __init__(self, trial: Trial, proposals: Mapping[str, Proposals]) -> None:
        self.trial, self.graph = trial, trial.graph
        self.plan = SplitPlan(
            self.graph, (), new=[own[place] for own in proposals.values() for place in range(len(own))]
        )
        self.counts = {name: len(own) for name, own in proposals.items()}
        self.model = copy.deepcopy(trial.model).eval()
        # The graph was proved, or its user takes care of that.
        apply_splits(self.model, replace(self.plan, graph=replace(self.graph, is_proved=True)), 0.0)
        self.changes = unit_changes(self.plan)
        growth = Growth(self.graph, {name: change.copies for name, change in self.changes.items()})
        self.tensors: dict[str, dict[int, AxisGrowth]] = growth.tensors()
        self.stored = stored_tensors(self.model)
        for tensor in self.stored.values():
            if tensor.is_leaf and tensor.is_floating_point():
                tensor.requires_grad_(isinstance(tensor, nn.Parameter))
        self.read = [name for name in self.tensors if self._reads(name)]

    def _reads(self, name: str) -> bool:
        axes = self.graph.tensors[name]
        is_parameter = isinstance(self.stored[name], nn.Parameter)
        return is_parameter and any(bool((axes[axis].role == READ).any()) for axis in self.tensors[name])

    def _new(self, name: str, axis: int, unit: str, role: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries along an axis that belong to new channels of a unit, and to which of its new filters."""
        growth, layout = self.tensors[name][axis], self.graph.tensors[name][axis]
        assert growth.copy is not None
        number = list(self.graph.units).index(unit)
        mine = layout.unit[growth.index] == number
        if role is not None:
            mine &= layout.role[growth.index] == role
        places = np.flatnonzero(mine)
        which = self.changes[unit].new_of(growth.copy[places])
        return places[which >= 0], which[which >= 0]

    def losses(self) -> Iterator[Tensor]:
        """Yield the loss of every batch of this process, divided by the number of all batches."""
        for index, batch in enumerate(self.trial.batches):
            with torch.enable_grad():
                yield checked_loss(self.model, self.trial.loss_fn, batch, index) / self.trial.count

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the mean loss for every weight that reads new channels."""
        return self._summed(self._own_gradients)

    def _summed(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors that every process makes on its batches, summed over the processes."""
        world = self.trial.world
        return {name: world.sum_tensor(tensor) for name, tensor in world.together(make).items()}

    def _own_gradients(self) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(self.stored[name]) for name in self.read}
        for loss in self.losses():
            own = torch.autograd.grad(loss, [self.stored[name] for name in self.read], allow_unused=True)
            for name, gradient in zip(self.read, own, strict=True):
                if gradient is not None:
                    total[name] += gradient
        return total

    def slopes(self, unit: str, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the slope of every new filter of a unit."""
        squares = torch.zeros(self.counts[unit], dtype=torch.float64)
        for name in self.read:
            for axis in self.tensors[name]:
                places, which = self._new(name, axis, unit, READ)
                if len(places):
                    index = torch.from_numpy(places).to(gradients[name].device)
                    rows = gradients[name].detach().index_select(axis, index).movedim(axis, 0).flatten(1)
                    squares.index_add_(0, torch.from_numpy(which), rows.double().square().sum(1).cpu())
        return squares.sqrt()

    def ascents(self, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return J^T u for the filters of every unit, u being what `along` holds for weights that read new channels."""
        held = {name: self._of_new_channels(name, gradient) for name, gradient in along.items()}
        rows = [
            name
            for name in dict.fromkeys(
                name
                for unit in self.counts
                for one in self.graph.units[unit].filters
                for name in (one.weight, one.bias)
                if name is not None
            )
            if name in self.tensors
        ]
        total = self._summed(lambda: self._own_ascents(held, rows))
        return {unit: self._rows(unit, total) for unit in self.counts}

    def _own_ascents(self, held: Mapping[str, Tensor], rows: Sequence[str]) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(self.stored[name]) for name in rows}
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            for loss in self.losses():
                own = torch.autograd.grad(
                    loss, [self.stored[name] for name in self.read], create_graph=True, allow_unused=True
                )
                terms = [
                    (held[name] * gradient).sum()
                    for name, gradient in zip(self.read, own, strict=True)
                    if gradient is not None
                ]
                product = torch.stack(terms).sum()
                second = torch.autograd.grad(product, [self.stored[name] for name in rows], allow_unused=True)
                for name, gradient in zip(rows, second, strict=True):
                    if gradient is not None:
                        total[name] += gradient
        return total

    def _of_new_channels(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient with zeros but where a new channel is read."""
        kept = torch.zeros_like(gradient)
        for axis in self.tensors[name]:
            for unit in self.counts:
                places, _ = self._new(name, axis, unit, READ)
                if len(places):
                    index = torch.from_numpy(places).to(gradient.device)
                    kept.index_copy_(axis, index, gradient.index_select(axis, index))
        return kept

    def _rows(self, unit: str, of: Mapping[str, Tensor]) -> Tensor:
        """Return what tensors hold for the new filters of a unit, (K, D), in the columns that were there before."""
        return torch.cat([self._part(unit, one, of) for one in self.graph.units[unit].filters], 1)

    def _part(self, unit: str, filters: Filters, of: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for name, axis in ((filters.weight, filters.row_axis), (filters.bias, 0)):
            if name is None:
                continue
            tensor = of[name]
            for other, growth in self.tensors[name].items():
                if other != axis and growth.new is not None:
                    old = torch.from_numpy(np.flatnonzero(~growth.new)).to(tensor.device)
                    tensor = tensor.index_select(other, old)
            places, which = self._new(name, axis, unit)
            # A weight that several units share holds rows of others too; a filter that stands twice adds up.
            rows = tensor.index_select(axis, torch.from_numpy(places).to(tensor.device)).movedim(axis, 0)
            rows = rows.reshape(len(places), -1)
            total = rows.new_zeros(self.counts[unit], rows.shape[1])
            parts.append(total.index_add_(0, torch.from_numpy(which).to(tensor.device), rows))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def find_statistics(self) -> None:
        """Let every BatchNorm find the statistics of new channels, in the order of the network, on all batches."""
        hooks, seen = [], {}
        for module in self.model.modules():
            if not isinstance(module, _BatchNorm) or module.running_mean is None or module.running_var is None:
                continue
            name = next((own for own, tensor in self.stored.items() if tensor is module.running_mean), "")
            growth = self.tensors.get(name, {}).get(0)
            if growth is None or growth.new is None:
                continue
            seen[module] = (torch.from_numpy(np.flatnonzero(growth.new)), [0.0])
            hooks.append(module.register_forward_pre_hook(lambda own, inputs: _observe(own, inputs[0], *seen[own])))
        try:
            if hooks:
                self.trial.world.together(lambda: [float(loss.detach()) for loss in self.losses()])
        finally:
            for hook in hooks:
                hook.remove()
        for module, (places, _) in seen.items():
            for buffer in (module.running_mean, module.running_var):
                assert buffer is not None
                index = places.to(buffer.device)
                # Every process has the means of its own batches.
                own = buffer[index].double() * len(self.trial.batches)
                buffer[index] = (self.trial.world.sum_tensor(own) / self.trial.count).to(buffer.dtype)

    def statistics(self, unit: str) -> dict[str, Tensor]:
        """Return the statistics of the new channels of a unit, by the names of buffers."""
        found = {}
        for module_name, module in self.model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            for leaf in ("running_mean", "running_var"):
                name = f"{module_name}.{leaf}" if module_name else leaf
                if name not in self.tensors or self.tensors[name].get(0) is None:
                    continue
                places, which = self._new(name, 0, unit)
                if len(places) == self.counts[unit]:
                    values = self.stored[name].new_zeros(self.counts[unit])
                    values[torch.from_numpy(which)] = self.stored[name][torch.from_numpy(places)]
                    found[name] = values
        return found


def _observe(layer: _BatchNorm, x: Tensor, places: Tensor, weight: list[float]) -> None:
    """Add a batch to the statistics of some channels: the mean over the batches so far."""
    own = x.index_select(1, places.to(x.device)).detach().double()
    others = [axis for axis in range(x.dim()) if axis != 1]
    weight[0] += 1
    variance, mean = torch.var_mean(own, others, correction=0)
    for buffer, value in ((layer.running_mean, mean), (layer.running_var, variance)):
        assert buffer is not None
        index = places.to(buffer.device)
        old = buffer[index].double() if weight[0] > 1 else torch.zeros_like(value)
        buffer[index] = (old + (value - old) / weight[0]).to(buffer.dtype)
