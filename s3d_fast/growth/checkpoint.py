"""Grown networks and optimizer state on disk: safetensors and JSON; no pickle, no half-written files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from s3d_fast.base.files import write_whole
from s3d_fast.network import layers
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.graph import SIZE_ATTRIBUTES
from s3d_fast.splitting.undo import AllOrNothing, set_size

FORMAT = "s3d_fast grown network 1"


def save_grown(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a model's weights and the sizes of its layers. The file appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write(path, dict(model.state_dict()), {"sizes": layer_sizes(model)})


def load_grown(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Give a newly constructed model, of any widths, the saved weights and sizes; it then computes the same outputs.

    The model must have the same layers; its dtypes and devices stay. Changed parameters are new objects, so create the
    optimizer afterwards.

    Raises:
        ValueError: the file is not a grown network, its layers differ from the model's, or the size of a layer cannot
            be set. The model is unchanged after this and any other error.
        OSError: the file cannot be read.
    """
    tensors, record = read(path)
    restore(model, tensors, record)


def restore(model: nn.Module, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Give a model the weights and sizes of a saved one; see `load_grown`."""
    state = model.state_dict(keep_vars=True)
    if set(state) != set(tensors):
        missing, extra = sorted(set(state) - set(tensors)), sorted(set(tensors) - set(state))
        raise ValueError(
            f"the file does not belong to this model: it lacks {missing[:3] or 'nothing'} and also "
            f"has {extra[:3] or 'nothing'}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    sizes = record.get("sizes", {})
    if not isinstance(sizes, dict) or not all(isinstance(attributes, dict) for attributes in sizes.values()):
        raise ValueError("the file's sizes must be a mapping of layers to their sizes")
    for name, attributes in sizes.items():
        if name not in modules:
            raise ValueError(f"the file has sizes for {name!r}, but the model has no such layer")
        for attribute, value in attributes.items():
            if attribute not in _size_attributes(modules[name]) or type(value) is not int or value < 1:
                raise ValueError(f"the file has a bad size for {name!r}: {attribute} = {value!r}")
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        wanted = _wanted_shape(modules[owner], attribute, sizes.get(owner, {}), state[name], tensors, owner)
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name!r} must have shape {wanted} in this model, got {tuple(tensor.shape)} in the file")

    # Allocate memory and copy to the devices before the first change: both can fail.
    loaded = {name: tensor.to(state[name].device, state[name].dtype) for name, tensor in tensors.items()}
    with AllOrNothing(modules.values()) as change:
        successors: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        for name, new in loaded.items():
            owner, _, attribute = name.rpartition(".")
            module, old = modules[owner], state[name]
            if new.shape == old.shape and _can_be_written(old):
                change.write(old, new)
                continue
            # A tensor that two layers share stays one tensor.
            key = (id(old), tuple(new.shape))
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                module._parameters[attribute] = successors.setdefault(key, new)
            else:
                module._buffers[attribute] = successors.setdefault(key, new)
        # Inner layers come first: the size of an outer layer may be a property that reads an inner one.
        for name, attributes in reversed(sizes.items()):
            for attribute, value in attributes.items():
                set_size(modules[name], attribute, value)


def _can_be_written(tensor: Tensor) -> bool:
    """Return whether values can be copied into a tensor: not if it is expanded or an inference tensor."""
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.numel() == 0 or places >= tensor.numel()) and not tensor.is_inference()


def _wanted_shape(
    module: nn.Module,
    attribute: str,
    sizes: Mapping[str, int],
    now: Tensor,
    tensors: Mapping[str, Tensor],
    owner: str,
) -> tuple[int, ...]:
    """Return the shape that a tensor of a module must have if the module has the sizes of the file."""

    def size(name: str) -> int:
        return sizes.get(name, getattr(module, name))

    if isinstance(module, EdgeConv):
        inputs = size("in_features")
        return {"weight": (size("out_features"), 2 * inputs), "metric": (inputs,)}.get(attribute, tuple(now.shape))
    shapes: dict[str, tuple[int, ...]] = {}
    if isinstance(module, nn.Conv2d):
        inputs = size("in_channels") // size("groups")
        shapes = {"weight": (size("out_channels"), inputs, *module.kernel_size), "bias": (size("out_channels"),)}
    elif isinstance(module, nn.Linear):
        outputs = size("out_features")
        shapes = {"weight": (outputs, size("in_features")), "bias": (outputs,)}
    elif layers.is_batchnorm(module):
        shapes = dict.fromkeys(layers.per_channel_names(module), (size("num_features"),))
    if attribute in shapes:
        return shapes[attribute]
    custom = layers.custom_layer(module)
    if custom is not None and attribute in custom.per_channel:
        # Without a size attribute, the tensors of the module only have to agree with one another.
        names = (f"{owner}.{name}" if owner else name for name in custom.per_channel)
        first = next(tensors[name] for name in names if name in tensors)
        channels = {size(name) for name in custom.size_attributes} or set(first.shape[:1])
        return (min(channels), *now.shape[1:]) if len(channels) == 1 else tuple(now.shape)
    return tuple(now.shape)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return an optimizer's state as tensors by name, and its parameter groups as plain data."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is not None:
                tensors[f"{names[id(parameter)]}|{key}"] = torch.as_tensor(value)
    groups = []
    for group in optimizer.param_groups:
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append({"params": [names[id(parameter)] for parameter in group["params"]], "options": options})
    return tensors, groups


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    groups: list[dict[str, Any]],
) -> None:
    """Give a fresh optimizer the state that `optimizer_tensors` returned.

    Raises:
        ValueError: the parameter groups of the optimizer differ.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    mine = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if mine != [group["params"] for group in groups]:
        raise ValueError("the parameter groups of the optimizer differ from the saved ones")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            group[key] = tuple(value) if isinstance(value, list) else value
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("|")
        optimizer.state[parameters[parameter]][key] = value.to(_state_device(key, parameters[parameter]))


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write tensors and a JSON record to one file, atomically; see `write_whole`."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(path, serialize(plain, metadata={"format": FORMAT, "record": json.dumps(record)}))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the record of a file that `write` made.

    Raises:
        ValueError: the file is not one that `write` made.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is not a safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)} must be a {FORMAT!r}, got {metadata.get('format')!r}")
    try:
        record = json.loads(metadata.get("record", "null"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{os.fspath(path)} has a record that is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{os.fspath(path)} must have a record that is a mapping, got {type(record).__name__}")
    return tensors, record


def layer_sizes(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the size attributes of every module that has any."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        sizes = {a: getattr(module, a) for a in _size_attributes(module) if isinstance(getattr(module, a, None), int)}
        if sizes:
            found[name] = sizes
    return found


def _size_attributes(module: nn.Module) -> tuple[str, ...]:
    custom = layers.custom_layer(module)
    # Nothing else is set from a file.
    return SIZE_ATTRIBUTES if custom is None else custom.size_attributes


def _state_device(key: str, parameter: Tensor) -> torch.device:
    # PyTorch's optimizers keep their step counters on the CPU.
    return torch.device("cpu") if key == "step" else parameter.device


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
