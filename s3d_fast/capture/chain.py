"""The splitting operator of a unit on one batch, from the values and gradients along its chain."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from s3d_fast.backends.operations import unchecked_curvature
from s3d_fast.capture.curvature import KINK, PROBES, TIE, Curvature, kernel
from s3d_fast.capture.depthwise import channels_last, depthwise_parts
from s3d_fast.capture.folding import norm_scale
from s3d_fast.capture.maxima import top_two
from s3d_fast.capture.pairs import difference_norms
from s3d_fast.capture.values import Values, require_same
from s3d_fast.maths.activations import Activation, activation
from s3d_fast.network.calls import Call, operation
from s3d_fast.network.graph import FilterCall, Unit, filter_lengths
from s3d_fast.network.links import Link
from s3d_fast.network.rules import rule_of
from s3d_fast.operators.chain import (
    BoundCall,
    ChainOperator,
    Curve,
    Differentiated,
    Kept,
    Linear,
    Maximum,
    Moved,
    Part,
    Scaled,
    Step,
    Tangent,
    Total,
    Write,
)

# Operations without a constant term; all operations that select entries have none either.
HOMOGENEOUS = frozenset(
    f"aten.{name}"
    for name in (
        *("mul", "multiply", "div", "divide", "true_divide", "mean", "sum", "nansum", "cumsum", "diff", "matmul", "mm"),
        *("bmm", "einsum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
        *("adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d"),
        *("upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
        *("upsample_trilinear3d", "scaled_dot_product_attention", "repeat", "index_select"),
    )
)
WITH_BIAS = frozenset(
    f"aten.{name}"
    for name in (
        *("linear", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "_convolution"),
    )
)
# Operations that only arrange entries otherwise.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("transpose", "permute", "t", "mT", "movedim", "view", "_unsafe_view", "reshape", "flatten", "unflatten"),
        *("unsqueeze", "squeeze", "contiguous", "clone"),
    )
)
CASTS = frozenset({"aten.to", "aten._to_copy", "aten.float", "aten.double", "aten.half", "aten.bfloat16"})


class ChainBuilder:
    """Makes the operator of a unit on one batch.

    Args:
        unit: the unit of the graph that the batch was evaluated with.
        values: values and gradients of the batch.
        model: the model.
        curvature: which curvature the operator has.
    """

    def __init__(self, unit: Unit, values: Values, model: nn.Module, curvature: Curvature) -> None:
        self.unit, self.values, self.model, self.curvature = unit, values, model, curvature
        self.stored = values.stored
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.constants: dict[fx.Node, Any] = {}
        self.steps: list[Step] = []
        self.calls = list({call.node: call for one in unit.filters for call in one.calls}.values())
        self.at: list[int] = []  # the step of every call and link
        self.is_single: list[bool] = []  # whether every entry depends on one entry of each filter's output alone
        self.is_direct: list[bool] = []  # whether this is the entry at the same place
        self.origins: list[frozenset[int]] = []
        self.is_first: list[bool] = []  # whether no curvature comes before
        self.shifted: dict[int, Tensor] = {}  # values that the graph does not show
        self.ties: dict[int, Maximum] = {}  # by the link
        self.depthwise = depthwise_parts(unit, values)
        self.slopes: list[Tensor] = []  # of the activations of a depthwise chain
        self.rays: list[list[Any]] = []
        self.probes: list[list[Any]] = []

    def operator(self) -> ChainOperator:
        """Return the operator by the definition."""
        writes = [self._write(call) for call in self.calls]
        self.steps += writes
        wants = self.curvature.fixed_sharpness is None and any(self._is_kinked(link) for link in self.unit.links)
        lookup = self._lookup
        if wants and self.depthwise is None:
            self._start_rays(writes)
        for link in self.unit.links:
            number = len(self.at)
            self._note(link)
            for step in self._made(link, number):
                self.steps.append(step)
                for ray in (*self.rays, *self.probes):
                    ray.append(step.tangent(ray, lookup))
            self.at.append(len(self.steps) - 1)
        return ChainOperator(self.steps, self.tensors, self.unit.width)

    @property
    def is_diagonal(self) -> bool:
        """Whether all curvature except that of ties is one coefficient for every output of one weight's filters."""
        curved = [source for link in self.unit.links if link.is_curved for source in link.sources]
        alone = len(self.calls) == 1 and len(self.unit.filters) == 1
        return alone and all(self.is_single[source] for source in curved)

    @property
    def is_joint(self) -> bool:
        """Whether all curvature is one small matrix for the outputs of a channel's filters at every place."""
        curved = [source for link in self.unit.links if link.is_curved for source in link.sources]
        once = all(len(one.calls) == 1 for one in self.unit.filters)
        return len(self.unit.filters) > 1 and once and not self.ties and all(self.is_direct[s] for s in curved)

    def _lookup(self, name: str) -> Tensor:
        return self.tensors[name]

    def _keep(self, tensor: Tensor) -> str:
        name = self.names.get(id(tensor))
        if name is None:
            name = str(len(self.tensors))
            self.names[id(tensor)], self.tensors[name] = name, tensor
        return name

    # Filters.

    def _write(self, call: FilterCall) -> Write:
        starts, start = [], 0
        owner = None
        number = len(self.at)
        origins = []
        for place, one in enumerate(self.unit.filters):
            if any(own.node is call.node for own in one.calls):
                length = self.stored[one.weight].shape[one.row_axis]
                is_all = len(one.rows) == length and bool((one.rows == range(length)).all())
                where = self.stored[one.weight].device
                rows = None if is_all else self._keep(torch.from_numpy(one.rows).clone().to(where))
                starts.append(Part(start, rows))
                origins.append(place)
                owner = one
            start += one.fan_in
        assert owner is not None
        given: dict[Any, Any] = {call.weight: Moved(False)}
        if call.bias is not None:
            given[call.bias] = Moved(True)
        bound = self._bound(call.node, given)
        if call.bias is not None and owner.bias is None:
            bound = _without_bias(bound, call.node, self.values.of(call.node))
        view = _viewed(call.views) if call.views else None
        bias = None if owner.bias is None else len(self.stored[owner.bias])
        shape = tuple(self.stored[owner.weight].shape)
        self.at.append(number)
        self.is_single.append(all(len(self.unit.filters[place].calls) == 1 for place in origins))
        self.is_direct.append(True)
        self.origins.append(frozenset(origins))
        self.is_first.append(True)
        return Write(bound, view, shape, owner.row_axis, bias, tuple(starts))

    def _bound(self, node: fx.Node, given: Mapping[Any, Any]) -> BoundCall:
        def argument(one: fx.Node) -> Any:
            if one in given:
                return given[one]
            if one not in self.constants:
                value = self.values.of(one)
                self.constants[one] = Kept(self._keep(value)) if isinstance(value, Tensor) else value
            return self.constants[one]

        arguments, keywords = fx.map_arg((node.args, node.kwargs), argument)
        return BoundCall(node.target, tuple(arguments), dict(keywords))  # type: ignore[arg-type]

    # What is known of a value.

    def _note(self, link: Link) -> None:
        sources, name = link.sources, operation(link.node)
        selects = rule_of(name).selects or name.endswith("getitem")
        single = all(self.is_single[one] for one in sources)
        direct = all(self.is_direct[one] for one in sources)
        origins = [self.origins[one] for one in sources]
        if link.kind == "linear":
            elementwise = rule_of(name).is_elementwise
            direct = direct and (self._is_same_shape(link) if elementwise else self._divides_channels(link))
            single = single and (elementwise or selects) and len(sources) == 1
        elif link.kind in ("sum", "curve"):
            direct = direct and self._is_same_shape(link)
            disjoint = sum(map(len, origins)) == len(frozenset().union(*origins))
            single = single and (direct or disjoint)
        elif link.kind == "maximum":
            direct = False
        elif link.kind == "differentiated":
            single = direct = False
        self.is_single.append(single)
        self.is_direct.append(direct)
        self.origins.append(frozenset().union(*origins))
        before = [self.is_first[one] for one in sources]
        # A maximum has no curvature in the paper's definition.
        self.is_first.append(all(before) and (link.kind == "maximum" or not link.is_curved))

    def _is_same_shape(self, link: Link) -> bool:
        shapes = {tuple(self.values.of(one).shape) for one in (*link.inputs, link.node)}
        return len(shapes) == 1

    def _divides_channels(self, link: Link) -> bool:
        name = operation(link.node)
        if name.endswith("getitem"):
            return True
        if name not in ("aten.chunk", "aten.split", "aten.split_with_sizes", "aten.slice", "aten.narrow"):
            return False
        rank = self.values.of(link.inputs[0]).dim()
        return int(Call(link.node)["dim"]) % rank == link.axis

    def _is_kinked(self, link: Link) -> bool:
        return link.kind == "curve" and link.activation is not None and bool(link.activation.kinks)

    def _start_rays(self, writes: Sequence[Write]) -> None:
        """Begin to follow |dz/dtheta| along the chain: a ray for the filters of every weight, or random directions."""
        outputs = [self.values.of(call.node) for call in self.calls]
        for place in range(len(self.unit.filters)):
            ray: list[Any] = []
            for write, call, out in zip(writes, self.calls, outputs, strict=True):
                part = next((p for p, own in self._parts_of(write, call) if own == place), None)
                ray.append(torch.zeros_like(out) if part is None else self._norms(write, part, out))
            self.rays.append(ray)
        if self._needs_probes():
            self._start_probes()

    def _parts_of(self, write: Write, call: FilterCall) -> list[tuple[Part, int]]:
        owners = [
            place for place, one in enumerate(self.unit.filters) if any(own.node is call.node for own in one.calls)
        ]
        return list(zip(write.parts, owners, strict=True))

    def _norms(self, write: Write, part: Part, output: Tensor) -> Tensor:
        """Return |x| of the rows x that a part's filters see, laid out like the output; zero for other filters."""
        one = output.new_ones(())
        if write.view is None:
            shape = [1 if axis == write.row_axis else size for axis, size in enumerate(write.shape)]
            bias = one.expand(1) if write.bias is not None else None
        else:
            shape, bias = list(write.shape), one.expand(write.bias) if write.bias is not None else None
        squares = write.evaluated(one.expand(shape), bias, self._lookup, squared=True)
        norms = squares.clamp(min=0).sqrt().expand(output.shape)
        if part.rows is None:
            return norms
        is_own = torch.zeros(write.shape[write.row_axis], dtype=output.dtype, device=output.device)
        is_own[self.tensors[part.rows].to(output.device)] = 1
        axis = next(axis for axis, size in enumerate(output.shape) if axis > 0 and size == len(is_own))
        return norms * is_own.reshape(-1, *[1] * (output.dim() - 1 - axis))

    def _needs_probes(self) -> bool:
        """Return whether a kink or a tie is behind a step that adds up several entries."""
        single = list(self.is_single)
        direct, origins = list(self.is_direct), list(self.origins)
        first = list(self.is_first)
        needed = False
        for link in self.unit.links:
            self._note(link)
            kinked = self._is_kinked(link) or link.kind == "maximum"
            needed = needed or (kinked and not all(self.is_single[one] for one in link.sources))
        self.is_single, self.is_direct, self.origins, self.is_first = single, direct, origins, first
        return needed

    def _reach(self, link: Link, z: Tensor) -> Tensor:
        """Return |dz/dtheta| of what an activation reads."""
        if self.depthwise is not None:
            return self._reach_of_stage(z)
        (source,) = link.sources
        step = self.at[source]
        if self.is_single[source]:
            return _root_of_squares([ray[step] for ray in self.rays])
        return _root_of_squares([probe[step] for probe in self.probes]) / math.sqrt(len(self.probes))

    def _reach_of_stage(self, z: Tensor) -> Tensor:
        """Return |dz/dtheta| of what the next activation of a depthwise chain reads."""
        assert self.depthwise is not None
        samples, channels, height, width = z.shape
        norms = self.depthwise.reach(self.slopes, (samples, height, width, channels))
        if norms.dim() > 1:
            return norms.movedim(-1, 1)
        norms, scale = norms.reshape(samples, 1, height, width), self.depthwise.scale
        return norms if scale is None else norms * scale.abs().reshape(-1, 1, 1)

    def _note_slope(self, d: Tensor) -> None:
        """Remember the slopes of an activation of a depthwise chain, as the fused form has them."""
        assert self.depthwise is not None
        scale = None if self.slopes else self.depthwise.scale
        self.slopes.append(channels_last(d) if scale is None else channels_last(d) * scale)

    @cached_property
    def lengths(self) -> Tensor:
        """|theta| of every channel."""
        return filter_lengths(self.unit, self.stored)

    def _bandwidth(self, link: Link, factor: float, like: Tensor) -> Tensor:
        """Return the bandwidth in parameters of every channel, along the axis that holds them."""
        own = self.curvature.bandwidth(self.lengths, factor).to(like)
        assert link.channels is not None
        channels = torch.from_numpy(link.channels).to(like.device)
        along = torch.where(channels >= 0, own[channels.clamp(min=0)], 1)
        return along.reshape(-1, *[1] * (like.dim() - 1 - link.axis))

    # Steps.

    def _made(self, link: Link, number: int) -> list[Step]:
        return getattr(self, f"_{link.kind}")(link, number)

    def _tangents(self, link: Link) -> dict[Any, Any]:
        return {node: Tangent(self.at[source]) for node, source in zip(link.inputs, link.sources, strict=True)}

    def _linear(self, link: Link, number: int) -> list[Step]:
        name, source = operation(link.node), self.at[link.sources[0]]
        if name in CASTS:
            return [Total((source,), (1.0,), tuple(self.values.of(link.node).shape))]
        call = self._bound(link.node, self._tangents(link))
        if name == "s3d_network.registered":
            module = copy.deepcopy(self.model.get_submodule(str(Call(link.node)["name"])))
            call = BoundCall(module, (Tangent(source),), {})
        if name in WITH_BIAS:
            return [Linear(_without_bias(call, link.node, self.values.of(link.node)))]
        if name in ("aten.masked_fill", "aten.pad", "aten.constant_pad_nd"):
            place = _names(link.node).index("value")
            given = Call(link.node)["value"]
            zero = self.values.of(link.node).new_zeros(()) if isinstance(given, fx.Node) else 0
            return [Linear(_replaced(call, place, "value", zero if name != "aten.pad" else None))]
        if link.is_shifted:
            (before,) = link.sources
            self.shifted[number] = call(
                lambda one: self._value(before) if isinstance(one, Tangent) else self._lookup(one.name)
            )
        if name.endswith("getitem") or rule_of(name).selects or name in HOMOGENEOUS:
            return [Linear(call)]
        zeros = {
            self.at[source]: torch.zeros_like(self.values.of(node))
            for node, source in zip(link.inputs, link.sources, strict=True)
        }
        offset = call(lambda one: zeros[one.step] if isinstance(one, Tangent) else self._lookup(one.name))
        if isinstance(offset, Tensor) and bool((offset != 0).any()):
            return [Linear(call, self._keep(offset))]
        return [Linear(call)]

    def _sum(self, link: Link, number: int) -> list[Step]:
        call = Call(link.node)
        factors: dict[fx.Node, float] = {}
        if call.operation in ("aten.neg", "aten.positive"):
            terms: list[tuple[Any, float]] = [(call["self"], -1.0 if call.operation == "aten.neg" else 1.0)]
        else:
            alpha = float(call.get("alpha", 1) or 1)
            signs = {"aten.add": (1.0, alpha), "aten.sub": (1.0, -alpha), "aten.rsub": (-alpha, 1.0)}[call.operation]
            terms = [(call["self"], signs[0]), (call["other"], signs[1])]
        for node, factor in terms:
            if node in link.inputs:
                factors[node] = factors.get(node, 0.0) + factor
        shape = tuple(self.values.of(link.node).shape)
        return [Total(tuple(self.at[one] for one in link.sources), tuple(factors[node] for node in link.inputs), shape)]

    def _scale(self, link: Link, number: int) -> list[Step]:
        x = self.values.of(link.node)
        scale = norm_scale(link.node, self.values.module).to(x.dtype)
        return [Scaled(self.at[link.sources[0]], self._keep(scale.reshape(-1, *[1] * (x.dim() - 2))))]

    def _value(self, number: int) -> Tensor:
        """Return the value of a call or link that may not be in the graph."""
        if number in self.shifted:
            return self.shifted[number]
        count = len(self.calls)
        node = self.calls[number].node if number < count else self.unit.links[number - count].node
        value: Tensor = self.values.of(node)
        return value

    def _is_counted(self, number: int) -> bool:
        """Return whether the curvature of a link is part of S."""
        return self.curvature.kind == "exact" or all(
            self.is_first[one] for one in self.unit.links[number - len(self.calls)].sources
        )

    def _curve(self, link: Link, number: int) -> list[Step]:
        g = self.values.gradient(link.graded)  # type: ignore[arg-type]
        if link.is_shifted:
            arguments = [self.shifted[link.sources[0]]]
        else:
            arguments = [self.values.of(node) for node in link.inputs]
        act = link.activation
        if len(arguments) == 1:
            require_same(arguments[0], g)
        second: dict[tuple[int, int], Tensor]
        if act is not None:
            first, second = self._of_activation(link, act, arguments[0], g)
        else:
            first, second = _derivatives(link.node, link.inputs, arguments, g, self.values)
        if self.depthwise is not None and not link.is_last:
            self._note_slope(first[0])
        if not self._is_counted(number):
            second = {}
        return [
            Curve(
                tuple(self.at[one] for one in link.sources),
                () if link.is_last else tuple(self._keep(one) for one in first),
                {pair: self._keep(C) for pair, C in second.items()},
                tuple(g.shape),
                link.is_last,
            )
        ]

    def _of_activation(
        self, link: Link, act: Activation, z: Tensor, g: Tensor
    ) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
        slope = None
        if link.slope is not None:
            slope = self.values.of(link.slope).to(z)
            slope = slope if len(slope) == 1 else slope.reshape(-1, *[1] * (z.dim() - 1 - link.axis))
        d = z if link.is_last else act.first(z)
        fixed = self.curvature.fixed_sharpness
        if slope is None and (fixed is not None or not act.kinks):
            return [d], {(0, 0): unchecked_curvature(g, z, activation(act, sharpness=fixed), axis=link.axis)}
        C = act.curvature(z)
        for kink in act.kinks:
            if fixed is not None:
                width = torch.full_like(z, 1 / fixed)
            else:
                width = self._bandwidth(link, KINK, z) * self._reach(link, z)
            C = C + kink.jump * kernel(z - kink.at, width)
        if slope is not None:
            d, C = act.first(z), C * (1 - slope)
            d = d + (1 - d) * slope
        return [d], {(0, 0): g * C}

    def _glu(self, link: Link, number: int) -> list[Step]:
        axis = int(Call(link.node)["dim"])
        source, begin = self.at[link.sources[0]], len(self.steps)
        a, b = self.values.of(link.inputs[0]).chunk(2, axis)
        g = self.values.gradient(link.graded)  # type: ignore[arg-type]
        s = torch.sigmoid(b)
        ds = s * (1 - s)
        second = {(0, 1): g * ds, (1, 1): g * a * ds * (1 - 2 * s)}
        if not self._is_counted(number):
            second = {}
        halves = [Linear(BoundCall(_half, (Tangent(source), axis, which), {})) for which in (0, 1)]
        curve = Curve(
            (begin, begin + 1),
            () if link.is_last else (self._keep(s), self._keep(a * ds)),
            {pair: self._keep(C) for pair, C in second.items()},
            tuple(g.shape),
            link.is_last,
        )
        return [*halves, curve]

    def _maximum(self, link: Link, number: int) -> list[Step]:
        compared = self._value(link.sources[0]) if link.is_shifted else self.values.of(link.inputs[0])
        g = self.values.gradient(link.graded)  # type: ignore[arg-type]
        winner, runner, sign = top_two(compared, link.node, tuple(g.shape))
        if link.is_shifted:
            assert link.activation is not None
            self.shifted[number] = compared.take(winner)
            g = g * link.activation.first(self.shifted[number])
        name = None
        if self.curvature.kind == "exact" and runner is not None:
            gap = (compared.take(winner) - compared.take(runner)).abs()
            fixed = self.curvature.fixed_sharpness
            if fixed is not None:
                width = torch.full_like(gap, 1 / fixed)
            else:
                width = self._bandwidth(link, TIE, g) * self._pair_reach(link, winner, runner)
            name = self._keep(sign * g * kernel(gap, width))
        found = (self._keep(winner), self._keep(winner if runner is None else runner))
        step = Maximum(self.at[link.sources[0]], *found, name, link.is_last)
        if name is not None:
            self.ties[number] = step
        return [step]

    def places_of(self, number: int) -> Tensor | None:
        """Return the flat place in the layer's output that every entry of a value depends on; None if not known."""
        count = len(self.calls)
        if number < count:
            output = self.values.of(self.calls[number].node)
            return torch.arange(output.numel(), device=output.device).view(output.shape)
        link = self.unit.links[number - count]
        before = self.places_of(link.sources[0]) if len(link.sources) == 1 else None
        name, step = operation(link.node), self.steps[self.at[number]]
        if before is None or link.kind in ("curve", "scale"):
            return before
        if link.kind == "linear" and name in VIEWS and isinstance(step, Linear):
            arranged: Tensor = step.call(lambda one: before if isinstance(one, Tangent) else self._lookup(one.name))
            return arranged
        return None

    def _pair_reach(self, link: Link, winner: Tensor, runner: Tensor) -> Tensor:
        """Return |dz_1/dtheta - dz_2/dtheta| of winners and runners-up; from random directions if it must be."""
        source = link.sources[0]
        call = self.calls[0]
        alone = len(self.calls) == 1 and len(self.unit.filters) == 1 and not call.views
        places = self.places_of(source) if alone and self.is_single[source] else None
        if places is not None:
            output = self.values.of(call.node)
            made: list[Any] = [torch.ones_like(output)]
            for step in self.steps[1:]:
                made.append(step.tangent(made, self._lookup))
            bias = self.unit.filters[0].bias is not None
            x = self.values.of(call.source)
            slopes = made[self.at[source]]
            pair = (slopes.take(winner), slopes.take(runner)), (places.take(winner), places.take(runner))
            norms = difference_norms(call.node, x, output, *pair, bias, self.values.rows(call))
            if norms is not None:
                return norms
        if not self.probes:
            self._start_probes()
        r = [probe[self.at[source]] for probe in self.probes]
        return _root_of_squares([one.take(winner) - one.take(runner) for one in r]) / math.sqrt(len(r))

    def _start_probes(self) -> None:
        """Begin to follow random directions along the chain, from the filters to the last step so far."""
        made = torch.Generator().manual_seed(0)
        like = self.values.of(self.calls[0].node)
        count = len(self.calls)
        for _ in range(PROBES):
            V = torch.randn((self.unit.width, self.unit.fan_in), generator=made, dtype=torch.float64)
            V = V.to(like.device, like.dtype)
            probe: list[Any] = [step.output(V, self._lookup) for step in self.steps[:count] if isinstance(step, Write)]
            for step in self.steps[count:]:
                probe.append(step.tangent(probe, self._lookup))
            self.probes.append(probe)

    def _differentiated(self, link: Link, number: int) -> list[Step]:
        names = tuple(self._keep(self.values.of(node)) for node in link.inputs)
        call = self._bound(link.node, {node: Kept(name) for node, name in zip(link.inputs, names, strict=True)})
        if operation(link.node) == "s3d_network.registered":
            module = copy.deepcopy(self.model.get_submodule(str(Call(link.node)["name"])))
            call = BoundCall(module, (Kept(names[0]),), {})
        if isinstance(link.node.meta.get("val"), (tuple, list)):
            inner = call.function
            call = BoundCall(lambda *a, **k: inner(*a, **k)[0], call.arguments, call.keywords)
        gradient = self._keep(self.values.gradient(link.graded)) if self._is_counted(number) else None  # type: ignore[arg-type]
        return [Differentiated(call, tuple(self.at[one] for one in link.sources), names, gradient, link.is_last)]


def _half(x: Tensor, axis: int, which: int) -> Tensor:
    return x.chunk(2, axis)[which]


def _root_of_squares(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0].square()
    for term in terms[1:]:
        total = total + term.square()
    return total.sqrt()


def _names(node: fx.Node) -> list[str]:
    return [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]


def _without_bias(call: BoundCall, node: fx.Node, like: Tensor) -> BoundCall:
    names = _names(node)
    if "bias" in names:
        return _replaced(call, names.index("bias"), "bias", None)
    # addmm and the like: the first tensor is added.
    return _replaced(call, 0, names[0], like.new_zeros(()))


def _replaced(call: BoundCall, index: int, name: str, value: Any) -> BoundCall:
    """Return a call with another value of one argument."""
    if index < len(call.arguments):
        arguments = (*call.arguments[:index], value, *call.arguments[index + 1 :])
        return BoundCall(call.function, arguments, call.keywords)
    if name in call.keywords:
        return BoundCall(call.function, call.arguments, {**call.keywords, name: value})
    return call


def _viewed(nodes: Sequence[fx.Node]) -> Callable[[Tensor], Tensor]:
    """Return the function that computes what these calls make of one stored tensor."""

    def view(weight: Tensor) -> Tensor:
        made: dict[fx.Node, Any] = {}
        for node in nodes:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda one: made.get(one, weight))
            made[node] = node.target(*arguments, **keywords)  # type: ignore[operator]
        result: Tensor = made[nodes[-1]]
        return result

    return view


def _derivatives(
    node: fx.Node, inputs: Sequence[fx.Node], arguments: Sequence[Tensor], g: Tensor, values: Values
) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
    """Return the first derivatives of a call on corresponding entries, and g times its second derivatives."""
    with torch.enable_grad():
        leaves = [one.expand(g.shape).detach().clone().requires_grad_() for one in arguments]
        at = dict(zip(inputs, leaves, strict=True))
        filled, keywords = fx.map_arg((node.args, node.kwargs), lambda one: at[one] if one in at else values.of(one))
        result = node.target(*filled, **keywords)  # type: ignore[operator]
        first = torch.autograd.grad(result.sum(), leaves, create_graph=True, materialize_grads=True, allow_unused=True)
        second: dict[tuple[int, int], Tensor] = {}
        for i, d in enumerate(first):
            if not d.requires_grad:
                continue
            rows = torch.autograd.grad(
                d.sum(), leaves[i:], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for j, h in enumerate(rows, start=i):
                if bool((h != 0).any()):
                    second[i, j] = g * h.detach()
    return [d.detach() for d in first], second
