"""Modules that users register: they treat every channel alone, and tracing does not look inside."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from s3d_fast.maths.activations import Activation, activation, activation_names, is_activation
from s3d_fast.network.calls import Call, shape
from s3d_fast.network.flow import Flow, Value
from s3d_fast.network.rules.rule import Rule, rule


@dataclass(frozen=True)
class CustomLayer:
    """The properties of a module type, as given to `register_layer`."""

    per_channel: tuple[str, ...]
    size_attributes: tuple[str, ...]
    activation: Callable[[Any], Activation] | None
    linear: bool


REGISTERED: dict[type[nn.Module], CustomLayer] = {}


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
    REGISTERED[module_type] = CustomLayer(channels, sizes, make, linear)


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
    return REGISTERED.get(type(module))


def registered_chain(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes; None if it is not a known activation."""
    custom = custom_layer(module)
    if custom is not None:
        return custom.activation(module) if custom.activation is not None else None
    return activation(module) if is_activation(module) else None


@torch.library.custom_op("s3d_network::registered", mutates_args=())
def registered(x: Tensor, tensors: list[Tensor], name: str) -> Tensor:
    """Evaluate a registered module; graphs show it as one call."""
    raise RuntimeError(f"the registered module {name!r} is evaluated by the graph's interpreter")


@registered.register_fake
def _(x: Tensor, tensors: list[Tensor], name: str) -> Tensor:
    before, after = _SHAPES[name]
    return x.new_empty([x.shape[i] if i < len(before) and before[i] == size else size for i, size in enumerate(after)])


_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}


@contextmanager
def opaque(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[None]:
    """Make registered modules show as one call each while the model is exported."""
    own = {name: module for name, module in model.named_modules() if custom_layer(module) is not None}
    if not own:
        yield
        return
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    hooks = []
    for name, module in own.items():

        def note(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            shapes[name] = (tuple(inputs[0].shape), tuple(output.shape))

        hooks.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            model(*arguments, **keywords)
    finally:
        for hook in hooks:
            hook.remove()
    before = {name: vars(module).get("forward") for name, module in own.items()}
    try:
        for name, module in own.items():
            if name in shapes:
                _SHAPES[name] = shapes[name]
                module.__dict__["forward"] = _call(name, module)
        yield
    finally:
        for name, module in own.items():
            _SHAPES.pop(name, None)
            if before[name] is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before[name]


def _call(name: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        # Read here: torch.export puts its own tensors in their place while it runs.
        tensors = [getattr(module, tensor, None) for tensor in REGISTERED[type(module)].per_channel]
        return registered(x, [tensor for tensor in tensors if tensor is not None], name)

    return forward


def evaluate(model: nn.Module, node: fx.Node, x: Tensor) -> Tensor:
    """Return what the registered module of a node computes."""
    return model.get_submodule(str(Call(node)["name"]))(x)


@rule("s3d_network.registered")
class Registered(Rule):
    """A registered module: its tensors have one slice for every channel."""

    kind = "custom"

    def follow(self, call: Call, flow: Flow) -> Value:
        x = flow.value(call["x"])
        tensors: list[fx.Node] = list(call["tensors"])
        axis = self._axis(call, x)
        for node in tensors:
            slots = flow.value(node).axes.get(0)
            if slots is None:
                continue
            if axis is None or len(x.axes[axis]) != len(slots):
                flow.block(x, f"the tensors of '{call['name']}' do not fit its channels")
                flow.block(flow.value(node), f"'{call['name']}' follows channels that no layer makes")
            else:
                flow.slots.tie(x.axes[axis], slots)
                flow.use(flow.value(node), [0])
        result = Value(x.axes)
        if not call.node.meta.get("is_linear", False):
            flow.note_curved(call.node, result)
        return result

    @staticmethod
    def _axis(call: Call, x: Value) -> int | None:
        if not x.axes:
            return None
        before, after = shape(call["x"]), call.shape
        kept = [axis for axis in x.axes if axis < len(after) and before[axis] == after[axis]]
        return kept[0] if kept else None
