"""The role of each kind of layer in a split: a producer, a consumer or a follower of channels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from s3d_fast.maths.activations import MODULES, Activation, activation, activation_names, is_activation
from s3d_fast.network.edgeconv import EdgeConv

# Modules that act on every entry alone, and do nothing in eval mode.
ELEMENTWISE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Modules that act on every channel of a feature map alone, and add no curvature.
SPATIAL = (
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Upsample,
    nn.UpsamplingNearest2d,
    nn.UpsamplingBilinear2d,
    nn.ZeroPad2d,
    nn.ConstantPad2d,
    nn.ReflectionPad2d,
    nn.ReplicationPad2d,
)
# Nonlinear elementwise modules whose second derivative is not available here.
CURVED = (nn.Hardtanh, nn.Mish, nn.CELU, nn.SELU, nn.LogSigmoid)
# Modules allowed between a layer and its activation: every output entry is one input entry.
SELECTING = (*ELEMENTWISE, nn.Flatten, nn.MaxPool2d, nn.AdaptiveMaxPool2d)
# Modules that mix channels, with their names in messages.
MIXING = {nn.LayerNorm: "LayerNorm", nn.GroupNorm: "GroupNorm", nn.Softmax: "softmax", nn.LogSoftmax: "log_softmax"}


@dataclass(frozen=True)
class CustomLayer:
    """The properties of a module type, as given to `register_layer`."""

    per_channel: tuple[str, ...]
    size_attributes: tuple[str, ...]
    activation: Callable[[Any], Activation] | None
    linear: bool


_CUSTOM: dict[type[nn.Module], CustomLayer] = {}


def register_layer(
    module_type: type[nn.Module],
    *,
    per_channel: Sequence[str] = (),
    size_attributes: Sequence[str] = (),
    activation: Callable[[Any], Activation] | Activation | nn.Module | str | None = None,
    linear: bool = False,
) -> None:
    """Teach `trace` a module type of your own that treats every channel alone and in the same way.

    Tracing does not look inside such a module. Its output must have the same channels as its input, along the same
    axis.

    Args:
        module_type: the class; subclasses are not included.
        per_channel: names of its parameters and buffers with one entry (or slice) per channel in dimension 0.
        size_attributes: names of its integer attributes that hold the number of channels.
        activation: the activation that the module computes, if it is one: an Activation; a name, module or function
            that `activation` knows, such as "silu"; or a function that makes an Activation from the module. Only an
            activation right after a layer, or after its BatchNorm, makes that layer splittable.
        linear: whether the output is linear in the input for every channel; the module then adds no curvature.

    Raises:
        TypeError: module_type is not a subclass of nn.Module, per_channel or size_attributes is not a sequence of
            names, or activation is none of the above.
        ValueError: no activation has this name.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(f"module_type must be a subclass of nn.Module, got {module_type!r}")
    channels, sizes = _require_names("per_channel", per_channel), _require_names("size_attributes", size_attributes)
    make = None if activation is None else _activation_maker(module_type, activation)
    _CUSTOM[module_type] = CustomLayer(channels, sizes, make, linear)


def _require_names(name: str, value: object) -> tuple[str, ...]:
    # A string is a sequence of strings too.
    names = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(one, str) for one in names):
        raise TypeError(f"{name} must be a sequence of names, such as ['weight'], got {value!r}")
    return names


def _activation_maker(module_type: type[nn.Module], given: Any) -> Callable[[Any], Activation]:
    """Return the function that makes the Activation of a module of a registered type."""
    if isinstance(given, str) and not is_activation(given):
        raise ValueError(f"activation must be one of {', '.join(activation_names())}; got {given!r}")
    is_known = isinstance(given, Activation) or (isinstance(given, Hashable) and is_activation(given))
    if is_known:
        fixed = activation(given)
        return lambda module: fixed
    # A module or a module class is callable too, but makes no Activation: refuse it here rather than in `trace`.
    is_module = isinstance(given, nn.Module) or (isinstance(given, type) and issubclass(given, nn.Module))
    if is_module or not callable(given):
        raise TypeError(
            "activation must be an Activation, a name, module or function that s3d_fast.activation knows, or a "
            f"function that makes an Activation from the module; got {given!r}"
        )

    def make(module: Any) -> Activation:
        made = given(module)
        if not isinstance(made, Activation):
            raise TypeError(f"the activation of {module_type.__name__} must make an Activation, got {made!r}")
        return made

    return make


def custom_layer(module: nn.Module) -> CustomLayer | None:
    """Return the registered properties of this module's type; None if it is not registered."""
    return _CUSTOM.get(type(module))


def leaves(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a model that tracing must not look into."""
    return {
        module
        for module in model.modules()
        if isinstance(module, EdgeConv) or type(module) in _CUSTOM or type(module) in MODULES
    }


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes; None if it is not a known activation."""
    custom = custom_layer(module)
    if custom is not None:
        return custom.activation(module) if custom.activation is not None else None
    return activation(module) if is_activation(module) else None


# The kinds of layers that mix channels: their filters can be split, and they read the channels of other layers.
PRODUCERS = ("conv", "linear", "edgeconv")


@dataclass(frozen=True)
class Role:
    """The role of a module in a split.

    Attributes:
        kind: one of `PRODUCERS`; "depthwise", "batchnorm" or "custom", with tensors for every channel; "activation",
            "curved", "dropout", "spatial", "flatten", "mixing"; or "other".
        word: its name in messages.
        activation: the activation that it computes, or that an EdgeConv layer has inside.
        width, input_width, fan_in: filters, input channels and parameters per filter of a producer.
        multiplier: outputs per channel of a depthwise layer.
        tensors: the names of the tensors whose shapes depend on its channels.
        per_channel: the names of the tensors of a custom layer that have a slice per channel.
        linear: whether a custom layer adds no curvature.
        selects: whether it may stand between a layer and its activation: every output entry is one input entry.
        is_grouped: whether it is a convolution with groups.
        has_stored_rows: whether weight and bias are plain parameters, not computed.
        has_stored_columns: whether the weight is a plain parameter.
        has_stored_channels: whether the tensors with a slice per channel are plain parameters or buffers.
    """

    kind: str
    word: str
    activation: Activation | None = None
    width: int = 0
    input_width: int = 0
    fan_in: int = 0
    multiplier: int = 1
    tensors: tuple[str, ...] = ()
    per_channel: tuple[str, ...] = ()
    linear: bool = False
    selects: bool = False
    is_grouped: bool = False
    has_stored_rows: bool = True
    has_stored_columns: bool = True
    has_stored_channels: bool = True


def roles(modules: Mapping[str, nn.Module]) -> dict[str, Role]:
    """Return the role of every module, by name."""
    return {name: _role(module) for name, module in modules.items()}


def _role(module: nn.Module) -> Role:
    word = type(module).__name__
    kind = producer_kind(module)
    if kind is not None:
        return _producer_role(module, kind)
    custom = custom_layer(module)
    for kind, is_one in (
        ("depthwise", is_depthwise(module)),
        ("batchnorm", is_batchnorm(module)),
        ("custom", custom is not None),
    ):
        if is_one:
            names = per_channel_names(module)
            return Role(
                kind,
                word,
                activation=activation_of(module),
                multiplier=_multiplier(module),
                tensors=names,
                per_channel=() if custom is None else custom.per_channel,
                linear=custom is not None and custom.linear,
                has_stored_channels=is_stored(module, names),
            )
    selects = isinstance(module, SELECTING)
    if type(module) in MODULES:
        return Role("activation", word, activation=activation(module), selects=selects)
    for kind, types in (("dropout", ELEMENTWISE), ("curved", CURVED), ("spatial", SPATIAL), ("flatten", (nn.Flatten,))):
        if isinstance(module, types):
            return Role(kind, word, selects=selects)
    mixing = next((word for type_, word in MIXING.items() if isinstance(module, type_)), None)
    return Role("other", word) if mixing is None else Role("mixing", mixing)


def _multiplier(module: nn.Module) -> int:
    return module.out_channels // module.in_channels if isinstance(module, nn.Conv2d) else 1


def _producer_role(module: nn.Module, kind: str) -> Role:
    inner = module.activation if isinstance(module, EdgeConv) else None
    weight = module._parameters.get("weight")
    return Role(
        kind,
        type(module if inner is None else inner).__name__,
        activation=None if inner is None else activation_of(inner),
        width=output_width(module),
        input_width=input_width(module),
        tensors=("weight", "bias", "metric"),
        fan_in=0 if weight is None else weight[0].numel() + has_bias(module),
        is_grouped=isinstance(module, nn.Conv2d) and module.groups > 1,
        has_stored_rows=is_stored(module, ("weight", "bias")),
        has_stored_columns=is_stored(module, ("weight",)),
    )


def producer_kind(module: nn.Module) -> str | None:
    """Return which of `PRODUCERS` the module is; None if it is no producer."""
    if isinstance(module, EdgeConv):
        return "edgeconv"
    if isinstance(module, nn.Conv2d) and type(module).forward is nn.Conv2d.forward:
        return None if is_depthwise(module) else "conv"
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    return None


def is_depthwise(module: nn.Module) -> bool:
    """Return whether the module is a depthwise convolution; several outputs per channel are allowed."""
    return isinstance(module, nn.Conv2d) and module.groups > 1 and module.groups == module.in_channels


def is_batchnorm(module: nn.Module) -> bool:
    """Return whether the module is a BatchNorm with running statistics."""
    return isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None


def output_width(module: nn.Module) -> int:
    """Return the number of filters of a producer."""
    return int(module.out_channels if isinstance(module, nn.Conv2d) else module.out_features)  # type: ignore[arg-type]


def input_width(module: nn.Module) -> int:
    """Return the number of input channels of a producer."""
    return int(module.in_channels if isinstance(module, nn.Conv2d) else module.in_features)  # type: ignore[arg-type]


def has_bias(module: nn.Module) -> bool:
    """Return whether a module has a bias, without evaluating a computed one."""
    return module._parameters.get("bias") is not None or is_parametrized(module, "bias")


def is_stored(module: nn.Module, names: Sequence[str]) -> bool:
    """Return whether these tensors, if the module has them, are plain parameters or buffers."""
    return not any(is_parametrized(module, name) for name in names) and all(
        name in module._parameters or name in module._buffers or getattr(module, name, None) is None for name in names
    )


def per_channel_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the tensors in which a follower of this kind may have one slice per channel."""
    custom = custom_layer(module)
    return ("weight", "bias", "running_mean", "running_var") if custom is None else custom.per_channel


def per_channel_tensors(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a follower's parameters and buffers that have one slice per channel."""
    stored = {**module._parameters, **module._buffers}
    return tuple(name for name in per_channel_names(module) if stored.get(name) is not None)
