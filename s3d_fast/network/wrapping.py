"""Models inside wrappers: the module that holds the layers, and the arguments that an example input stands for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram


def unwrap(model: Any) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel, AveragedModel and torch.compile.

    Raises:
        TypeError: it is no module.
    """
    if isinstance(model, ExportedProgram):
        return model.module()
    while isinstance(model, nn.Module):
        wrapped = (
            nn.DataParallel,
            nn.parallel.DistributedDataParallel,
            torch.optim.swa_utils.AveragedModel,
        )
        if isinstance(model, wrapped):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model
    raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")


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
