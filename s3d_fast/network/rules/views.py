"""Rules of operations that rearrange entries: views, slices, concatenations, gathers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from s3d_fast.network.calls import Call, is_tensor, number, shape
from s3d_fast.network.flow import Flow, Value, Values
from s3d_fast.network.rules.rule import Rule, rule
from s3d_fast.network.slots import Array


class _View(Rule):
    selects = True


@rule(
    *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "view_copy", "reshape_as", "view_as", "ravel"),
    *("_reshape_alias", "_reshape_copy"),
)
class Reshape(_View):
    """Axes that are merged or divided; the entries keep their order."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        return reshaped(call, flow, flow.value(node), shape(node), call.shape)


def reshaped(call: Call, flow: Flow, value: Value, before: tuple[int, ...], after: tuple[int, ...]) -> Value:
    """Return a value after a reshape; channels that end up along two axes, or along a part of one, are blocked."""
    axes: dict[int, Array] = {}
    reads: dict[int, tuple[Array, ...]] = {}
    for old, new in _groups(before, after):
        held = [axis for axis in old if axis in value.axes and (before[axis] > 1 or not value.is_stored)]
        if not held:
            continue
        lengths, targets = [before[axis] for axis in old], [after[axis] for axis in new]
        axis = held[0]
        target = None
        if len([a for a in held if before[a] > 1 or len(held) == 1]) == 1:
            axis = next((a for a in held if before[a] > 1), axis)
            target = _target(lengths, old.index(axis), targets)
        place, step = old.index(axis), 1
        if target is None:
            # Channels that were flattened together with positions may come apart from them again.
            step = _run(value.axes[axis])
            lengths[place : place + 1] = [lengths[place] // step, step]
            target = _target(lengths, place, targets) if step > 1 else None
        if target is None:
            for one in held:
                flow.slots.block(value.axes[one], f"{call.words} rearranges its channels")
            continue

        def spread(slots: Array) -> Array:
            shown = slots[::step].reshape([-1 if a == place else 1 for a in range(len(lengths))])  # noqa: B023
            full = np.broadcast_to(shown, lengths).reshape(targets)  # noqa: B023
            return full[tuple(slice(None) if i == target else 0 for i in range(len(targets)))]  # noqa: B023

        axes[new[target]] = spread(value.axes[axis])
        if value.reads is not None and axis in value.reads:
            reads[new[target]] = tuple(spread(slots) for slots in value.reads[axis])
    return Value(axes, reads if value.is_stored else None)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of axes, old and new, that hold the same entries."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [], []
        left = right = 1
        if i < len(before):
            old.append(i)
            left, i = before[i], i + 1
        if j < len(after):
            new.append(j)
            right, j = after[j], j + 1
        while left != right:
            if left < right and i < len(before):
                old.append(i)
                left, i = left * before[i], i + 1
            elif j < len(after):
                new.append(j)
                right, j = right * after[j], j + 1
            else:
                break
        groups.append((old, new))
    return groups


def _run(slots: Array) -> int:
    """Return the common length of the runs of equal slots; 1 if they differ."""
    starts = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
    lengths = np.diff(np.append(starts, len(slots)))
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 1


def _target(lengths: Sequence[int], axis: int, targets: Sequence[int]) -> int | None:
    """Return the new axis that grows if an old one does; None if no single one would."""
    more = [2 * length if a == axis else length for a, length in enumerate(lengths)]
    index = np.broadcast_to(np.arange(more[axis]).reshape([-1 if a == axis else 1 for a in range(len(more))]), more)
    for place in range(len(targets)):
        grown = [2 * length if a == place else length for a, length in enumerate(targets)]
        if np.prod(grown) != index.size:
            continue
        full = index.reshape(grown)
        first = full[tuple(slice(None) if a == place else slice(0, 1) for a in range(len(grown)))]
        if (full == first).all():
            return place
    return None


@rule("transpose", "permute", "t", "mT", "movedim", "swapaxes", "numpy_T", "adjoint", "mH", "moveaxis")
class Permute(_View):
    """Axes in another order."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        rank = len(shape(node))
        order = list(range(rank))
        if call.operation == "aten.permute":
            order = call.dims("dims", rank) or []
        elif call.operation in ("aten.transpose", "aten.swapaxes"):
            names = ("dim0", "dim1") if call.get("dim0") is not None else ("axis0", "axis1")
            a, b = (int(call[name]) % max(rank, 1) for name in names)
            if rank:
                order[a], order[b] = order[b], order[a]
        elif call.operation in ("aten.movedim", "aten.moveaxis"):
            source, destination = call.dims("source", rank) or [], call.dims("destination", rank) or []
            order = [axis for axis in order if axis not in source]
            for to, axis in sorted(zip(destination, source, strict=True)):
                order.insert(to, axis)
        elif call.operation == "aten.numpy_T":
            order = order[::-1]
        elif rank >= 2:
            order[-1], order[-2] = order[-2], order[-1]
        return flow.value(node).moved({axis: place for place, axis in enumerate(order)})


@rule("unsqueeze")
class Unsqueeze(_View):
    """One more axis, of length 1."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        rank = len(shape(node))
        new = int(call["dim"]) % (rank + 1)
        return flow.value(node).moved({axis: axis + (axis >= new) for axis in range(rank)})


@rule("squeeze")
class Squeeze(_View):
    """Axes of length 1 are left out."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        before = shape(node)
        dims = call.dims("dim", len(before))
        gone = [a for a, n in enumerate(before) if n == 1 and (dims is None or a in dims)]
        value = flow.value(node)
        if not value.is_stored:
            flow.block(value, f"{call.words} drops its axis", gone)
        kept = [axis for axis in range(len(before)) if axis not in gone]
        return value.moved({axis: place for place, axis in enumerate(kept)})


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
class Expand(_View):
    """Axes of length 1 are repeated."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        before, after, value = shape(node), call.shape, flow.value(node)
        more = len(after) - len(before)
        stretched = [axis for axis in range(len(before)) if before[axis] != after[axis + more]]
        if not value.is_stored:
            flow.block(value, f"its only channel is broadcast by {call.words}", stretched)
        result = value.moved({axis: axis + more for axis in range(len(before)) if axis not in stretched})
        uniform = {*range(more), *(axis + more for axis in stretched)}
        return Value(result.axes, result.reads, result.uniform | uniform)


@rule("slice", "narrow")
class Slice(_View):
    """A range of entries along one axis."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        before, after, value = shape(node), call.shape, flow.value(node)
        axis = int(call["dim"]) % len(before)
        if axis not in value.axes or before[axis] == after[axis]:
            return value
        step = call.get("step", 1) or 1
        start = call.get("start") or 0
        start = number(start) if not isinstance(start, fx.Node) else 0
        if step != 1:
            flow.block(value, f"{call.words} takes every {step}th of its channels", [axis])
        start = max(0, start + before[axis] if start < 0 else start)
        flow.divide(call, value, axis, [start, start + after[axis] * step])
        return value.indexed(axis, slice(start, start + after[axis] * step, step))


@rule("select", "unbind", "take", "diagonal", "masked_select", "nonzero", "unfold.default")
class Select(Rule):
    """One entry of an axis, which is gone then."""

    def follow(self, call: Call, flow: Flow) -> Values:
        if call.operation not in ("aten.select", "aten.unbind"):
            return flow.block_inputs(call, f"{call.words} takes its channels apart")
        node = call.tensors[0]
        rank, value = len(shape(node)), flow.value(node)
        axis = int(call["dim"]) % rank
        flow.block(value, f"{call.words} takes its channels apart", [axis])
        result = value.moved({a: a - (a > axis) for a in range(rank) if a != axis})
        return result if call.operation == "aten.select" else tuple([result] * shape(node)[axis])


@rule("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split", "split_copy")
class Split(_View):
    """Consecutive parts of an axis."""

    def follow(self, call: Call, flow: Flow) -> Values:
        node = call.tensors[0]
        value, axis = flow.value(node), int(call["dim"]) % len(shape(node))
        parts, start = [], 0
        lengths = [number(part.shape[axis]) for part in call.node.meta["val"]]
        flow.divide(call, value, axis, [sum(lengths[:place]) for place in range(len(lengths))])
        for part in call.node.meta["val"]:
            length = number(part.shape[axis])
            parts.append(value.indexed(axis, slice(start, start + length)))
            start += length
        return tuple(parts)


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack")
class Concatenate(Rule):
    """Tensors side by side along one axis; along the others their channels correspond."""

    def follow(self, call: Call, flow: Flow) -> Value:
        nodes, rank = call.tensors, len(call.shape)
        if call.operation in ("aten.hstack", "aten.vstack"):
            return flow.block_inputs(call, f"splitting does not support the operation {call.words}")
        stacks = call.operation == "aten.stack"
        axis = int(call["dim"]) % rank
        # An empty tensor of any rank may be given to `cat`.
        nodes = [node for node in nodes if stacks or len(shape(node)) == rank]
        values = [flow.value(node) for node in nodes]
        if stacks:
            values = [value.moved({a: a + (a >= axis) for a in range(rank - 1)}) for value in values]
        is_stored = all(value.is_stored for value in values)
        axes: dict[int, Array] = {}
        reads: dict[int, tuple[Array, ...]] = {}
        for a in range(rank):
            if a == axis and not stacks:
                if any(a in value.axes for value in values):
                    axes[a] = self._joined(call, flow, values, nodes, a)
                    if is_stored and all(value.reads and len(value.reads.get(a, ())) == 1 for value in values):
                        reads[a] = (np.concatenate([value.reads[a][0] for value in values if value.reads]),)
                continue
            if a == axis or call.shape[a] == 1:
                held = [value.axes[a] for value in values if a in value.axes and not value.is_stored]
                if a != axis and len(held) == len(values) and held:
                    for other in held[1:]:
                        flow.slots.tie(held[0], other)
                    axes[a] = held[0]
                continue
            held = [value.axes[a] for value in values if a in value.axes]
            if not held:
                continue
            for other in held[1:]:
                flow.slots.tie(held[0], other)
            if not all(a in value.axes or a in value.uniform for value in values):
                flow.slots.block(held[0], f"{call.words} ties it to a tensor that no layer makes")
            if not is_stored:
                for value in values:
                    flow.use(value, [a])
            axes[a] = held[0]
        return Value(axes, reads if is_stored else None)

    @staticmethod
    def _joined(call: Call, flow: Flow, values: Sequence[Value], nodes: Sequence[fx.Node], axis: int) -> Array:
        parts: list[Array] = []
        for value, node in zip(values, nodes, strict=True):
            slots = value.axes.get(axis)
            if slots is None:
                slots = flow.slots.fresh(shape(node)[axis])
                flow.slots.block(slots, f"{call.words} joins channels that no layer makes")
            elif value.is_stored:
                flow.use(value, [axis])
            if len(slots):
                if parts:
                    flow.slots.keep_apart(int(parts[-1][-1]), int(slots[0]))
                parts.append(slots)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@rule("repeat", "tile", "repeat_interleave", "roll", "flip", "rot90", "channel_shuffle", "pixel_shuffle")
class Rearrange(Rule):
    """Entries that are repeated or change places."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        before, after, value = shape(node), call.shape, flow.value(node)
        if call.operation in ("aten.roll", "aten.flip"):
            dims = call.dims("dims", len(before)) or list(range(len(before)))
            # A flip also reverses the order of copies.
            flow.block(value, f"{call.words} moves its channels", dims)
            return value
        if call.operation in ("aten.repeat", "aten.tile"):
            more = len(after) - len(before)
            same = {axis: axis + more for axis in range(len(before)) if before[axis] == after[axis + more]}
            flow.block(value, f"{call.words} repeats its channels", [a for a in value.axes if a not in same])
            return value.moved(same)
        if call.operation == "aten.repeat_interleave" and call.get("dim") is not None and is_tensor(node):
            axis = int(call["dim"]) % len(before)
            if not isinstance(call.get("repeats"), int):
                flow.block(value, f"{call.words} repeats its channels", [axis])
                return value.moved({a: a for a in range(len(before)) if a != axis})
            times = after[axis] // max(before[axis], 1)
            return value.indexed(axis, np.repeat(np.arange(before[axis]), times))
        return flow.block_inputs(call, f"{call.words} rearranges its channels")


@rule("index", "index_select", "gather", "take_along_dim", "_unsafe_index")
class Gather(Rule):
    """Entries chosen by indices along some axes."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        value, before = flow.value(node), shape(node)
        for other in call.tensors[1:]:
            flow.block(flow.value(other), f"{call.words} takes it as an index")
        if call.operation in ("aten.index", "aten._unsafe_index"):
            return self._by_tensors(call, flow, value, before)
        if call.get("dim") is None:
            return flow.block_inputs(call, f"{call.words} rearranges its channels")
        axis = int(call["dim"]) % max(len(before), 1)
        flow.block(value, f"{call.words} chooses among its channels", [axis])
        same = {a: a for a in range(len(before)) if a != axis and before[a] == call.shape[a]}
        flow.block(value, f"{call.words} chooses among its channels", [a for a in value.axes if a not in same])
        if call.operation != "aten.index_select":
            # The indices are as many as the channels, so they would have to grow as well.
            flow.block(value, f"{call.words} chooses by an index of its own for every channel")
        return value.moved(same)

    @staticmethod
    def _by_tensors(call: Call, flow: Flow, value: Value, before: tuple[int, ...]) -> Value:
        indices = list(call["indices"])
        used = [axis for axis, index in enumerate(indices) if index is not None]
        if not used or any(index is not None and not is_tensor(index) for index in indices):
            return flow.block_inputs(call, f"{call.words} rearranges its channels")
        masks = [index for index in indices if index is not None and str(index.meta["val"].dtype) == "torch.bool"]
        if masks:
            flow.block(value, f"{call.words} chooses among its channels", list(range(len(before))))
            return Value()
        flow.block(value, f"{call.words} chooses among its channels", used)
        rank = max(len(shape(index)) for index in indices if index is not None)
        together = used == list(range(used[0], used[-1] + 1))
        kept = [axis for axis in range(len(before)) if axis not in used]
        first = used[0] if together else 0
        moved, place = {}, 0
        for axis in kept:
            if place == first:
                place += rank
            moved[axis] = place
            place += 1
        return value.moved(moved)


@rule("select_scatter")
class SelectScatter(Rule):
    """One entry along an axis is replaced."""

    def follow(self, call: Call, flow: Flow) -> Value:
        target, source = flow.value(call["self"]), flow.value(call["src"])
        rank = len(call.shape)
        axis = int(call["dim"]) % rank
        flow.block(target, f"{call.words} takes its channels apart", [axis])
        moved = source.moved({a: a + (a >= axis) for a in range(rank - 1)})
        axes = {}
        for other in range(rank):
            if other == axis or other not in target.axes:
                flow.block(moved, f"{call.words} ties it to a tensor that no layer makes", [other])
                continue
            if other in moved.axes:
                flow.slots.tie(target.axes[other], moved.axes[other])
            elif shape(call["src"])[other - (other > axis)] > 1 and other not in moved.uniform:
                flow.slots.block(target.axes[other], f"{call.words} ties it to a tensor that no layer makes")
            axes[other] = target.axes[other]
        return Value(axes)


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_put", "index_copy", "slice_scatter")
class Scatter(Rule):
    """Entries written to places along one axis; along the others channels correspond."""

    def follow(self, call: Call, flow: Flow) -> Value:
        target, source = call["self"], call.get("src", call.get("source"))
        axis = call.get("dim")
        fits = isinstance(axis, int) and is_tensor(source) and len(shape(source)) == len(shape(target))
        if not fits or call.operation not in ("aten.scatter_add", "aten.index_add", "aten.slice_scatter"):
            return flow.block_inputs(call, f"splitting does not support the operation {call.words}")
        rank = len(shape(target))
        axis = int(axis) % rank
        a, b = flow.value(target), flow.value(source)
        flow.block(a, f"{call.words} moves its channels", [axis])
        flow.block(b, f"{call.words} moves its channels", [axis])
        axes = {}
        for other in range(rank):
            held = [value.axes[other] for value in (a, b) if other in value.axes]
            if other == axis or not held:
                continue
            if len(held) == 2:
                flow.slots.tie(*held)
            elif not all(other in value.axes or other in value.uniform for value in (a, b)):
                flow.slots.block(held[0], f"{call.words} ties it to a tensor that no layer makes")
            axes[other] = held[0]
        return Value(axes)
