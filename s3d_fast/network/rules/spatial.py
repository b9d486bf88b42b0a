"""Rules of pooling, resizing and padding, and of sums and maxima over axes."""

from __future__ import annotations

from s3d_fast.network.calls import Call, shape
from s3d_fast.network.flow import Flow, Value, Values
from s3d_fast.network.rules.rule import Rule, rule


class _Spatial(Rule):
    """An operation on the last axes of a feature map: channels before them pass."""

    linear = True

    def acts_on(self, call: Call) -> list[int]:
        """Return the axes that the operation works along: by default those whose number its name says."""
        before = shape(call.tensors[0])
        dimensions = next((d for d in (1, 2, 3) if f"{d}d" in call.operation), 2)
        return list(range(len(before) - dimensions, len(before)))

    def follow(self, call: Call, flow: Flow) -> Values:
        value, mixed = flow.value(call.tensors[0]), self.acts_on(call)
        flow.block(value, f"{call.words} works along its channels", mixed)
        for node in call.tensors[1:]:
            flow.block(flow.value(node), f"{call.words} takes it as positions")
        result = Value({axis: slots for axis, slots in value.axes.items() if axis not in mixed})
        if not self.linear:
            flow.note_curved(call.node, result)
        several = isinstance(call.node.meta["val"], (tuple, list))
        return (result, result) if several else result


@rule(
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d"),
    *("upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d"),
    *("replication_pad3d",),
)
class LinearSpatial(_Spatial):
    """Averages, interpolation and mirrored padding."""


@rule(
    *("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices"),
    *("max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d"),
)
class MaxPool(_Spatial):
    """Maxima over windows: every entry of the result is one entry of the input."""

    selects = True


@rule("pad", "constant_pad_nd")
class Pad(_Spatial):
    """Entries added at the ends of the last axes."""

    def acts_on(self, call: Call) -> list[int]:
        before, padding = shape(call.tensors[0]), list(call["pad"])
        pairs = [padding[i : i + 2] for i in range(0, len(padding), 2)]
        return [len(before) - 1 - i for i, pair in enumerate(pairs) if any(one != 0 for one in pair)]


@rule("im2col", "unfold", "col2im", "fft_fft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_fft", "fft_ifft2")
class Unsupported(Rule):
    """Operations on feature maps that splitting does not support."""

    def follow(self, call: Call, flow: Flow) -> Value:
        return flow.block_inputs(call, f"splitting does not support the operation {call.words}")


class _Reduction(Rule):
    """A reduction over some axes: channels along others pass, channels along these are added up or compared."""

    linear = True

    def follow(self, call: Call, flow: Flow) -> Values:
        node = call.tensors[0]
        value, rank = flow.value(node), len(shape(node))
        dims = call.dims("dim", rank)
        if dims is None or dims == []:
            if len(call.tensors) == 2:
                # max(a, b) of two tensors.
                return flow.elementwise(call, call.tensors, linear=False)
            dims = list(range(rank))
        word = call.operation.removeprefix("aten.")
        flow.block(value, f"{call.words} takes the {word} over its channels", dims)
        keep = bool(call.get("keepdim", False))
        kept = [axis for axis in range(rank) if axis not in dims]
        result = value.moved({axis: axis if keep else place for place, axis in enumerate(kept)})
        if value.is_stored:
            result = Value(result.axes, {})
        elif not self.linear:
            flow.note_curved(call.node, result)
        value_of = call.node.meta["val"]
        return tuple([result] * len(value_of)) if isinstance(value_of, (tuple, list)) else result


@rule("mean", "sum", "nansum", "amax", "amin", "max", "min", "aminmax", "median")
class LinearReduction(_Reduction):
    """Means and sums; maxima and the like, whose every entry is one entry of the input."""


@rule(
    *("prod", "var", "std", "var_mean", "std_mean", "logsumexp"),
    *("norm", "linalg_vector_norm", "any", "all", "argmax", "argmin", "count_nonzero", "nanmean", "mode"),
)
class CurvedReduction(_Reduction):
    """Maxima, norms and the like."""

    linear = False


@rule("topk", "sort", "cumsum", "cummax", "cummin", "argsort", "kthvalue", "diff")
class AlongAxis(Rule):
    """An operation along one axis, which stays."""

    def follow(self, call: Call, flow: Flow) -> Values:
        node = call.tensors[0]
        value, rank = flow.value(node), len(shape(node))
        dims = call.dims("dim", rank) or []
        flow.block(value, f"{call.words} works along its channels", dims)
        result = value.moved({axis: axis for axis in range(rank) if axis not in dims})
        flow.note_curved(call.node, result)
        value_of = call.node.meta["val"]
        return tuple([result] * len(value_of)) if isinstance(value_of, (tuple, list)) else result


@rule("tril", "triu")
class Triangle(Rule):
    """Zeros on one side of a diagonal of the last two axes."""

    def follow(self, call: Call, flow: Flow) -> Value:
        node = call.tensors[0]
        value, rank = flow.value(node), len(shape(node))
        flow.block(value, f"{call.words} works along its channels", [rank - 2, rank - 1])
        return value.moved({axis: axis for axis in range(rank - 2)})
