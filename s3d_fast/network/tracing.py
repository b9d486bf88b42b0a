"""Tracing: from a model and an example of its input to the graph of what can be split."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from s3d_fast.network.execution import in_order
from s3d_fast.network.export import Exported, exported, takes
from s3d_fast.network.graph import Graph, fingerprint, hooks_of
from s3d_fast.network.proof import proved
from s3d_fast.network.sharding import is_sharded, unsharded
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.network.units import Analysis
from s3d_fast.network.wrapping import arguments_of, inside


def trace(model: nn.Module, example_input: Any, *, prove: bool = True) -> Graph:
    """Return the graph of a model and its units, from torch.export's graph of it in eval mode.

    The graph is compared with the model on the example input. Then every unit is split on trial and undone: a unit
    whose split changes the model's output is refused, with the reason.

    Args:
        model: any nn.Module that torch.export can follow, also inside DistributedDataParallel, torch.compile and the
            like; it stays unchanged. Of a model that `fully_shard` has divided, the graph keeps a whole copy; every
            process must call this.
        example_input: a tensor; a tuple of positional arguments; or a dict of keyword arguments. The first dimension of
            tensors is the batch.
        prove: check the graph and all units by evaluating the model. It costs about six forward passes, of two or three
            samples where the model takes so few. Without a proof, `apply_splits` wants an example input to check the
            split with.

    Raises:
        ValueError: the model cannot evaluate example_input, or torch.export cannot follow the model (the message names
            the line and a way out), or the graph computes something else than the model.
        TypeError: model is no module.
    """
    model = inside(model)
    if is_sharded(model):
        model = unsharded(model)
    with undisturbed(model), torch.random.fork_rng(devices=[]):
        program = exported(model, *arguments_of(model, example_input))
        analysis = Analysis(model, program)
        graph = proved(model, program, analysis) if prove else analysis.graph()
    graph.traced, graph.model, graph.is_proved = fingerprint(model), model, prove
    return graph


def graph_for(graph: Graph, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Graph:
    """Return a graph of the same model that can be evaluated with these arguments.

    A graph holds for one size of input and the hooks that the model had. For another size the model is exported once
    more, and at the next one for any batch size; if its code does not allow that, once for every size.

    Raises:
        ValueError: the model cannot be exported with these arguments, or has other units then.
    """
    if "argument_names" not in graph.module.meta:
        raise ValueError("graph is that of a pickled plan, which has no calls to evaluate; trace the model again")
    inputs = in_order(graph.module, model, arguments, keywords)
    for known in (graph, *graph.variants):
        if takes(known.module, inputs) and known.module.meta["hooks"] == hooks_of(model):
            return known
    # Most captures have batches of one size, and a graph for one size takes a third of the time.
    program = _for_any_batch(model, arguments, keywords) if graph.variants else None
    if program is None or not takes(program.module, inputs):
        program = exported(model, arguments, keywords)
    found = Analysis(model, program).graph()
    missing = [name for name in graph.units if name not in found.units]
    if missing or any(found.units[name].width != unit.width for name, unit in graph.units.items()):
        raise ValueError(f"model has other units for this input than for the one it was traced with: {missing[:3]}")
    graph.variants.append(found)
    return found


def _for_any_batch(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Exported | None:
    try:
        return exported(model, arguments, keywords, any_batch=True)
    except ValueError:
        return None
