"""From channels that were followed through a graph to units: channels with the same tensors are split alike."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, fx, nn

from s3d_fast.network.calls import Call, is_tensor, operation, place, shape
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.export import Exported
from s3d_fast.network.flow import Flow, Value, Writer
from s3d_fast.network.graph import (
    READ,
    REPEATED,
    SHARED,
    AxisLayout,
    AxisSize,
    FilterCall,
    Filters,
    Graph,
    Layer,
    SizedProduct,
    Unit,
    sizes_of,
    stored_tensors,
)
from s3d_fast.network.links import SUMS, ChainError, Holds, Link, LinkFinder
from s3d_fast.network.registered import custom_layer
from s3d_fast.network.rules import rule_of
from s3d_fast.network.slots import Array


@dataclass
class _Source:
    """Where slots of a stored tensor stand."""

    tensor: str
    axis: int
    positions: Array


class Analysis:
    """Follows the channels of an exported model once; makes its graph, also again without some units."""

    def __init__(self, model: nn.Module, exported: Exported) -> None:
        self.model, self.exported, self.module = model, exported, exported.module
        self.stored = stored_tensors(model)
        canonical: dict[int, str] = {}
        for name, tensor in self.stored.items():
            canonical.setdefault(id(tensor), name)
        self.names: dict[fx.Node, str] = {}
        tensors: dict[fx.Node, tuple[str, Tensor]] = {}
        for node in self.module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "get_attr" and isinstance(value, Tensor) and id(value) in canonical:
                self.names[node] = canonical[id(value)]
                tensors[node] = (canonical[id(value)], value)
        self.flow = Flow(tensors)
        self.kinds: dict[str, str] = {}
        # The channels of every unit of the last graph.
        self.channels: dict[str, Array] = {}
        for node in self.module.graph.nodes:
            if node.op == "call_function":
                self._follow(node)
            elif node.op == "output":
                for argument in node.all_input_nodes:
                    value = self.flow.values.get(argument)
                    for one in value if isinstance(value, tuple) else (value or Value(),):
                        self.flow.block(one, "it is the model's output")
        self.finder = LinkFinder(self.module.graph.nodes, [node for node, _ in self.flow.curved])

    def graph(self, refused: Mapping[str, str] | None = None) -> Graph:
        """Return the graph; units of the last graph that are refused are left out, with the reasons given."""
        units = _Units(self)
        for name, reason in (refused or {}).items():
            units.reasons.update(dict.fromkeys(self.channels[name].tolist(), reason))
        return units.graph()

    def _follow(self, node: fx.Node) -> None:
        name = operation(node)
        if name.endswith("operator.getitem"):
            value = self.flow.values.get(node.args[0])  # type: ignore[arg-type]
            index = node.args[1]
            if isinstance(value, tuple) and isinstance(index, int) and index < len(value):
                self.flow.values[node] = value[index]
            return
        held = node.meta.get("val")
        if not isinstance(held, (Tensor, tuple, list)):
            return
        call, rule = Call(node), rule_of(name)
        self.flow.values[node] = self.flow.run(call, rule.follow)
        if rule.kind:
            kind = rule.kind
            if kind == "conv" and int(call["groups"]) == shape(call["input"])[1] > 1:
                kind = "depthwise"
            for argument in call.tensors:
                if argument in self.names:
                    self.kinds.setdefault(self.names[argument], kind)


class _Units:
    """Groups channels into units, once all of them have been followed."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis, flow = analysis, analysis.flow
        self.flow: Flow = flow
        found = flow.slots.channels()
        self.of_slot, self.reasons = found.of_slot, found.reasons
        self.count = int(self.of_slot.max(initial=-1)) + 1
        self.role = np.zeros(flow.slots.count, np.int8)
        for slots in flow.read:
            self.role[slots] = READ
        for slots in flow.shared:
            self.role[slots] = SHARED
        self._block_conflicts()
        self.starts: list[int] = []
        self.homes: list[tuple[str, int]] = []
        for tensor, axes in flow.stored.items():
            for axis, slots in axes.items():
                if len(slots):
                    self.starts.append(int(slots[0]))
                    self.homes.append((tensor, axis))
        self.makers: dict[int, list[Writer]] = {}
        self.is_read = self._marked(flow.read)
        self.is_curved = self._marked([slots for _, slots in flow.curved])

    def _block_conflicts(self) -> None:
        """Block channels with a stored entry that is a row for one call and a column for another."""
        copied = np.zeros(self.flow.slots.count, bool)
        for slots in self.flow.copied:
            copied[slots] = True
        reason = "a weight that it uses is shared: one layer reads it, another makes channels of it"
        for channel in np.unique(self.of_slot[copied & (self.role == READ)]).tolist():
            self.reasons[channel] = reason

    def _marked(self, arrays: list[Array]) -> Array:
        marked = np.zeros(self.count, bool)
        for slots in arrays:
            marked[self.of_slot[slots]] = True
        return marked

    def source(self, slots: Array) -> _Source | None:
        """Return where in which stored tensor these slots stand; None if they come from several."""
        if len(slots) == 0:
            return None
        homes = np.searchsorted(self.starts, slots, side="right") - 1
        home = int(homes[0])
        if (homes != home).any() or home < 0:
            return None
        tensor, axis = self.homes[home]
        return _Source(tensor, axis, slots - self.starts[home])

    def layer_name(self, tensor: str) -> str:
        """Return the name of the layer that a tensor belongs to; a bare parameter is its own layer."""
        if ".parametrizations." in f".{tensor}":
            return tensor.split(".parametrizations.")[0]
        owner, _, leaf = tensor.rpartition(".")
        if not owner or leaf in ("weight", "bias"):
            return owner or tensor
        module = self.analysis.model.get_submodule(owner)
        is_list = isinstance(module, (nn.ParameterList, nn.ParameterDict))
        is_layer = custom_layer(module) is not None or isinstance(module, EdgeConv) or not module._modules
        return owner if is_layer and not is_list else tensor

    def reason(self, channel: int) -> str | None:
        """Return why a channel cannot be split; None if it can."""
        if channel in self.reasons:
            return self.reasons[channel]
        if not self.is_read[channel]:
            return "nothing consumes it"
        if not self.is_curved[channel]:
            return "no activation follows it"
        return None

    def graph(self) -> Graph:
        signatures = self._signatures()
        unit_of = np.full(self.count, -1)
        channel_of = np.full(self.count, -1)
        units: list[Unit] = []
        for writer in self.flow.writers:
            if self.source(writer.slots) is None:
                reason = "its weight is put together from several tensors"
                self.reasons |= {c: reason for c in self.of_slot[writer.slots].tolist() if unit_of[c] < 0}
                continue
            for channels in self._groups(writer, signatures, unit_of):
                unit_of[channels], channel_of[channels] = len(units), np.arange(len(channels))
                units.append(self._unit(channels, [unit.name for unit in units], unit_of))
                self.analysis.channels[units[-1].name] = channels
        units = self._described(units, unit_of)
        tensors = self._tensors(unit_of, channel_of)
        sizes = {(tensor, axis): self._size(slots, unit_of, units) for tensor, axis, slots in self._axes()}
        stored = self.analysis.stored
        parameters = [
            self._parameter_size(name, tensor, sizes) for name, tensor in self.analysis.model.named_parameters()
        ]
        batch = float(self.analysis.exported.batch or 1)
        products = [
            SizedProduct(
                product.factor / batch,
                tuple(self._size(slots, unit_of, units) for slots in product.axes),
            )
            for product in self.flow.products
        ]
        used = list(dict.fromkeys(self.analysis.names.values()))
        shared = {id(stored[name]) for name in used}
        unused = tuple(name for name, p in self.analysis.model.named_parameters() if id(p) not in shared)
        return Graph(
            module=self.analysis.module,
            units={unit.name: unit for unit in units},
            layers=self._layers(units, unit_of),
            tensors=tensors,
            parameters=parameters,
            products=products,
            unused=unused,
            sizes={
                owner: sizes_of(self.analysis.model.get_submodule(owner))
                for owner in dict.fromkeys(name.rpartition(".")[0] for name in used)
            },
        )

    def _axes(self) -> Iterator[tuple[str, int, Array]]:
        for tensor, axes in self.flow.stored.items():
            for axis, slots in axes.items():
                yield tensor, axis, slots

    def _signatures(self) -> dict[int, list[tuple[int, int, int]]]:
        """Return, for every channel that can be split, which axes of which tensors hold how many of its entries."""
        wanted = self.is_read & self.is_curved
        if self.reasons:
            wanted[list(self.reasons)] = False
        found: dict[int, list[tuple[int, int, int]]] = {}
        for index, (_, _, slots) in enumerate(self._axes()):
            channels = self.of_slot[slots]
            keep = wanted[channels]
            if not keep.any():
                continue
            codes = channels[keep] * 4 + self.role[slots[keep]]
            distinct, counts = np.unique(codes, return_counts=True)
            for code, count in zip(distinct.tolist(), counts.tolist(), strict=True):
                found.setdefault(code // 4, []).append((index, code % 4, count))
        return found

    def _groups(
        self, writer: Writer, signatures: Mapping[int, list[tuple[int, int, int]]], unit_of: Array
    ) -> list[Array]:
        """Return the channels that a writer makes and no unit has yet, grouped by what holds them."""
        groups: dict[object, list[int]] = {}
        for channel in dict.fromkeys(self.of_slot[writer.slots].tolist()):
            if unit_of[channel] < 0 and channel in signatures and channel not in self.reasons:
                groups.setdefault(tuple(signatures[channel]), []).append(channel)
        return [np.array(channels) for channels in groups.values()]

    def _writers(self, channel: int) -> list[Writer]:
        """Return the calls that make a channel, in the order of the graph."""
        if not self.makers:
            for writer in self.flow.writers:
                for made in set(self.of_slot[writer.slots].tolist()):
                    self.makers.setdefault(made, []).append(writer)
        return self.makers[channel]

    def _unit(self, channels: Array, taken: list[str], unit_of: Array) -> Unit:
        """Return the unit of some channels, with the filters that move and its chain."""
        writers = [one for one in self._writers(int(channels[0])) if self.source(one.slots) is not None]
        number = int(unit_of[channels[0]])

        def holds(node: fx.Node) -> tuple[int, Array] | None:
            return self._held(node, number, unit_of, channels)

        movable = [one for one in writers if self._views(one) is not None]
        gates = self._gates(movable, holds)
        moving = [one for one in movable if one not in gates]
        links: list[Link] = []
        if moving:
            filters = self._filters(moving, channels)
            links, why_not = self._links(filters, writers, holds)
        else:
            filters, why_not = self._filters(writers[:1], channels), "its weight is computed, not stored"
        name = self.layer_name(filters[0].weight)
        if name in taken:
            name = f"{name}[{int(filters[0].rows.min())}:{int(filters[0].rows.max()) + 1}]"
        before = itertools.takewhile(lambda link: not link.is_curved, links)
        norm = next((link for link in before if link.kind == "scale"), None)
        acts = [link.activation for link in links if link.activation is not None]
        return Unit(
            name=name,
            kind=self._kind((moving or writers)[0], filters[0].weight),
            width=len(channels),
            filters=tuple(filters),
            links=tuple(links),
            norm=None if norm is None else self.layer_name(self._tensor_name(norm.node, "running_var")),
            activation=acts[0] if acts else None,
            uncaptured=why_not,
        )

    def _links(self, filters: Sequence[Filters], writers: Sequence[Writer], holds: Holds) -> tuple[list[Link], str]:
        """Return the links of a chain; or why its curvature cannot be computed."""
        calls = [call.node for one in filters for call in one.calls]
        if len(set(calls)) < len(calls):
            # One call makes a channel twice, as before a division into halves: its result is one tensor.
            calls = list(dict.fromkeys(calls))
        try:
            links = self.analysis.finder.find(calls, [one.node for one in writers if one.node not in calls], holds)
        except ChainError as error:
            return [], str(error)
        return links, "" if links else "no activation follows it"

    def _held(self, node: fx.Node, number: int, unit_of: Array, channels: Array) -> tuple[int, Array] | None:
        """Return the axis of a node's result that holds channels of a unit, and which along it."""
        values = self.flow.values.get(node)
        for value in values if isinstance(values, tuple) else (values,):
            if not isinstance(value, Value) or value.is_stored:
                continue
            for axis, slots in value.axes.items():
                of = self.of_slot[slots]
                mine = unit_of[of] == number
                if mine.any():
                    order = np.argsort(channels)
                    places = order[np.searchsorted(channels[order], np.where(mine, of, channels[0]))]
                    return axis, np.where(mine, places, -1)
        return None

    def _views(self, writer: Writer) -> tuple[fx.Node, ...] | None:
        """Return the calls that make a writer's weight from a stored tensor; None if they are not linear in it."""
        found: set[fx.Node] = set()
        roots: set[str] = set()
        stack = [writer.weight]
        while stack:
            node = stack.pop()
            if node in self.analysis.names:
                roots.add(self.analysis.names[node])
                continue
            name = operation(node)
            linear = name.endswith("getitem") or rule_of(name).selects or name in SUMS
            tensors = [one for one in node.all_input_nodes if is_tensor(one) or _is_several(one)]
            if node.op != "call_function" or not linear or (name in SUMS and len(tensors) != len(Call(node).tensors)):
                return None
            if name in ("aten.add", "aten.sub") and len(tensors) != 2:
                return None
            if node not in found:
                found.add(node)
                stack += tensors
        order = self.analysis.finder.order
        return tuple(sorted(found, key=order.__getitem__)) if len(roots) == 1 else None

    def _filters(self, writers: Sequence[Writer], channels: Array) -> list[Filters]:
        """Return the filters that some calls use, those of one weight together."""
        found: dict[object, Filters] = {}
        for writer in writers:
            made = self.of_slot[writer.slots]
            places: dict[int, list[int]] = {}
            for row, channel in enumerate(made.tolist()):
                places.setdefault(channel, []).append(row)
            # All channels of a unit have the same number of rows in a weight: units are made so.
            for turn in range(len(places[int(channels[0])])):
                rows = np.array([places[channel][turn] for channel in channels.tolist()])
                source = self.source(writer.slots[rows])
                assert source is not None
                views = self._views(writer) or ()
                call = FilterCall(writer.node, writer.source, writer.weight, views, writer.bias)
                key = (source.tensor, source.axis, source.positions.tobytes())
                if key in found:
                    found[key] = replace(found[key], calls=(*found[key].calls, call))
                    continue
                tensor = self.analysis.stored[source.tensor]
                bias = self._bias(writer, rows, source)
                width = tensor.numel() // tensor.shape[source.axis] + (bias is not None)
                found[key] = Filters(source.tensor, source.axis, source.positions, bias, width, (call,))
        return self._own_biases(list(found.values()))

    def _own_biases(self, filters: list[Filters]) -> list[Filters]:
        """Leave out biases that several weights share, or that not every call of a weight adds: they do not move."""
        owners: dict[object, set[object]] = {}
        for one in filters:
            if one.bias is not None:
                owners.setdefault(one.bias, set()).add(one.weight)
        result = []
        for one in filters:
            names = {None if call.bias is None else self.analysis.names.get(call.bias) for call in one.calls}
            alone = one.bias is not None and len(owners[one.bias]) == 1 and names == {one.bias}
            if one.bias is not None and not alone:
                one = replace(one, bias=None, fan_in=one.fan_in - 1)
            result.append(one)
        return result

    def _gates(self, writers: Sequence[Writer], holds: Holds) -> list[Writer]:
        """Return the writers that multiply the channels they are computed from: such gates are held fixed."""
        if len(writers) < 2:
            return []
        origins: dict[fx.Node, frozenset[int]] = {}
        for number, writer in enumerate(writers):
            origins[writer.node] = origins.get(writer.node, frozenset()) | {number}
        order = self.analysis.finder.order
        queue = [(order[user], user) for node in origins for user in node.users]
        heapq.heapify(queue)
        gates: set[int] = set()
        made_by = {writer.node for writer in writers}
        seen: set[fx.Node] = set()
        while queue:
            _, node = heapq.heappop(queue)
            if node in seen or node in made_by or node.op != "call_function":
                continue
            seen.add(node)
            if holds(node) is None:
                continue
            given = [origins[one] for one in node.all_input_nodes if one in origins]
            if not given:
                continue
            origins[node] = frozenset().union(*given)
            for user in node.users:
                heapq.heappush(queue, (order[user], user))
            if len(set(given)) > 1 and node in self.analysis.finder.curved:
                for one in given:
                    others = frozenset().union(*(other for other in given if other is not one)) - one
                    nodes = {writers[other].node for other in others}
                    gates |= {w for w in one - others if self._depends(writers[w].source, nodes)}
        return [writers[number] for number in gates] if len(gates) < len(writers) else []

    @staticmethod
    def _depends(node: fx.Node, on: set[fx.Node]) -> bool:
        seen, stack = {node}, [node]
        while stack:
            one = stack.pop()
            if one in on:
                return True
            new = [other for other in one.all_input_nodes if other not in seen]
            seen.update(new)
            stack += new
        return False

    def _submodule(self, name: str) -> nn.Module | None:
        try:
            return self.analysis.model.get_submodule(name)
        except AttributeError:
            return None

    def _kind(self, writer: Writer, tensor: str) -> str:
        return "edgeconv" if isinstance(self._submodule(self.layer_name(tensor)), EdgeConv) else writer.kind

    def _tensor_name(self, node: fx.Node, argument: str) -> str:
        given = Call(node)[argument]
        return self.analysis.names.get(given, place(node))

    def _bias(self, writer: Writer, rows: Array, source: _Source) -> str | None:
        """Return the name of the bias if it is stored, one number for each of the weight's rows."""
        if writer.bias is None or writer.bias not in self.analysis.names:
            return None
        name = self.analysis.names[writer.bias]
        tensor = self.analysis.stored[name]
        fits = tensor.dim() == 1 and len(tensor) == self.analysis.stored[source.tensor].shape[source.axis]
        return name if fits and len(rows) else None

    def _described(self, units: list[Unit], unit_of: Array) -> list[Unit]:
        """Return the units with the names of their followers and consumers."""
        followers: list[list[str]] = [[] for _ in units]
        consumers: list[list[str]] = [[] for _ in units]
        for tensor, _, slots in self._axes():
            numbers, is_read = unit_of[self.of_slot[slots]], self.role[slots] == READ
            for number in np.unique(numbers[numbers >= 0]).tolist():
                if is_read[numbers == number].any():
                    consumers[number].append(self.layer_name(tensor))
                elif tensor not in (units[number].weight, units[number].bias):
                    followers[number].append(self.layer_name(tensor))
        return [
            replace(
                unit,
                followers=tuple(name for name in dict.fromkeys(followers[number]) if name != unit.name),
                consumers=tuple(dict.fromkeys(consumers[number])),
            )
            for number, unit in enumerate(units)
        ]

    def _tensors(self, unit_of: Array, channel_of: Array) -> dict[str, dict[int, AxisLayout]]:
        found: dict[str, dict[int, AxisLayout]] = {}
        for tensor, axis, slots in self._axes():
            channels = self.of_slot[slots]
            unit = unit_of[channels]
            if (unit >= 0).any():
                role = np.where(unit >= 0, self.role[slots], REPEATED)
                found.setdefault(tensor, {})[axis] = AxisLayout(unit, channel_of[channels], role)
        return found

    def _size(self, slots: Array, unit_of: Array, units: list[Unit]) -> AxisSize:
        of = unit_of[self.of_slot[slots]]
        numbers, counts = np.unique(of[of >= 0], return_counts=True)
        per_channel = {
            units[number].name: count // units[number].width
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        }
        return AxisSize(int((of < 0).sum()), per_channel)

    def _parameter_size(self, name: str, tensor: Tensor, sizes: Mapping[tuple[str, int], AxisSize]) -> SizedProduct:
        factor, axes = 1.0, []
        for axis, length in enumerate(tensor.shape):
            size = sizes.get((name, axis))
            if size is None or not size.per_channel:
                factor *= length
            else:
                axes.append(size)
        return SizedProduct(factor, tuple(axes))

    def _layers(self, units: list[Unit], unit_of: Array) -> dict[str, Layer]:
        """Return every layer that holds channels, in the order of the graph."""
        by_name = {unit.name: unit for unit in units}
        writers: dict[str, Writer] = {}
        for one in self.flow.writers:
            source = self.source(one.slots)
            if source is not None:
                writers.setdefault(self.layer_name(source.tensor), one)
        found: dict[str, Layer] = {}
        for tensor in self.flow.stored:
            name, kind = self.layer_name(tensor), self.analysis.kinds.get(tensor)
            if kind is None or name in found:
                continue
            writer = writers.get(name)
            kind = self._kind(writer, tensor) if writer is not None else kind
            shape_ = self.analysis.stored[tensor].shape
            width = len(writer.slots) if writer is not None else (shape_[0] if shape_ else 1)
            reason = None
            if name not in by_name and writer is not None:
                channels = self.of_slot[writer.slots].tolist()
                reason = next((why for channel in channels if (why := self.reason(channel))), None)
                if reason is None:
                    along = [units[unit_of[channel]].name for channel in channels if unit_of[channel] >= 0]
                    reason = f"it is split along with '{along[0]}'" if along else None
            found[name] = Layer(name, kind, width, reason, writer is not None)
        for unit in units:
            if unit.name not in found:
                found[unit.name] = Layer(unit.name, unit.kind, unit.width, None, True)
        return found


def _is_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))
