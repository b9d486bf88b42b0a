"""Rules of operations on corresponding entries: arithmetic, activations, comparisons, copies."""

from __future__ import annotations

from s3d_fast.network.calls import Call
from s3d_fast.network.flow import Flow, Value
from s3d_fast.network.rules.rule import Rule, rule


@rule(
    *("relu", "relu6", "leaky_relu", "rrelu", "silu", "gelu", "softplus", "softshrink", "hardshrink", "tanhshrink"),
    *("tanh", "sigmoid", "elu", "selu", "celu", "mish", "hardswish", "hardsigmoid", "hardtanh", "log_sigmoid"),
    *("logsigmoid", "threshold", "softsign", "abs", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt"),
    *("rsqrt", "square", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "reciprocal", "sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "clamp", "clamp_min"),
    *("clamp_max", "clip", "pow", "maximum", "minimum", "fmax", "fmin", "atan2", "remainder", "fmod", "logaddexp"),
    *("eq", "ne", "gt", "lt", "ge", "le", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and"),
    *("bitwise_or", "bitwise_not", "bitwise_xor", "isnan", "isinf", "isfinite", "nan_to_num", "where", "lerp", "sinc"),
    *("floor_divide", "div.Tensor_mode", "xlogy", "special_xlogy", "erfinv", "digamma", "lgamma", "copysign"),
    *("prelu_kernel", "_prelu_kernel", "addcmul", "addcdiv", "heaviside", "hypot", "rad2deg", "deg2rad", "log_sigmoid"),
)
class Curved(Rule):
    """A function of one entry, or of corresponding entries, that is not linear."""

    is_elementwise = True

    def follow(self, call: Call, flow: Flow) -> Value:
        return flow.elementwise(call, call.tensors, linear=False)


@rule("add", "sub", "rsub", "neg", "masked_fill", "positive", "real", "imag", "conj", "where.ScalarOther")
class Additive(Rule):
    """Sums, differences and masks: linear in every entry."""

    is_elementwise = True

    def follow(self, call: Call, flow: Flow) -> Value:
        return flow.elementwise(call, call.tensors, linear=True)


@rule("mul", "multiply")
class Multiply(Rule):
    """A product of corresponding entries: linear in each factor, curved if both are made by the same channels."""

    is_elementwise = True

    def follow(self, call: Call, flow: Flow) -> Value:
        made = [node for node in call.tensors if flow.value(node).axes and not flow.value(node).is_stored]
        return flow.elementwise(call, call.tensors, linear=len(made) < 2, product=True)


@rule("div", "divide", "true_divide")
class Divide(Rule):
    """A quotient: linear in the numerator."""

    is_elementwise = True

    def follow(self, call: Call, flow: Flow) -> Value:
        divisor = call["other"]
        curved = bool(flow.value(divisor).axes) and not flow.value(divisor).is_stored
        rounds = call.get("rounding_mode") is not None
        return flow.elementwise(call, call.tensors, linear=not curved and not rounds, product=not curved)


@rule(
    *("clone", "alias", "detach", "detach_copy", "contiguous", "to", "_to_copy", "type_as", "lift_fresh_copy", "lift"),
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "dropout1d"),
    *("zeros_like", "ones_like", "full_like", "view_as_real_copy", "_assert_tensor_metadata", "resolve_conj"),
    *("resolve_neg", "fill", "zero", "bernoulli.p", "float", "double", "half", "bfloat16"),
)
class Copy(Rule):
    """The same entries again, or one constant in place of all of them."""

    is_elementwise = True
    selects = True

    def follow(self, call: Call, flow: Flow) -> Value:
        # The result follows the first tensor; `type_as` and the like only look at the second.
        return flow.value(call.tensors[0]) if call.tensors else Value()


@rule("prelu")
class PReLU(Rule):
    """max(x, 0) + a min(x, 0), with one slope for all channels or one for each."""

    is_elementwise = True
    kind = "prelu"

    def follow(self, call: Call, flow: Flow) -> Value:
        x, slope = flow.value(call["self"]), flow.value(call["weight"])
        slots = slope.axes.get(0)
        if slots is not None and len(slots) > 1:
            channels = x.axes.get(min(1, len(call.shape) - 1))
            if channels is None:
                flow.block(slope, f"{call.words} ties it to a tensor that no layer makes")
            else:
                flow.slots.tie(channels, slots)
                flow.use(slope)
        flow.note_curved(call.node, x)
        return Value(x.axes)


@rule("glu")
class GatedLinearUnit(Rule):
    """a * sigmoid(b) for the two halves of an axis."""

    kind = ""

    def follow(self, call: Call, flow: Flow) -> Value:
        value, rank = flow.value(call["self"]), len(call.shape)
        axis = int(call["dim"]) % rank
        slots = value.axes.get(axis)
        if slots is None:
            flow.note_curved(call.node, value)
            return Value(value.axes)
        half = len(slots) // 2
        flow.slots.tie(slots[:half], slots[half:])
        result = Value({**value.axes, axis: slots[:half]})
        flow.note_curved(call.node, result)
        return result
