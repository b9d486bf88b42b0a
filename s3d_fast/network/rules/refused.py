"""Rules of operations that mix channels inside: they are refused by name."""

from __future__ import annotations

from s3d_fast.network.calls import Call
from s3d_fast.network.flow import Flow, Value, Values
from s3d_fast.network.rules.rule import Rule, rule


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
class Recurrent(Rule):
    """A recurrent layer mixes its channels at every step."""

    kind = "recurrent"

    def follow(self, call: Call, flow: Flow) -> Values:
        name = call.operation.removeprefix("aten.").removesuffix("_cell").upper()
        flow.block_inputs(call, f"{call.words}: splitting does not support recurrent layers ({name})")
        result = call.node.meta["val"]
        return tuple([Value()] * len(result)) if isinstance(result, (tuple, list)) else Value()


@rule("multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
class FusedAttention(Rule):
    """A whole attention layer in one operation."""

    def follow(self, call: Call, flow: Flow) -> Values:
        flow.block_inputs(call, f"{call.words} mixes its channels")
        result = call.node.meta["val"]
        return tuple([Value()] * len(result)) if isinstance(result, (tuple, list)) else Value()


@rule("rand_like", "randn_like", "randint_like", "bernoulli", "empty_like")
class Noise(Rule):
    """A tensor of the same size with numbers of its own, which differ between copies."""

    def follow(self, call: Call, flow: Flow) -> Value:
        return flow.block_inputs(call, f"{call.words} draws other numbers for every copy")


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
class Constant(Rule):
    """A tensor of some size that holds one number."""

    def follow(self, call: Call, flow: Flow) -> Value:
        return Value(uniform=frozenset(range(len(call.shape))))
