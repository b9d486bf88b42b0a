"""Surgery: carries out a split plan on a model and its optimizer state; either everything changes, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from s3d_fast.backends.operations import grow_weights
from s3d_fast.base import dtypes, require
from s3d_fast.maths.reference import Widening
from s3d_fast.network import layers
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.graph import Graph, Layout, Unit
from s3d_fast.splitting.plan import NeuronSplit, SplitPlan
from s3d_fast.splitting.undo import AllOrNothing, set_size

# How an entry of optimizer state scales if the gradient is scaled by w: by w, by w^2, or by the sign of w.
LIKE_GRADIENT, LIKE_SQUARE, LIKE_SIGN = 1, 2, 0
OPTIMIZER_STATE: dict[type[torch.optim.Optimizer], dict[str, int]] = {
    torch.optim.SGD: {"momentum_buffer": LIKE_GRADIENT},
    torch.optim.Adam: {"exp_avg": LIKE_GRADIENT, "exp_avg_sq": LIKE_SQUARE, "max_exp_avg_sq": LIKE_SQUARE},
    torch.optim.AdamW: {"exp_avg": LIKE_GRADIENT, "exp_avg_sq": LIKE_SQUARE, "max_exp_avg_sq": LIKE_SQUARE},
    # RMSprop's momentum adds up gradients that are already divided by their root mean square.
    torch.optim.RMSprop: {"square_avg": LIKE_SQUARE, "grad_avg": LIKE_GRADIENT, "momentum_buffer": LIKE_SIGN},
}

# The weights of a neuron's copies must sum to 1 up to this rounding error.
MAX_WEIGHT_ERROR = 1e-5


def apply_splits(model: nn.Module, plan: SplitPlan, eps: float, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Split neurons of a model in place, and carry its optimizer's state along.

    The row of a split neuron i becomes m rows theta + eps * delta_k. Every follower repeats the neuron's channel m
    times. In every consumer, the column W[:, i] becomes the m columns w_k * W[:, i]. At eps = 0 the model computes the
    same function as before. Optimizer state scales like the gradients: by w_k for copied rows and followers (second
    moments by w_k^2), and not at all for consumers' columns. Changed parameters are new nn.Parameter objects without a
    gradient, in the same parameter groups.

    Args:
        model: the model that the plan was made for, or another model with the same layers and sizes.
        plan: from `select`.
        eps: the size of the step, >= 0.
        optimizer: SGD, Adam, AdamW or RMSprop over the model's parameters.

    Raises:
        ValueError, TypeError: the plan does not fit the model, the optimizer belongs to another model or is not
            supported, or a size attribute of a layer cannot be set. Nothing has changed then.
    """
    if not (isinstance(eps, (int, float)) and 0 <= eps < float("inf")):
        raise ValueError(f"eps must be a finite number >= 0, got {eps!r}")
    try:
        plan.graph.check(model)
    except ValueError as error:
        raise ValueError(f"plan does not fit the model: {error}") from error
    by_unit = _check_splits(plan)
    kinds = check_optimizer(optimizer, model)
    if not by_unit:
        return

    modules = {name: model.get_submodule(name) for name in plan.graph.layers}
    expansions = _Expansions(
        (name, _Expansion.of(splits, plan.graph.units[name].width, modules[name])) for name, splits in by_unit.items()
    )
    changes = [
        change
        for name in plan.graph.layers
        for change in _layer_changes(plan.graph, name, modules[name], expansions, eps)
    ]
    states = _widened_state(changes, optimizer, kinds)
    places = [(entries, key) for entries in states for key, value in entries.items() if isinstance(value, Widening)]
    widenings = [change.widening for change in changes]
    widenings += [value for entries in states for value in entries.values() if isinstance(value, Widening)]
    with torch.no_grad():
        grown = grow_weights(widenings)

    for (entries, key), new in zip(places, grown[len(changes) :], strict=True):
        entries[key] = new
    touched = dict.fromkeys(change.module for change in changes)
    with AllOrNothing(touched, optimizer):
        for change, new in zip(changes, grown[: len(changes)], strict=True):
            change.commit(new)
        if optimizer is not None:
            _commit_state(optimizer, changes, states)
        for module in touched:
            for name, size in _sizes(module).items():
                set_size(module, name, size)


@dataclass
class _UnitSplits:
    """The splits of one unit, sorted by neuron; the copies of all neurons are concatenated."""

    neurons: Tensor  # (splits,)
    copies: Tensor  # (splits,)
    weights: Tensor  # (all copies,), float64
    offsets: Tensor  # (all copies, D)

    @classmethod
    def of(cls, splits: Sequence[NeuronSplit]) -> _UnitSplits:
        splits = sorted(splits, key=lambda split: split.neuron)
        neurons = torch.tensor([split.neuron for split in splits])
        copies = torch.tensor([split.weights.shape[0] for split in splits])
        with torch.no_grad():
            # Splits may have different dtypes; float64 holds all of them exactly.
            weights = torch.cat([split.weights for split in splits]).to("cpu", torch.float64)
            return cls(neurons, copies, weights, torch.cat([split.offsets for split in splits]))

    def is_valid(self) -> bool:
        """Return whether all numbers are finite, and the weights of every neuron sum to 1."""
        of_split = torch.arange(len(self.copies)).repeat_interleave(self.copies)
        totals = torch.zeros(len(self.copies), dtype=torch.float64).index_add(0, of_split, self.weights)
        # A finite sum proves that every entry is finite.
        finite = bool(torch.isfinite(self.weights.sum() + self.offsets.sum()))
        return finite and bool(((totals - 1).abs() <= MAX_WEIGHT_ERROR).all())


@dataclass
class _Expansion:
    """How the channels of a unit multiply: new channel n is a copy of channel index[n], read with weight[n]."""

    index: Tensor  # (M',)
    weight: Tensor  # (M',), float64
    share: Tensor  # (M',), float64: one over the number of copies of the channel
    offsets: Tensor  # (R, D), delta of all copies of split neurons
    offset_rows: Tensor  # (M',), the row of `offsets` of a channel; -1 if it is not split

    @classmethod
    def of(cls, splits: _UnitSplits, width: int, module: nn.Module) -> _Expansion:
        like = module.weight
        assert isinstance(like, Tensor)
        copies = torch.ones(width, dtype=torch.int64)
        copies[splits.neurons] = splits.copies
        index = torch.arange(width).repeat_interleave(copies)
        is_split = torch.zeros(width, dtype=torch.bool)
        is_split[splits.neurons] = True
        moved = is_split[index]
        weight = torch.ones(len(index), dtype=torch.float64)
        weight[moved] = splits.weights
        offset_rows = torch.where(moved, moved.cumsum(0) - 1, -1)
        # The parameters' precision is enough: eps * delta is added to them and rounded to it anyway.
        offsets = splits.offsets.to(like.device, like.dtype)
        return cls(index, weight, 1 / copies[index].double(), offsets, offset_rows)


@dataclass
class _Change:
    """A change of one parameter or buffer: how its value grows, and how its entries of optimizer state grow."""

    module: nn.Module
    name: str
    old: Tensor
    widening: Widening
    state: Callable[[Tensor, int], Widening]  # (entry of optimizer state, how it scales) -> how it grows
    parameter: nn.Parameter | None = None

    def commit(self, new: Tensor) -> None:
        if isinstance(self.old, nn.Parameter):
            self.parameter = nn.Parameter(new, requires_grad=self.old.requires_grad)
            self.module._parameters[self.name] = self.parameter
        else:
            self.module._buffers[self.name] = new


class _Expansions(dict[str, _Expansion]):
    """The expansions of the units that are split, by name."""

    def of_layout(self, layout: Layout, multiplier: int = 1) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return, for every new entry of a layout, the old entry that it copies, its weight and its share.

        Return None if no entry belongs to a unit that is split.
        """
        if not any(segment.producer in self for segment in layout):
            return None
        # Results are kept: a depthwise convolution, its BatchNorm and the consumer all have the same channels.
        key = (tuple(layout), multiplier)
        if key not in self._layouts:
            self._layouts[key] = self._expand(layout, multiplier)
        return self._layouts[key]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._layouts: dict[tuple[Layout, int], tuple[Tensor, Tensor, Tensor]] = {}

    def _expand(self, layout: Layout, multiplier: int) -> tuple[Tensor, Tensor, Tensor]:
        index, weight, share, start = [], [], [], 0
        for segment in layout:
            repeat = segment.repeat * multiplier
            expansion = self.get(segment.producer or "")
            channels = torch.arange(segment.channels) if expansion is None else expansion.index
            ones = torch.ones(len(channels), dtype=torch.float64)
            entries = start + channels[:, None] * repeat + torch.arange(repeat)
            index.append(entries.flatten())
            weight.append((ones if expansion is None else expansion.weight).repeat_interleave(repeat))
            share.append((ones if expansion is None else expansion.share).repeat_interleave(repeat))
            start += segment.channels * repeat
        return torch.cat(index), torch.cat(weight), torch.cat(share)


def _layer_changes(graph: Graph, name: str, module: nn.Module, expansions: _Expansions, eps: float) -> list[_Change]:
    """Return all changes that the expansions make to one layer."""
    layer = graph.layers[name]
    if layer.kind in ("depthwise", "batchnorm", "custom"):
        multiplier = module.out_channels // module.in_channels if isinstance(module, nn.Conv2d) else 1
        expanded = expansions.of_layout(layer.inputs, multiplier)
        if expanded is None:
            return []
        index, weight, _ = expanded
        return [_channel_change(module, tensor, index, weight) for tensor in layers.per_channel_tensors(module)]

    own = expansions.get(name)
    expanded = expansions.of_layout(layer.inputs)
    if own is None and expanded is None:
        return []
    columns, column_weight, share = expanded if expanded is not None else (None, None, None)
    changes = []
    if isinstance(module, EdgeConv):
        if columns is not None and column_weight is not None and share is not None:
            changes.append(_metric_change(module, columns, share))
            # The weight acts on [x_j - x_i, x_i]: both halves have the input's channels.
            columns = torch.cat([columns, columns + module.in_features])
            column_weight = torch.cat([column_weight, column_weight])
        if own is not None:
            changes += [
                _channel_change(module.norm, tensor, own.index, own.weight)
                for tensor in layers.per_channel_tensors(module.norm)
            ]
    changes.append(_weight_change(module, own, columns, column_weight, eps))
    if own is not None and layers.has_bias(module):
        shift = (eps * own.offsets[:, -1], own.offset_rows)
        changes.append(_channel_change(module, "bias", own.index, own.weight, shift))
    return changes


def _weight_change(
    module: nn.Module, own: _Expansion | None, columns: Tensor | None, column_weight: Tensor | None, eps: float
) -> _Change:
    old = module.weight
    assert isinstance(old, nn.Parameter)

    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(old.device, old.dtype if tensor.is_floating_point() else None)

    rows = like(torch.arange(len(old)) if own is None else own.index)
    assert rows is not None
    new_columns = like(columns)
    shift = shift_rows = None
    if own is not None:
        # If the layer has a bias, the last entry of an offset belongs to the bias and is left out.
        shift = own.offsets[:, : old[0].numel()].reshape(-1, *old.shape[1:])
        shift_rows = like(own.offset_rows)
    widening = Widening(old, rows, None, shift, shift_rows, new_columns, like(column_weight), eps)

    def state(tensor: Tensor, scaling: int) -> Widening:
        scale = None if own is None else like(_scaled(own.weight, scaling))
        return Widening(tensor, rows, scale, columns=new_columns)

    return _Change(module, "weight", old, widening, state)


def _channel_change(
    module: nn.Module, name: str, index: Tensor, weight: Tensor, shift: tuple[Tensor, Tensor] | None = None
) -> _Change:
    old = getattr(module, name)
    rows = index.to(old.device)
    moved = (None, None) if shift is None else (shift[0].to(old), shift[1].to(old.device))

    def state(tensor: Tensor, scaling: int) -> Widening:
        return Widening(tensor, rows, _scaled(weight, scaling).to(tensor))

    return _Change(module, name, old, Widening(old, rows, None, *moved), state)


def _metric_change(module: EdgeConv, columns: Tensor, share: Tensor) -> _Change:
    old = module.metric
    rows = columns.to(old.device)
    # The metric is a buffer: no optimizer has state for it.
    return _Change(module, "metric", old, Widening(old, rows, share.to(old)), lambda tensor, _: Widening(tensor, rows))


def _scaled(weight: Tensor, scaling: int) -> Tensor:
    return weight.sign() if scaling == LIKE_SIGN else weight**scaling


def _widened_state(
    changes: Sequence[_Change], optimizer: torch.optim.Optimizer | None, kinds: Mapping[str, int]
) -> list[dict[str, object]]:
    """Return the optimizer's state of every changed tensor, with a Widening in place of each tensor that must grow."""
    states: list[dict[str, object]] = []
    for change in changes:
        state = optimizer.state.get(change.old, {}) if optimizer is not None else {}
        entries: dict[str, object] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == change.old.shape and value.dim() > 0:
                if key not in kinds:
                    raise ValueError(f"optimizer: splitting does not support its state {key!r}")
                value = change.state(value, kinds[key])
            entries[key] = value
        states.append(entries)
    return states


def _commit_state(
    optimizer: torch.optim.Optimizer, changes: Sequence[_Change], states: Sequence[dict[str, object]]
) -> None:
    successor = {id(change.old): change.parameter for change in changes if change.parameter is not None}
    for group in optimizer.param_groups:
        group["params"] = [successor.get(id(parameter), parameter) for parameter in group["params"]]
    for change, entries in zip(changes, states, strict=True):
        if change.parameter is not None and change.old in optimizer.state:
            del optimizer.state[change.old]
            optimizer.state[change.parameter] = entries


def _sizes(module: nn.Module) -> dict[str, int]:
    """Return the values of a module's size attributes that fit its tensors."""
    sizes: dict[str, int] = {}
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Conv2d) and isinstance(weight, Tensor):
        sizes = {"out_channels": len(weight), "in_channels": weight.shape[1] * module.groups}
        if layers.is_depthwise(module):
            channels = len(weight) // (module.out_channels // module.in_channels)
            sizes |= {"in_channels": channels, "groups": channels}
    elif isinstance(module, EdgeConv):
        sizes = {"out_features": len(module.weight), "in_features": module.weight.shape[1] // 2}
    elif isinstance(module, nn.Linear):
        sizes = {"out_features": module.weight.shape[0], "in_features": module.weight.shape[1]}
    elif layers.is_batchnorm(module):
        sizes = {"num_features": len(module.running_mean)}  # type: ignore[arg-type]
    custom = layers.custom_layer(module)
    if custom is not None:
        # Optional tensors may be absent.
        tensors = [getattr(module, name) for name in layers.per_channel_tensors(module)]
        if tensors:
            sizes |= dict.fromkeys(custom.size_attributes, len(tensors[0]))
    return sizes


def _check_splits(plan: SplitPlan) -> dict[str, _UnitSplits]:
    """Return the splits by unit; raise if one of them does not fit the graph."""
    seen: set[tuple[str, int]] = set()
    for split in plan.splits:
        # One check covers the usual case: a plan may have thousands of splits.
        unit = plan.graph.units.get(split.unit)
        if unit is None or (split.unit, split.neuron) in seen or not _fits(split, unit):
            _explain_misfit(split, plan.graph)
            raise ValueError(f"{_where(split)} is split twice")
        seen.add((split.unit, split.neuron))
    by_unit = {name: _UnitSplits.of(splits) for name, splits in plan.by_unit().items()}
    for name, splits in by_unit.items():
        # All splits of a unit are checked at once; only the error message looks at them one by one.
        if not splits.is_valid():
            _explain_invalid([split for split in plan.splits if split.unit == name])
    return by_unit


def _fits(split: NeuronSplit, unit: Unit) -> bool:
    weights, offsets = split.weights, split.offsets
    return (
        isinstance(split.neuron, int)
        and 0 <= split.neuron < unit.width
        and isinstance(weights, Tensor)
        and isinstance(offsets, Tensor)
        and weights.dtype in dtypes.FLOAT_DTYPES
        and offsets.dtype in dtypes.FLOAT_DTYPES
        and weights.dim() == 1
        and tuple(offsets.shape) == (weights.shape[0], unit.fan_in)
    )


def _explain_misfit(split: NeuronSplit, graph: Graph) -> None:
    unit = graph.units.get(split.unit)
    if unit is None:
        raise ValueError(f"plan: {split.unit!r} is not a unit; the units are {', '.join(graph.units)}")
    where = _where(split)
    if not isinstance(split.neuron, int) or not 0 <= split.neuron < unit.width:
        raise ValueError(f"{where} does not exist: indices go from 0 to {unit.width - 1}")
    require.tensor(f"{where}: weights", split.weights)
    require.tensor(f"{where}: offsets", split.offsets)
    require.shape(f"{where}: weights", split.weights, ("m",))
    require.shape(f"{where}: offsets", split.offsets, (split.weights.shape[0], unit.fan_in))


def _where(split: NeuronSplit) -> str:
    return f"plan: neuron {split.neuron} of {split.unit!r}"


def _explain_invalid(splits: Sequence[NeuronSplit]) -> None:
    for split in splits:
        require.finite(f"{_where(split)}: weights", split.weights)
        require.finite(f"{_where(split)}: offsets", split.offsets)
        total = float(split.weights.double().sum())
        if abs(total - 1) > MAX_WEIGHT_ERROR:
            raise ValueError(f"{_where(split)}: weights must sum to 1, got {total:.8g}")


def check_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> Mapping[str, int]:
    """Return how the entries of the optimizer's state scale, by key.

    Raises:
        TypeError: splitting does not support this type of optimizer.
        ValueError: the optimizer holds parameters that are not the model's.
    """
    if optimizer is None:
        return {}
    if type(optimizer) not in OPTIMIZER_STATE:
        known = ", ".join(kind.__name__ for kind in OPTIMIZER_STATE)
        raise TypeError(f"optimizer must be one of {known}, got {type(optimizer).__name__}")
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise ValueError(f"optimizer holds {len(foreign)} parameters that are not the model's")
    return OPTIMIZER_STATE[type(optimizer)]
