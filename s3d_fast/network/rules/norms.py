"""Rules of normalisations: those that treat every channel alone, and those that mix channels."""

from __future__ import annotations

from torch import fx

from s3d_fast.network.calls import Call, shape
from s3d_fast.network.flow import Flow, Value, Values
from s3d_fast.network.rules.rule import Rule, rule


def _follow_channels(call: Call, flow: Flow, axis: int, names: tuple[str, ...]) -> Value:
    """Tie the stored tensors of a norm to the channels of its input."""
    value = flow.value(call["input"])
    slots = value.axes.get(axis)
    for name in names:
        node = call.get(name)
        if not isinstance(node, fx.Node):
            continue
        own = flow.value(node)
        if slots is None:
            flow.block(own, f"{call.words} normalises channels that no layer makes")
        elif 0 not in own.axes:
            flow.slots.block(slots, f"{call.words} ties it to a tensor that no layer makes")
        else:
            flow.slots.tie(slots, own.axes[0])
            flow.use(own, [0])
    return Value(value.axes)


@rule("batch_norm", "cudnn_batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training")
class BatchNorm(Rule):
    """A scale and a shift for every channel, in eval mode."""

    kind = "batchnorm"

    def follow(self, call: Call, flow: Flow) -> Values:
        result = _follow_channels(call, flow, 1, ("weight", "bias", "running_mean", "running_var"))
        if call.get("running_var") is None or call.get("training"):
            # The statistics are those of the batch: not linear, but every channel has its own.
            flow.note_curved(call.node, result)
        return result if call.operation == "aten.batch_norm" else (result, Value(), Value())


@rule("_native_batch_norm_legit", "_native_batch_norm_legit.no_stats")
class BatchStatistics(Rule):
    """A BatchNorm with the statistics of the batch."""

    kind = "batchnorm"

    def follow(self, call: Call, flow: Flow) -> Values:
        result = _follow_channels(call, flow, 1, ("weight", "bias", "running_mean", "running_var"))
        flow.note_curved(call.node, result)
        return result, Value(), Value()


@rule("instance_norm")
class InstanceNorm(Rule):
    """A normalisation of every channel of every sample by its own statistics."""

    kind = "instancenorm"

    def follow(self, call: Call, flow: Flow) -> Value:
        result = _follow_channels(call, flow, 1, ("weight", "bias", "running_mean", "running_var"))
        spatial = [axis for axis in result.axes if axis > 1]
        flow.block(result, f"{call.words} normalises over its channels", spatial)
        flow.note_curved(call.node, result)
        return result


class _Mixing(Rule):
    """A normalisation over some axes: channels along them are mixed, channels along others pass."""

    def mixed(self, call: Call) -> list[int]:
        """Return the axes that are normalised together."""
        raise NotImplementedError

    def follow(self, call: Call, flow: Flow) -> Values:
        source = call.tensors[0]
        value, mixed = flow.value(source), self.mixed(call)
        flow.block(value, f"{call.words} mixes its channels", mixed)
        for node in call.tensors[1:]:
            flow.block(flow.value(node), f"{call.words} mixes its channels")
        result = Value({axis: slots for axis, slots in value.axes.items() if axis not in mixed})
        flow.note_curved(call.node, result)
        # What comes after is still tied to the channels that were mixed.
        result = Value(dict(value.axes))
        several = isinstance(call.node.meta["val"], (tuple, list))
        return (result, *[Value()] * (len(call.node.meta["val"]) - 1)) if several else result


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
class LayerNorm(_Mixing):
    """A normalisation over the last axes."""

    kind = "layernorm"

    def mixed(self, call: Call) -> list[int]:
        rank = len(shape(call.tensors[0]))
        return list(range(rank - len(call["normalized_shape"]), rank))


@rule("group_norm", "native_group_norm")
class GroupNorm(_Mixing):
    """A normalisation over groups of channels."""

    kind = "groupnorm"

    def mixed(self, call: Call) -> list[int]:
        return list(range(1, len(shape(call.tensors[0]))))


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "logcumsumexp", "cumprod")
class Softmax(_Mixing):
    """A normalisation over one axis."""

    def mixed(self, call: Call) -> list[int]:
        return call.dims("dim", len(shape(call.tensors[0]))) or []


@rule("local_response_norm", "renorm")
class AcrossChannels(_Mixing):
    """A normalisation by neighbouring channels."""

    def mixed(self, call: Call) -> list[int]:
        return list(range(len(shape(call.tensors[0]))))


@rule("_weight_norm", "_weight_norm_interface")
class WeightNorm(Rule):
    """g v / |v|, where |v| is over all axes but one: rows stay apart, columns do not."""

    def follow(self, call: Call, flow: Flow) -> Values:
        v, g = flow.value(call["v"]), flow.value(call["g"])
        dim = int(call["dim"]) % len(shape(call["v"]))
        flow.block(v, "its weight is computed, not stored (a parametrization?)", [a for a in v.axes if a != dim])
        flow.block(g, "its weight is computed, not stored (a parametrization?)", [a for a in g.axes if a != dim])
        if dim in v.axes and dim in g.axes:
            flow.slots.tie(v.axes[dim], g.axes[dim])
            flow.use(g, [dim])
        result = Value(v.axes, {} if v.is_stored and g.is_stored else None)
        return result if call.operation == "aten._weight_norm" else (result, Value())
