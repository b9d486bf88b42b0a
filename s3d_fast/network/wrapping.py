"""Models inside wrappers: the module that holds the layers, and what an example input stands for."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.export import ExportedProgram
from torch.nn.parallel import DistributedDataParallel

from s3d_fast.network.sharding import is_sharded

WRAPPERS = (nn.DataParallel, DistributedDataParallel, torch.optim.swa_utils.AveragedModel)


def unwrap(model: Any) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel, AveragedModel and torch.compile.

    Raises:
        TypeError: it is no module.
        ValueError: `fully_shard` has divided its parameters.
    """
    inner = inside(model)
    if is_sharded(inner):
        raise ValueError(
            "model must have whole parameters, got one that fully_shard has divided: give s3d_fast.unsharded(model), "
            "in every process"
        )
    return inner


def inside(model: Any) -> nn.Module:
    """Return the same module as `unwrap`, whether `fully_shard` has divided its parameters or not."""
    if isinstance(model, ExportedProgram):
        return model.module()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    *_, inner = _layers_of_wrapping(model)
    return inner


def retire_wrappers(model: nn.Module) -> None:
    """Make DistributedDataParallel around a model that has been split refuse to run.

    It averages the gradients of the parameters that it was made with, so those of new parameters would differ between
    the processes, without an error.
    """
    for wrapper in _averaging(model):
        wrapper.register_forward_pre_hook(_refuse)


def rewrap(model: nn.Module) -> nn.Module:
    """Make DistributedDataParallel around a model that has been split anew, in place and with its options.

    It takes the new parameters and their sizes from the first process. Every process must call this. `grow_step` does
    it by itself.

    Args:
        model: a DistributedDataParallel, or anything around or inside one. Other models stay as they are.

    Returns:
        The same object.

    Raises:
        ValueError: a DistributedDataParallel has options that cannot be read back. It is unchanged then.
    """
    require_rewrappable(model)
    for wrapper in _averaging(model):
        _make_anew(wrapper)
    return model


# Options of DistributedDataParallel that it keeps under their own names.
_DDP_OPTIONS = (
    *("device_ids", "output_device", "dim", "broadcast_buffers", "process_group", "find_unused_parameters"),
    *("gradient_as_bucket_view", "static_graph", "mixed_precision", "skip_all_reduce_unused_params"),
    *("batched_grad_copy", "forward_sync_buffers"),
)


def require_rewrappable(model: nn.Module) -> None:
    """Raise ValueError if `rewrap` cannot make a DistributedDataParallel around a model anew."""
    for wrapper in _averaging(model):
        if wrapper._delay_all_reduce_params:
            raise ValueError(
                "model: a DistributedDataParallel with delay_all_reduce_named_params cannot be made anew; split the "
                "module inside it, and wrap that again"
            )


def _make_anew(wrapper: DistributedDataParallel) -> None:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options = {name: getattr(wrapper, name) for name in _DDP_OPTIONS if name in known and hasattr(wrapper, name)}
    if not wrapper.bucket_bytes_cap_default:
        options["bucket_cap_mb"] = wrapper.bucket_bytes_cap // 2**20
    if caps := getattr(wrapper, "bucket_bytes_cap_list", None):
        options.pop("bucket_cap_mb", None)
        options["bucket_cap_mb_list"] = [cap // 2**20 for cap in caps]
    hooks = {
        name: table for name, table in vars(wrapper).items() if name.endswith("_hooks") and isinstance(table, dict)
    }
    for key in [key for key, hook in wrapper._forward_pre_hooks.items() if hook is _refuse]:
        del wrapper._forward_pre_hooks[key]
    communication, training = list(wrapper._comm_hooks), wrapper.training
    # The same object: a trainer holds it in places that nobody else can reach.
    DistributedDataParallel.__init__(wrapper, wrapper.module, **options)
    wrapper.training = training
    vars(wrapper).update(hooks)
    for hook, state in communication:
        wrapper.register_comm_hook(state, hook)


def _averaging(model: nn.Module) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel whose gradients include a model's, also those that the caller cannot reach.

    A trainer may keep the wrapper to itself, and give a callback the model inside it, or a part of that.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    inner = inside(model)
    # Wrappers that nobody holds any more are not made anew.
    gc.collect()
    wrappers = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return [one for one in wrappers if any(part is inner for part in one.modules())]


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
