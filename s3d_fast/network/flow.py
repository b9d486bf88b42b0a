"""Follows channels through an exported graph: which axes of which tensors hold them, call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from s3d_fast.network.calls import Call, UnknownSize, shape
from s3d_fast.network.slots import Array, Slots


@dataclass(frozen=True)
class Value:
    """A tensor in the graph: the slots along those of its axes that hold channels.

    A value that is computed from stored tensors alone (`reads` is not None) can be a weight. If such an axis is summed
    over, copies of a channel must be read with weights that sum to 1: `reads` holds the slots of the stored tensors
    whose entries are then scaled. An axis without an entry in `reads` cannot be scaled.

    Along the axes in `uniform` all entries are equal, as after an expansion: they go with any number of channels, and
    whether the code makes as many is for the proof to show.
    """

    axes: Mapping[int, Array] = field(default_factory=dict)
    reads: Mapping[int, tuple[Array, ...]] | None = None
    uniform: frozenset[int] = frozenset()

    @property
    def is_stored(self) -> bool:
        """Whether the value is computed from stored tensors alone."""
        return self.reads is not None

    def moved(self, axis_of: Mapping[int, int]) -> Value:
        """Return the value after its axes have moved; axes that are not in the mapping are gone."""
        axes = {axis_of[axis]: slots for axis, slots in self.axes.items() if axis in axis_of}
        reads = None
        if self.reads is not None:
            reads = {axis_of[axis]: slots for axis, slots in self.reads.items() if axis in axis_of}
        return Value(axes, reads, frozenset(axis_of[axis] for axis in self.uniform if axis in axis_of))

    def indexed(self, axis: int, index: Array | slice) -> Value:
        """Return the value with other entries along one axis."""
        axes = {a: slots[index] if a == axis else slots for a, slots in self.axes.items()}
        reads = None
        if self.reads is not None:
            reads = {a: tuple(one[index] for one in slots) if a == axis else slots for a, slots in self.reads.items()}
        return Value(axes, reads)


NOTHING = Value()
Values = Value | tuple[Value, ...]


@dataclass(frozen=True)
class Writer:
    """A call that makes channels: the rows of a weight, one per channel."""

    node: fx.Node
    kind: str
    weight: fx.Node
    slots: Array  # of the rows
    source: fx.Node  # what it reads
    bias: fx.Node | None


@dataclass(frozen=True)
class Product:
    """Multiply-accumulates of one call: `factor` times the lengths of the axes that hold channels."""

    node: fx.Node
    factor: float
    axes: tuple[Array, ...]


class Flow:
    """The state of the analysis; rules read it and add to it.

    Args:
        tensors: the parameters and buffers that the graph gets, by node, with their names.
    """

    def __init__(self, tensors: Mapping[fx.Node, tuple[str, Tensor]]) -> None:
        self.slots = Slots()
        self.values: dict[fx.Node, Values] = {}
        self.stored: dict[str, dict[int, Array]] = {}
        self.read: list[Array] = []
        self.copied: list[Array] = []
        self.shared: list[Array] = []
        self.writers: list[Writer] = []
        self.curved: list[tuple[fx.Node, Array]] = []
        self.products: list[Product] = []
        for node, (name, tensor) in tensors.items():
            if name not in self.stored:
                self.stored[name] = {axis: self.slots.fresh(size) for axis, size in enumerate(tensor.shape)}
                if ".parametrizations." in f".{name}" and not isinstance(tensor, nn.Parameter):
                    # It belongs to the formula: `orthogonal` keeps a matrix there that has the weight's rows.
                    for slots in self.stored[name].values():
                        self.slots.block(slots, f"its weight is computed from the buffer '{name}' of a parametrization")
            axes = self.stored[name]
            self.values[node] = Value(axes, {axis: (slots,) for axis, slots in axes.items()})

    def value(self, node: object) -> Value:
        """Return the value of a node that is one tensor."""
        found = self.values.get(node, NOTHING) if isinstance(node, fx.Node) else NOTHING
        return found if isinstance(found, Value) else NOTHING

    def block(self, value: Value, reason: str, axes: Sequence[int] | None = None) -> None:
        """Block the channels of a value, along all axes or the given ones."""
        for axis, slots in value.axes.items():
            if axes is None or axis in axes:
                self.slots.block(slots, reason)

    def block_inputs(self, call: Call, reason: str) -> Value:
        """Block the channels of all tensors that a call gets; its result holds none."""
        for node in call.tensors:
            self.block(self.value(node), reason)
        return NOTHING

    def use(self, value: Value, axes: Sequence[int] | None = None) -> None:
        """Record that entries of stored tensors are used once for every channel: copies repeat them."""
        if value.is_stored:
            self.copied += [slots for axis, slots in value.axes.items() if axes is None or axis in axes]

    def elementwise(self, call: Call, nodes: Sequence[fx.Node], linear: bool, product: bool = False) -> Value:
        """Follow an operation on corresponding entries of tensors that are broadcast to one shape.

        Args:
            linear: whether the result is linear in every channel.
            product: whether the result is a product, so that scaling one factor scales it.
        """
        out = call.shape
        values = [self.value(node) for node in nodes]
        ranks = [len(shape(node)) for node in nodes]
        axes: dict[int, Array] = {}
        reads: dict[int, tuple[Array, ...]] = {}
        is_stored = bool(nodes) and all(value.is_stored for value in values)
        uniform = set()
        for axis, size in enumerate(out):
            held: list[tuple[Value, int]] = []
            others = False
            for node, value, rank in zip(nodes, values, ranks, strict=True):
                own = axis - (len(out) - rank)
                if own < 0:
                    continue
                length = shape(node)[own]
                if own in value.axes and length == size and not (value.is_stored and size == 1):
                    held.append((value, own))
                elif own in value.axes and length == 1 and not value.is_stored:
                    self.slots.block(value.axes[own], f"its only channel is broadcast by {call.words}")
                elif length == size and size > 1 and own not in value.uniform:
                    others = True
            if not held:
                if not others:
                    uniform.add(axis)
                continue
            first = held[0][0].axes[held[0][1]]
            for value, own in held[1:]:
                self.slots.tie(first, value.axes[own])
            if others:
                self.slots.block(first, f"{call.words} ties it to a tensor that no layer makes")
                if all(value.is_stored for value, _ in held):
                    # Such as a mask over positions, which are no channels.
                    continue
            if not is_stored:
                for value, own in held:
                    self.use(value, [own])
            axes[axis] = first
            if is_stored:
                found = [value.reads.get(own) for value, own in held if value.reads is not None]
                if product and found[0] is not None:
                    reads[axis] = found[0]
                elif linear and len(held) == len(nodes) and all(one is not None for one in found):
                    reads[axis] = tuple(slots for one in found if one is not None for slots in one)
        result = Value(axes, reads if is_stored else None, frozenset(uniform))
        if not linear and not is_stored:
            self.note_curved(call.node, result)
        return result

    def divide(self, call: Call, value: Value, axis: int, starts: Sequence[int]) -> None:
        """Follow code that divides an axis at some places.

        Equal parts stay equal only if all of them grow alike, so their channels are tied. Other places would have to
        move by as much as the channels before them grow, which code does not do.
        """
        slots = value.axes.get(axis)
        if slots is None:
            return
        part = min((start for start in starts if start > 0), default=len(slots))
        if len(slots) % part or any(start % part for start in starts):
            self.slots.block(slots, f"{call.words} divides its channels at a place that does not grow along")
            return
        for start in range(part, len(slots), part):
            self.slots.tie(slots[:part], slots[start : start + part])

    def note_curved(self, node: fx.Node, value: Value) -> None:
        """Record that a call is not linear in the channels of its result."""
        self.curved += [(node, slots) for slots in value.axes.values()]

    def contract(
        self,
        call: Call,
        operands: Sequence[tuple[fx.Node, Sequence[object]]],
        result: Sequence[object],
        factor: float = 1.0,
    ) -> Value:
        """Follow a sum of products, as in einsum: every axis of every operand has a label.

        Args:
            operands: nodes with the labels of their axes; None for an axis that is neither shared nor kept.
            result: the labels of the result's axes.
            factor: the multiply-accumulates beyond the product of the lengths of all labels.
        """
        places: dict[object, list[tuple[Value, int, int]]] = {}
        for node, labels in operands:
            value, own = self.value(node), shape(node)
            for axis, label in enumerate(labels):
                if label is not None:
                    places.setdefault(label, []).append((value, axis, own[axis]))
        is_stored = all(self.value(node).is_stored for node, _ in operands)
        axes: dict[int, Array] = {}
        reads: dict[int, tuple[Array, ...]] = {}
        lengths: list[Array] = []
        total = factor
        for label, found in places.items():
            size = max(length for _, _, length in found)
            slots = self._label(call, label, found, size, label in result, is_stored)
            if slots is None:
                total *= size
                continue
            lengths.append(slots)
            if label in result:
                axis = list(result).index(label)
                axes[axis] = slots
                if is_stored:
                    kept = [value.reads.get(a) for value, a, length in found if value.reads is not None]
                    if kept and kept[0] is not None:
                        reads[axis] = kept[0]
        if not is_stored:
            self.products.append(Product(call.node, total, tuple(lengths)))
        return Value(axes, reads if is_stored else None)

    def _label(
        self,
        call: Call,
        label: object,
        found: Sequence[tuple[Value, int, int]],
        size: int,
        is_kept: bool,
        is_stored: bool,
    ) -> Array | None:
        """Return the slots along one label of a sum of products, after tying its operands."""
        held = [(value, axis) for value, axis, length in found if axis in value.axes and length == size]
        plain = [
            length
            for value, axis, length in found
            if axis not in value.axes and length == size and size > 1 and not (is_kept and axis in value.uniform)
        ]
        if not held:
            return None
        first = held[0][0].axes[held[0][1]]
        for value, axis in held[1:]:
            self.slots.tie(first, value.axes[axis])
        if is_kept:
            if plain:
                self.slots.block(first, f"{call.words} ties it to a tensor that no layer makes")
            if not is_stored:
                for value, axis in held:
                    self.use(value, [axis])
            return first
        weights = [(value, axis) for value, axis in held if value.is_stored]
        if is_stored or len(held) + len(plain) == 1:
            self.slots.block(first, f"{call.words} adds up its channels")
        elif len(weights) == len(held) == 1:
            # Nothing that layers make is read: the columns stay as they are.
            self.slots.block(first, f"{call.words} reads channels that no layer makes")
        elif len(weights) == 1:
            value, axis = weights[0]
            assert value.reads is not None
            if axis in value.reads:
                self.read += value.reads[axis]
            else:
                self.slots.block(first, f"the weight of its consumer, {call.words}, is computed, not stored")
            if plain:
                self.slots.block(first, f"{call.words} ties it to a tensor that no layer makes")
        else:
            self.slots.block(first, f"{call.words} multiplies its channels by those of another tensor and adds them up")
        return first

    def run(self, call: Call, follow) -> Values:  # type: ignore[no-untyped-def]
        """Follow one call by its rule; a size that is not known blocks."""
        try:
            return follow(call, self)
        except UnknownSize as error:
            return self.block_inputs(call, f"{call.words}: {error}")
