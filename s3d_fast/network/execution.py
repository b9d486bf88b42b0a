"""Evaluates an exported graph node by node, as the model itself would."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from s3d_fast.network import registered
from s3d_fast.network.calls import operation


class Execution(fx.Interpreter):
    """An interpreter of an exported graph that knows registered modules, and regions without gradients.

    Args:
        module: the graph.
        model: the model that it was exported from; registered modules are called there.
    """

    def __init__(self, module: fx.GraphModule, model: nn.Module) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.model = model
        # Errors are raised again with our own messages.
        self.extra_traceback = False
        # Values are freed after their last use, which is the same in every run.
        self.garbage_collect_values = True
        # A copy of the module has the same `meta`, but other nodes.
        if module.meta.get("last_uses_in") is not module.graph:
            module.meta |= {"last_uses_in": module.graph, "last_uses": _last_uses(module.graph)}
        self.user_to_last_uses = module.meta["last_uses"]

    def run_node(self, n: fx.Node) -> Any:
        regions = n.meta.get("regions", ())
        if not regions:
            return self.evaluate(n)
        with contextlib.ExitStack() as stack:
            for kind, settings in regions:
                if kind == "wrap_with_set_grad_enabled":
                    stack.enter_context(torch.set_grad_enabled(bool(settings[0])))
                else:
                    device, dtype, enabled, cache = settings
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            return self.evaluate(n)

    def evaluate(self, n: fx.Node) -> Any:
        """Return the value of one node."""
        if n.op == "call_function" and operation(n) == "s3d_network.registered":
            arguments, _ = self.fetch_args_kwargs_from_env(n)
            return registered.evaluate(self.model, n, arguments[0])
        # Without the records for debuggers of `Interpreter.run_node`, which take longer than small operations.
        arguments, keywords = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, arguments, keywords)

    def fetch_attr(self, target: str) -> Any:
        """Return a tensor or module that the graph holds."""
        return held(self.module, target)


# By graph: the table of a module that holds an entry of this name, and the entry's key.
_PLACES: WeakKeyDictionary[nn.Module, dict[str, tuple[Mapping[str, Any], str]]] = WeakKeyDictionary()


def held(module: nn.Module, target: str) -> Any:
    """Return what a graph holds under a name; where that is, is looked up once."""
    places = _PLACES.setdefault(module, {})
    if target not in places:
        path, _, name = target.rpartition(".")
        owner = module.get_submodule(path)
        tables: tuple[Mapping[str, Any], ...] = (owner._parameters, owner._buffers, owner._modules)
        found = [table for table in tables if name in table]
        if not found:
            return getattr(owner, name)
        places[target] = (found[0], name)
    table, name = places[target]
    return table[name]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for every node, the arguments that no later node takes."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        last = [argument for argument in node.all_input_nodes if argument not in seen]
        seen.update(last)
        found[node] = last
    return found


def in_order(
    module: fx.GraphModule, model: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments of a call of the model in the order in which its graph takes them.

    Raises:
        TypeError: the model does not take these arguments.
    """
    wanted = module.meta["argument_names"]
    if not keywords and len(arguments) == len(wanted):
        return list(arguments)
    given = argument_names(model, arguments, keywords)
    return [given[name] for name in wanted if name in given]


def argument_names(model: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the model's parameters; further ones are numbered."""
    bound = inspect.signature(model.forward).bind(*arguments, **keywords)
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            given |= {f"{name}.{place}": one for place, one in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        else:
            given[name] = value
    return given
