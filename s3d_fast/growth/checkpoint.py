"""Grown networks and optimizer state on disk: safetensors and JSON; no pickle, no half-written files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from s3d_fast.base.files import write_whole
from s3d_fast.base.tensor_files import is_pickled, read_pickled, read_safetensors, serialized
from s3d_fast.network.sizes import fitting_sizes, size_attributes, wanted_shapes
from s3d_fast.network.undo import AllOrNothing, set_size
from s3d_fast.network.wrapping import unwrap
from s3d_fast.records.json_records import mapping, parse

FORMAT = "s3d_fast grown network 1"


def save_grown(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a model's weights and the sizes of its layers. The file appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    model = unwrap(model)
    write(path, dict(model.state_dict()), {"sizes": layer_sizes(model)})


def load_grown(model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Tensor]) -> None:
    """Give a newly constructed model, of any widths, the saved weights and sizes; it then computes the same outputs.

    The model must have the same layers; its dtypes and devices stay. Changed parameters are new objects, so create the
    optimizer afterwards.

    Args:
        model: the model; also inside DistributedDataParallel, torch.compile and the like.
        source: a file of `save_grown`, any other safetensors file, a `.pt`, `.pth`, `.bin` or `.ckpt` of PyTorch or
            Lightning (loaded with weights_only, so that nothing in it is executed), or a state_dict.

    Raises:
        ValueError: the source holds no weights, its layers differ from the model's, or the size of a layer cannot be
            set. The model is unchanged after this and any other error.
        OSError: the file cannot be read.
    """
    if isinstance(source, Mapping):
        restore(unwrap(model), source, {})
        return
    tensors, record = read_any(source)
    with naming(source):
        restore(unwrap(model), tensors, record)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let a ValueError about the content of a file name the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def resize_like(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Give a newly constructed model the sizes of a grown one; `load_state_dict` then accepts the weights.

    Tensors that change their size are new, and hold zeros; the others keep their values. The tensors of the state_dict
    may be on the meta device: only their shapes are read.

    Args:
        model: the model, of any widths, with the same layers.
        state_dict: of the grown model; prefixes of wrappers such as "module." do not matter.

    Raises:
        ValueError: the layers differ, or the size of a layer cannot be set. The model is unchanged then.
    """
    model = unwrap(model)
    state = model.state_dict(keep_vars=True)
    given = _matching(state_dict, state)
    blank = {
        name: tensor.detach()
        if tensor.shape == given[name].shape
        else torch.zeros(given[name].shape, dtype=tensor.dtype)
        for name, tensor in state.items()
    }
    restore(model, blank, {})


Model = TypeVar("Model", bound=nn.Module)


def growable(model: Model) -> Model:
    """Let `load_state_dict` of a model take the weights of a grown one: the layers get the saved sizes first.

    Trainers that load checkpoints by themselves then resume grown models. Parameters that change their size are new
    objects, so create the optimizer afterwards. Call this on a module of yours at the end of its `__init__`.

    Args:
        model: the model, of any widths; also a part of a larger one.

    Returns:
        The same model.

    Raises:
        ValueError: while weights are loaded, the size of a layer cannot be set. The model is unchanged then.
    """
    inner = unwrap(model)
    known = inner._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", hook) is _resize_before_loading for hook in known):
        inner.register_load_state_dict_pre_hook(_resize_before_loading)
    return model


def _resize_before_loading(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    """Give a model the sizes of a state_dict; names that either side lacks are left to `load_state_dict` itself."""
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    given = {name: state_dict.get(prefix + name, tensor) for name, tensor in own.items()}
    if any(isinstance(given[name], Tensor) and given[name].shape != tensor.shape for name, tensor in own.items()):
        resize_like(model, given)


def layer_arguments(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the size arguments that every layer of a grown model would be constructed with, by the layer's name.

    Write them into your own constructor to keep the grown architecture: {"layers.0": {"in_features": 20, ...}, ...}.
    """
    return {name: sizes for name, module in unwrap(model).named_modules() if (sizes := fitting_sizes(module))}


def _matching(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint under the model's names, without prefixes that wrappers have added.

    Raises:
        ValueError: the names differ from the model's.
    """
    names = {str(name): tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    for prefix in ("", "module.", "_orig_mod.", "model.", "net.", "module._orig_mod.", "model._orig_mod."):
        own = {name.removeprefix(prefix): tensor for name, tensor in names.items() if name.startswith(prefix)}
        # A Lightning module may hold other tensors beside the network; AveragedModel counts its updates.
        is_whole = len(own) == len(names) or prefix in ("model.", "net.", "module.")
        if own.keys() == state.keys() and is_whole:
            return own
    missing, extra = sorted(state.keys() - names.keys()), sorted(names.keys() - state.keys())
    raise ValueError(
        f"the file does not belong to this model: it lacks {missing[:3] or 'nothing'} and also has "
        f"{extra[:3] or 'nothing'}"
    )


def restore(model: nn.Module, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Give a model the weights and sizes of a saved one; see `load_grown`."""
    state = model.state_dict(keep_vars=True)
    tensors = _matching(tensors, state)
    modules = dict(model.named_modules(remove_duplicate=False))
    given = record.get("sizes", {})
    if not isinstance(given, dict) or not all(isinstance(attributes, dict) for attributes in given.values()):
        raise ValueError("the file's sizes must be a mapping of layers to their sizes")
    for name, attributes in given.items():
        if name not in modules:
            raise ValueError(f"the file has sizes for {name!r}, but the model has no such layer")
        for attribute, value in attributes.items():
            if attribute not in size_attributes(modules[name]) or type(value) is not int or value < 1:
                raise ValueError(f"the file has a bad size for {name!r}: {attribute} = {value!r}")
    sizes = _sizes(modules, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, state, given)

    for name, tensor in tensors.items():
        if _kind(tensor) != _kind(state[name]):
            raise ValueError(f"{name!r} must hold {_kind(state[name])} numbers in this model, got {tensor.dtype}")
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


def _kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "floating-point" if tensor.is_floating_point() else "whole"


def _can_be_written(tensor: Tensor) -> bool:
    """Return whether values can be copied into a tensor: not if it is expanded or an inference tensor."""
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.numel() == 0 or places >= tensor.numel()) and not tensor.is_inference()


def _sizes(
    modules: Mapping[str, nn.Module],
    shapes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, Tensor],
    given: Mapping[str, Mapping[str, int]],
) -> dict[str, dict[str, int]]:
    """Return the size attributes of all modules that fit the shapes in a file.

    Raises:
        ValueError: shapes of one module contradict each other, its kind, or the sizes in the file.
    """
    by_owner: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        owner, _, attribute = name.rpartition(".")
        if len(shape) != state[name].dim() or min(shape, default=1) < min(state[name].shape, default=1) == 0:
            wanted = tuple(state[name].shape)
            raise ValueError(f"{name!r} must have {len(wanted)} dimensions in this model, got {shape} in the file")
        by_owner.setdefault(owner, {})[attribute] = shape
    found: dict[str, dict[str, int]] = {}
    for owner, module in modules.items():
        own, told = by_owner.get(owner, {}), given.get(owner, {})
        if not own and not told:
            continue
        sizes = fitting_sizes(module, own, told) if own else {}
        for attribute, value in told.items():
            if sizes.get(attribute, value) != value:
                raise ValueError(
                    f"the file has a bad size for {owner!r}: {attribute} = {value}, but its tensors have "
                    f"{sizes[attribute]}"
                )
        found[owner] = {**told, **sizes}
        if not found[owner] or not own:
            continue
        for attribute, wanted in wanted_shapes(module, own, found[owner]).items():
            if attribute in own and own[attribute] != wanted:
                full = f"{owner}.{attribute}" if owner else attribute
                raise ValueError(f"{full!r} must have shape {wanted} in this model, got {own[attribute]} in the file")
    for name, shape in shapes.items():
        owner, _, attribute = name.rpartition(".")
        if not found.get(owner) and not _may_grow(state[name]) and shape != tuple(state[name].shape):
            raise ValueError(
                f"{name!r} must have shape {tuple(state[name].shape)} in this model, got {shape} in the file"
            )
    return found


def _may_grow(tensor: Tensor) -> bool:
    """Return whether a tensor of a module without size attributes may have another shape in a grown model."""
    return tensor.dim() > 0


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
    require_optimizer_state(model, optimizer, tensors, groups)
    parameters = dict(model.named_parameters())
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            group[key] = tuple(value) if isinstance(value, list) else value
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("|")
        optimizer.state[parameters[parameter]][key] = value.to(_state_device(key, parameters[parameter]))


def require_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    groups: Any,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Raise ValueError unless an optimizer can be given this state.

    Args:
        model: the model.
        optimizer: an optimizer of the model, with the same parameter groups.
        tensors, groups: as `optimizer_tensors` returned them; read from a file, they can be anything.
        shapes: of the parameters, where the model will get others.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    mine = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("the parameter groups of the optimizer must be a list of mappings")
    if mine != [group.get("params") for group in groups]:
        raise ValueError("the parameter groups of the optimizer differ from the saved ones")
    for group in groups:
        for key, value in mapping("the options of the optimizer", group.get("options")).items():
            entries = value if isinstance(value, list) else [value]
            if not all(entry is None or isinstance(entry, bool | int | float | str) for entry in entries):
                raise ValueError(f"the optimizer's option {key!r} must be plain, got {value!r}")
    for name, value in tensors.items():
        owner, _, key = name.rpartition("|")
        if owner not in parameters:
            raise ValueError(f"the optimizer's {key!r} belongs to {owner!r}, which the model does not have")
        wanted = tuple(parameters[owner].shape) if shapes is None else shapes.get(owner, ())
        fits = len(value.shape) != len(wanted) or all(
            size in (1, want) for size, want in zip(value.shape, wanted, strict=True)
        )
        if not fits or value.numel() > max(1, math.prod(wanted)):
            raise ValueError(f"the optimizer's {key!r} of {owner!r} must fit {wanted}, got {tuple(value.shape)}")


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write tensors and a JSON record to one file, atomically; see `write_whole`."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(path, serialized(plain, {"format": FORMAT, "record": json.dumps(record)}))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the record of a file that `write` made.

    Raises:
        ValueError: the file is not one that `write` made.
    """
    tensors, metadata = read_safetensors(path)
    return tensors, _record(path, metadata)


def _record(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)} must be a {FORMAT!r}, got {metadata.get('format')!r}")
    where = f"the record of {os.fspath(path)}"
    # Losses that are not known are NaN.
    return mapping(where, parse(where, metadata.get("record", "null"), constant=float))


def read_any(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint of any format, and the record if `write` made it.

    Raises:
        ValueError: the file holds no tensors that can be read without executing code.
        OSError: the file cannot be read.
    """
    if is_pickled(path):
        return _state_in(path, read_pickled(path)), {}
    tensors, metadata = read_safetensors(path)
    is_ours = metadata.get("format") == FORMAT or "record" in metadata
    return tensors, _record(path, metadata) if is_ours else {}


def _state_in(path: str | os.PathLike[str], loaded: Any) -> dict[str, Tensor]:
    """Return the state_dict in what a checkpoint holds: itself, or an entry with one of the usual names."""
    for name in ("state_dict", "model_state_dict", "model", "module", "net"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{os.fspath(path)} holds no state_dict")
    return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}


def layer_sizes(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the size attributes of every module that has any."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        sizes = {a: getattr(module, a) for a in size_attributes(module) if isinstance(getattr(module, a, None), int)}
        if sizes:
            found[name] = sizes
    return found


def _state_device(key: str, parameter: Tensor) -> torch.device:
    # PyTorch's optimizers keep their step counters on the CPU.
    return torch.device("cpu") if key == "step" else parameter.device


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
