"""Tracing: from a model and an example of its input to the graph of what can be split."""

from __future__ import annotations

import inspect
import os
import traceback
from typing import Any

import torch
from torch import Tensor, fx, nn

from s3d_fast.network import layers
from s3d_fast.network.channels import ChannelAnalysis
from s3d_fast.network.graph import Graph, fingerprint
from s3d_fast.network.undisturbed import undisturbed


def trace(model: nn.Module, example_input: Any) -> Graph:
    """Return the graph of a model and its units, from one symbolic evaluation in eval mode.

    Args:
        model: any nn.Module that torch.fx can trace; it stays unchanged.
        example_input: a tensor, or a tuple of arguments, with the shapes that the model expects. The first dimension
            is the batch.

    Raises:
        ValueError: torch.fx cannot trace the model (the message names the line and a remedy), or the traced model
            cannot evaluate example_input.
    """
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    with undisturbed(model), torch.no_grad():
        module = fx.GraphModule(model, _symbolic(model, len(arguments)))
        try:
            _Shapes(module).run(*arguments)
        except Exception as error:
            raise ValueError(f"example_input cannot be evaluated by the traced model: {error}") from error
    graph = ChannelAnalysis(module).run()
    graph.traced = fingerprint(model)
    return graph


class _Tracer(fx.Tracer):
    def __init__(self, leaves: set[nn.Module]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.leaves or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Records in `meta` the shape of every tensor, and which other results hold tensors."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["shape"] = tuple(result.shape)
        elif isinstance(result, (tuple, list)):
            n.meta["holds_tensors"] = any(isinstance(item, Tensor) for item in result)
        return result


def _symbolic(model: nn.Module, given: int) -> fx.Graph:
    """Return the graph of the model's forward pass; arguments after the first `given` have their default values."""
    parameters = list(inspect.signature(model.forward).parameters.values())[given:]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        return _Tracer(layers.leaves(model)).trace(model, defaults)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "an unknown line"
        raise ValueError(
            f"model cannot be traced by torch.fx at {where} ({error}). Control flow that depends on values is not "
            "supported: move it into a function marked by torch.fx.wrap, or into a module that treats every channel "
            "alone, and register that module with s3d_fast.register_layer"
        ) from error


def _is_users(filename: str) -> bool:
    return not filename.startswith((os.path.dirname(torch.__file__), "<")) and filename != __file__
