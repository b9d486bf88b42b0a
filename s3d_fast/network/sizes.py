"""Size attributes of modules: numbers such as `out_channels` that must agree with the shapes of their tensors.

One class for each kind of module with such numbers. Surgery and loading know no other kinds of modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.registered import CustomLayer, custom_layer

Shape = tuple[int, ...]

# The attributes of modules that hold numbers of channels.
SIZE_ATTRIBUTES = (
    *("in_channels", "out_channels", "groups", "num_features", "in_features", "out_features", "num_parameters"),
    *("embedding_dim", "nf", "nx"),
)


def size_attributes(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's size attributes."""
    custom = custom_layer(module)
    return SIZE_ATTRIBUTES if custom is None else custom.size_attributes


def fitting_sizes(
    module: nn.Module, shapes: Mapping[str, Shape] | None = None, hints: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the values of a module's size attributes that fit its tensors, or tensors of the given shapes.

    Args:
        shapes: the shapes of its parameters and buffers by name; by default those that it has.
        hints: values of attributes that shapes alone do not tell, such as the groups of a convolution.
    """
    found = {} if shapes is None else dict(shapes)
    shapes = {name: tuple(tensor.shape) for name, tensor in _stored(module).items()} | found
    sizes = _kind(module).sizes(module, shapes, hints or {})
    return {name: size for name, size in sizes.items() if hasattr(module, name)}


def wanted_shapes(module: nn.Module, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Return the shapes that a module's tensors must have if it has these sizes; what it does not know may be any."""
    return _kind(module).shapes(module, shapes, sizes)


def _stored(module: nn.Module) -> dict[str, Any]:
    """Return the tensors of a module; those of a parametrization have the name of what they compute."""
    stored: dict[str, Any] = {**module._parameters, **module._buffers}
    parametrizations = module._modules.get("parametrizations")
    for name, parts in {} if parametrizations is None else parametrizations._modules.items():
        own = dict(parts._parameters)  # type: ignore[union-attr]
        # Weight normalisation keeps the direction last; the other parametrizations have one tensor.
        stored[name] = own.get("original1", own.get("original"))
    return {name: tensor for name, tensor in stored.items() if tensor is not None}


class _Kind(ABC):
    """How the size attributes of one kind of module and the shapes of its tensors depend on each other."""

    @abstractmethod
    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        """Return the attributes that fit the shapes."""

    @abstractmethod
    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        """Return the shapes that fit the attributes."""


class _Convolution(_Kind):
    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        if len(shapes.get("weight", ())) < 2:
            return {}
        own, other = shapes["weight"][:2]
        transposed = isinstance(module, _ConvTransposeNd)
        groups = hints.get("groups", module.groups)
        if (module.groups > 1 and module.groups == module.in_channels) or groups != module.groups:
            # Depthwise: the groups are the channels.
            multiplier = max(1, module.out_channels // module.in_channels)
            channels = own if transposed else own // multiplier
            return {"in_channels": channels, "groups": channels, "out_channels": channels * multiplier}
        inner = other * module.groups
        return (
            {"in_channels": own, "out_channels": inner} if transposed else {"in_channels": inner, "out_channels": own}
        )

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        groups = sizes.get("groups", module.groups)
        a, b = sizes["out_channels"], sizes["in_channels"] // groups
        if isinstance(module, _ConvTransposeNd):
            a, b = sizes["in_channels"], sizes["out_channels"] // groups
        return {"weight": (a, b, *module.kernel_size), "bias": (sizes["out_channels"],)}


class _Linear(_Kind):
    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        rows, columns = shapes["weight"] if len(shapes.get("weight", ())) == 2 else (None, None)
        return {} if rows is None or columns is None else {"out_features": rows, "in_features": columns}

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {"weight": (sizes["out_features"], sizes["in_features"]), "bias": (sizes["out_features"],)}


class _EdgeConv(_Kind):
    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        rows, columns = shapes["weight"]
        return {"out_features": rows, "in_features": columns // 2}

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {"weight": (sizes["out_features"], 2 * sizes["in_features"]), "metric": (sizes["in_features"],)}


class _Norm(_Kind):
    TENSORS = ("weight", "bias", "running_mean", "running_var")

    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        own = [shapes[name] for name in self.TENSORS if len(shapes.get(name, ())) == 1]
        return {"num_features": own[0][0]} if own else {}

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        return dict.fromkeys(self.TENSORS, (sizes["num_features"],))


class _PReLU(_Kind):
    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        return {"num_parameters": shapes["weight"][0]}

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {"weight": (sizes["num_parameters"],)}


class _Embedding(_Kind):
    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        return {"embedding_dim": shapes["weight"][1]}

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {"weight": (module.num_embeddings, sizes["embedding_dim"])}


class _Registered(_Kind):
    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        custom = self._custom(module)
        # Optional tensors may be absent.
        own = [shapes[name] for name in custom.per_channel if shapes.get(name)]
        return dict.fromkeys(custom.size_attributes, own[0][0]) if own else {}

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        own = {name: shapes[name] for name in self._custom(module).per_channel if shapes.get(name)}
        channels = next(iter(own.values()))[0] if own else 0
        channels = next((sizes[name] for name in self._custom(module).size_attributes if name in sizes), channels)
        return {name: (channels, *getattr(module, name).shape[1:]) for name in own}

    @staticmethod
    def _custom(module: nn.Module) -> CustomLayer:
        custom = custom_layer(module)
        assert custom is not None
        return custom


class _Other(_Kind):
    """A module of another kind: its attributes may agree with the axes of its weight, as in GPT-2's Conv1D."""

    def sizes(self, module: Any, shapes: Mapping[str, Shape], hints: Mapping[str, int]) -> dict[str, int]:
        weight, own = shapes.get("weight", ()), vars(module).keys()
        if len(weight) == 2 and {"in_features", "out_features"} <= own:
            return {"out_features": weight[0], "in_features": weight[1]}
        if len(weight) == 2 and {"nf", "nx"} <= own:
            return {"nx": weight[0], "nf": weight[1]}
        if len(weight) == 1 and "num_features" in own:
            return {"num_features": weight[0]}
        return {}

    def shapes(self, module: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {}


_KINDS: tuple[tuple[type[nn.Module], _Kind], ...] = (
    (EdgeConv, _EdgeConv()),
    (_ConvNd, _Convolution()),
    (nn.Linear, _Linear()),
    (_NormBase, _Norm()),
    (nn.PReLU, _PReLU()),
    (nn.Embedding, _Embedding()),
)
_REGISTERED, _OTHER = _Registered(), _Other()


def _kind(module: nn.Module) -> _Kind:
    if custom_layer(module) is not None:
        return _REGISTERED
    return next((kind for type_, kind in _KINDS if isinstance(module, type_)), _OTHER)
