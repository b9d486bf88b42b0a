"""Models inside wrappers and in shards: the module that holds the layers, and what an example input stands for."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.parallel import DistributedDataParallel

from s3d_fast.network.undo import AllOrNothing

WRAPPERS = (nn.DataParallel, DistributedDataParallel, torch.optim.swa_utils.AveragedModel)


def unwrap(model: Any) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel, AveragedModel and torch.compile.

    Raises:
        TypeError: it is no module.
        ValueError: `fully_shard` has divided its parameters.
    """
    if isinstance(model, ExportedProgram):
        return model.module()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    *_, inner = _layers_of_wrapping(model)
    if any(_is_sharded(module) for module in inner.modules()):
        raise ValueError(
            "model must have whole parameters, got one that fully_shard has divided: grow "
            "s3d_fast.unsharded(model), and call fully_shard on the result"
        )
    return inner


def retire_wrappers(model: nn.Module) -> None:
    """Make DistributedDataParallel around a model that has been split refuse to run.

    It averages the gradients of the parameters that it was made with, so those of new parameters would differ between
    the processes, without an error.
    """
    for wrapper in _layers_of_wrapping(model):
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.register_forward_pre_hook(_refuse)


def unsharded(model: nn.Module) -> nn.Module:
    """Return a copy of a model that `fully_shard` has divided, with whole parameters, as it was before.

    Trace, capture and split the copy, then call `fully_shard` on it and make a new optimizer. Gradients are not copied.
    Every process must call this: the parameters are gathered from all of them, and each gets the whole model.
    """
    modules = list(model.modules())
    classes = {module: type(module) for module in modules if _is_sharded(module)}
    for module in classes:
        # Parameters that a forward pass has gathered are given back first.
        module.reshard()  # type: ignore[operator]
    whole: dict[int, Any] = {}
    for parameter in model.parameters():
        if hasattr(parameter, "full_tensor"):
            full = parameter.full_tensor().detach().clone()
            whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    with AllOrNothing(modules) as undo:
        try:
            for module, sharded in classes.items():
                module.__class__ = next(one for one in sharded.__mro__ if not _is_of_torch_distributed(one))
            for module in modules:
                _drop_sharding(module)
            return copy.deepcopy(model, whole)
        finally:
            undo.undo()
            for module, sharded in classes.items():
                module.__class__ = sharded


def _layers_of_wrapping(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model, what it wraps, and so on."""
    while True:
        yield model
        if isinstance(model, WRAPPERS):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return


def _refuse(wrapper: nn.Module, arguments: Any) -> None:
    raise RuntimeError(
        "the model inside this DistributedDataParallel has been split, and the gradients of its new parameters would "
        "not be averaged: wrap it again, as DistributedDataParallel(model.module)"
    )


def _is_sharded(module: nn.Module) -> bool:
    # By its name: the import takes time, and fails where torch is built without torch.distributed.
    return any(one.__name__ == "FSDPModule" and _is_of_torch_distributed(one) for one in type(module).__mro__)


def _is_of_torch_distributed(one: Any) -> bool:
    """Return whether a class or a hook belongs to torch.distributed, such as the classes that `fully_shard` makes."""
    function = getattr(one, "hook", one)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def _drop_sharding(module: nn.Module) -> None:
    """Take the hooks and the state of `fully_shard` from a module."""
    for name, value in list(vars(module).items()):
        if name.startswith("__composable_api_state_key"):
            del module.__dict__[name]
        elif name.endswith("_hooks") and isinstance(value, dict):
            hooks: dict[Any, Callable[..., Any]] = value
            for key in [key for key, hook in hooks.items() if _is_of_torch_distributed(hook)]:
                del hooks[key]


def arguments_of(model: nn.Module, example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: a tuple holds positions, a dict of parameter names holds keywords."""
    if isinstance(example_input, tuple):
        return example_input, {}
    if isinstance(example_input, Mapping) and example_input and _are_parameters(model, example_input):
        return (), dict(example_input)
    return (example_input,), {}


def _are_parameters(model: nn.Module, names: Mapping[Any, Any]) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return all(isinstance(name, str) and (takes_any or name in parameters) for name in names)
