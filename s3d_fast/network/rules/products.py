"""Rules of matrix products, convolutions and embeddings: the operations that make and read channels."""

from __future__ import annotations

import numpy as np
from torch import fx

from s3d_fast.network.calls import Call, is_tensor, shape
from s3d_fast.network.flow import Flow, Product, Value, Writer
from s3d_fast.network.rules.rule import Rule, rule


def _write(
    call: Call, flow: Flow, kind: str, weight: fx.Node, row_axis: int, source: fx.Node, bias: fx.Node | None
) -> None:
    """Record the rows of a weight that make channels."""
    value = flow.value(weight)
    if value.is_stored and row_axis in value.axes:
        flow.writers.append(Writer(call.node, kind, weight, value.axes[row_axis], source, bias))


def _add_bias(call: Call, flow: Flow, result: Value, bias: object, axis: int) -> Value:
    """Tie a bias to the axis of a result that it is added to."""
    if not is_tensor(bias):
        return result
    assert isinstance(bias, fx.Node)
    value, slots = flow.value(bias), result.axes.get(axis)
    own = len(shape(bias)) - 1
    if slots is None or own < 0 or shape(bias)[own] == 1 < len(slots):
        return result
    if own in value.axes:
        flow.slots.tie(slots, value.axes[own])
        flow.use(value, [own])
    else:
        flow.slots.block(slots, f"{call.words} ties it to a tensor that no layer makes")
    return result


@rule("linear")
class Linear(Rule):
    """x W^T + b along the last axis."""

    kind = "linear"

    def follow(self, call: Call, flow: Flow) -> Value:
        x, weight, bias = call["input"], call["weight"], call["bias"]
        rank = len(shape(x))
        batch = list(range(rank - 1))
        if len(shape(weight)) == 1:
            return flow.contract(call, [(x, [*batch, "in"]), (weight, ["in"])], batch)
        result = flow.contract(call, [(x, [*batch, "in"]), (weight, ["out", "in"])], [*batch, "out"])
        _write(call, flow, self.kind, weight, 0, x, bias)
        return _add_bias(call, flow, result, bias, rank - 1)


def _matmul(call: Call, flow: Flow, a: fx.Node, b: fx.Node) -> Value:
    rank_a, rank_b, out = len(shape(a)), len(shape(b)), len(call.shape)
    row: list[object] = ["row"] if rank_a > 1 else []
    column: list[object] = ["column"] if rank_b > 1 else []
    batch = list(range(out - len(row) - len(column)))
    labels_a = [*batch[len(batch) - max(rank_a - 2, 0) :], *row, "in"]
    labels_b = [*batch[len(batch) - max(rank_b - 2, 0) :], *(["in"] if rank_b > 1 else []), *(column or ["in"])]
    result = flow.contract(call, [(a, labels_a), (b, labels_b)], [*batch, *row, *column])
    if rank_b > 1 and flow.value(b).is_stored:
        _write(call, flow, "linear", b, rank_b - 1, a, None)
    elif rank_a > 1 and flow.value(a).is_stored:
        _write(call, flow, "linear", a, rank_a - 2, b, None)
    return result


@rule("matmul", "mm", "bmm", "mv", "dot")
class Matmul(Rule):
    """A matrix product; either factor may be a weight."""

    kind = "linear"

    def follow(self, call: Call, flow: Flow) -> Value:
        a, b = call.tensors[:2]
        return _matmul(call, flow, a, b)


@rule("addmm", "baddbmm", "addmv", "addbmm")
class AddMatmul(Rule):
    """A bias plus a matrix product."""

    kind = "linear"

    def follow(self, call: Call, flow: Flow) -> Value:
        bias, a, b = call.tensors[:3]
        if call.operation == "aten.addbmm":
            return flow.block_inputs(call, f"splitting does not support the operation {call.words}")
        result = _matmul(call, flow, a, b)
        if flow.writers and flow.writers[-1].node is call.node:
            last = flow.writers.pop()
            flow.writers.append(Writer(last.node, last.kind, last.weight, last.slots, last.source, bias))
        for axis in result.axes:
            own = axis - (len(call.shape) - len(shape(bias)))
            if own >= 0 and shape(bias)[own] > 1:
                value = flow.value(bias)
                if own in value.axes:
                    flow.slots.tie(result.axes[axis], value.axes[own])
                    flow.use(value, [own])
                else:
                    flow.slots.block(result.axes[axis], f"{call.words} ties it to a tensor that no layer makes")
        return result


@rule("einsum")
class Einsum(Rule):
    """A sum of products, written as labels."""

    kind = "linear"

    def follow(self, call: Call, flow: Flow) -> Value:
        equation = str(call["equation"]).replace(" ", "")
        left, arrow, right = equation.partition("->")
        terms = left.split(",")
        if "..." in equation or not arrow or any(len(set(term)) != len(term) for term in terms):
            return flow.block_inputs(call, f"splitting does not support {call.words}: '{equation}'")
        result = flow.contract(call, list(zip(call.tensors, map(list, terms), strict=True)), list(right))
        if len(terms) == 2:
            for own, other in ((1, 0), (0, 1)):
                node = call.tensors[own]
                # A row is a label of the weight alone.
                rows = [label for label in terms[own] if label in right and label not in terms[other]]
                if flow.value(node).is_stored and len(rows) == 1:
                    _write(call, flow, self.kind, node, terms[own].index(rows[0]), call.tensors[other], None)
        return result


@rule("bilinear", "_trilinear", "cdist", "cosine_similarity", "pairwise_distance", "outer", "ger", "kron", "cross")
class Pairwise(Rule):
    """An operation that compares or multiplies all channels of two tensors."""

    def follow(self, call: Call, flow: Flow) -> Value:
        return flow.block_inputs(call, f"{call.words} combines its channels with those of another tensor")


def _spatial_rank(call: Call) -> int:
    return len(shape(call["weight"])) - 2


@rule(
    *("conv1d", "conv2d", "conv3d", "convolution", "_convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
class Convolution(Rule):
    """A convolution of any dimension; depthwise ones treat every channel alone."""

    kind = "conv"

    def follow(self, call: Call, flow: Flow) -> Value:
        x, weight, bias = call["input"], call["weight"], call["bias"]
        transposed = "transpose" in call.operation or bool(call.get("transposed", False))
        groups, axis = int(call["groups"]), len(shape(x)) - _spatial_rank(call) - 1
        value, kernel = flow.value(x), flow.value(weight)
        out = shape(weight)[1] * groups if transposed else shape(weight)[0]
        positions = int(np.prod(call.shape[axis + 1 :]))
        taps = int(np.prod(shape(weight)[2:]))
        if transposed:
            positions = int(np.prod(shape(x)[axis + 1 :]))
        if groups == 1:
            labels: list[object] = ["in", "out"] if transposed else ["out", "in"]
            operands: list[tuple[fx.Node, list[object]]] = [(x, [None] * axis + ["in"]), (weight, labels)]
            result = flow.contract(call, operands, [None] * axis + ["out"], positions * taps * self._samples(x, axis))
            _write(call, flow, self.kind, weight, labels.index("out"), x, bias)
        elif groups == shape(x)[axis]:
            result = self._depthwise(call, flow, value, kernel, axis, out // groups, transposed)
            entries = result.axes.get(axis)
            factor = float(positions * taps * self._samples(x, axis) * (out if entries is None else 1))
            flow.products.append(Product(call.node, factor, () if entries is None else (entries,)))
        else:
            flow.block(kernel, "it is a grouped convolution")
            flow.block(value, f"it feeds the grouped convolution of {call.words}", [axis])
            result = Value()
            factor = positions * taps * self._samples(x, axis) * out * shape(x)[axis] / groups
            flow.products.append(Product(call.node, factor, ()))
            if not transposed:
                _write(call, flow, self.kind, weight, 0, x, bias)
                result = Value({axis: kernel.axes[0]}) if kernel.is_stored else result
        spatial = [a for a in value.axes if a > axis]
        flow.block(value, f"{call.words} reads another axis than its channels", spatial)
        before = {a: slots for a, slots in value.axes.items() if a < axis}
        result = Value({**before, **result.axes}, result.reads)
        return _add_bias(call, flow, result, bias, axis)

    @staticmethod
    def _samples(x: fx.Node, axis: int) -> int:
        return int(np.prod(shape(x)[:axis]))

    def _depthwise(
        self, call: Call, flow: Flow, value: Value, kernel: Value, axis: int, multiplier: int, transposed: bool
    ) -> Value:
        slots = value.axes.get(axis)
        if slots is None:
            flow.block(kernel, f"{call.words} filters channels that no layer makes")
            own = kernel.axes.get(0)
            return Value() if own is None or transposed else Value({axis: own})
        if not kernel.is_stored:
            flow.slots.block(slots, f"the filters of {call.words} are computed, not stored")
            return Value()
        repeated = np.repeat(slots, multiplier)
        # A transposed one has a row for every input channel, the other for every output channel.
        flow.slots.tie(slots if transposed else repeated, kernel.axes[0])
        flow.use(kernel, [0])
        if kernel.reads is None or 0 not in kernel.reads:
            flow.slots.block(slots, f"the filters of {call.words} are computed, not stored")
        return Value({axis: repeated})


@rule("embedding", "embedding_bag", "_embedding_bag")
class Embedding(Rule):
    """Rows of a table, chosen by index: they hold one entry for every channel."""

    kind = "embedding"

    def follow(self, call: Call, flow: Flow) -> Value:
        table = flow.value(call["weight"])
        flow.block(flow.value(call["indices"]), f"{call.words} takes it as an index")
        flow.block(table, f"{call.words} chooses among its rows", [0])
        if call.operation != "aten.embedding":
            return flow.block_inputs(call, f"splitting does not support the operation {call.words}")
        flow.use(table, [1])
        return Value({len(call.shape) - 1: table.axes[1]}) if 1 in table.axes else Value()


@rule("scaled_dot_product_attention")
class Attention(Rule):
    """softmax(q k^T) v: queries and keys are compared, values pass."""

    def follow(self, call: Call, flow: Flow) -> Value:
        q, k, v = call["query"], call["key"], call["value"]
        rank = len(shape(q))
        batch = list(range(rank - 2))
        scores = [*batch, "query"]
        flow.contract(call, [(q, [*scores, "in"]), (k, [*batch, "key", "in"])], [*scores, "key"])
        value, query = flow.value(v), flow.value(q)
        flow.block(value, f"{call.words} mixes its channels", [rank - 2])
        flow.block(flow.value(k), f"{call.words} mixes its channels", [rank - 2])
        axes = dict(value.axes)
        axes.pop(rank - 2, None)
        lengths = tuple(slots for axis, slots in axes.items() if axis == rank - 1)
        size = float(np.prod(call.shape)) * shape(k)[rank - 2] / (len(lengths[0]) if lengths else 1)
        flow.products.append(Product(call.node, size, lengths))
        for axis in range(rank - 2):
            for other in (query, flow.value(k)):
                if axis in other.axes:
                    if axis in axes:
                        flow.slots.tie(axes[axis], other.axes[axis])
                    else:
                        flow.slots.block(other.axes[axis], f"{call.words} ties it to a tensor that no layer makes")
        if rank - 2 in query.axes:
            axes[rank - 2] = query.axes[rank - 2]
        mask = call.get("attn_mask")
        if isinstance(mask, fx.Node):
            flow.block(flow.value(mask), f"{call.words} takes it as a mask")
        return Value(axes)
