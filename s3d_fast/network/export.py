"""From a module to a graph of ATen operations, by torch.export: functional, for one size of input or any batch size."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import _SingleLevelFunction
from torch.export import Dim, ShapesCollection, export
from torch.utils import _pytree as pytree

from s3d_fast.network.calls import Call, operation
from s3d_fast.network.execution import argument_names
from s3d_fast.network.graph import hooks_of
from s3d_fast.network.registered import custom_layer, opaque
from s3d_fast.network.undo import AllOrNothing


@dataclass
class Exported:
    """A model as a graph of ATen operations.

    Attributes:
        module: the graph; its parameters and buffers are the model's own objects.
        arguments, keywords: the example that it was made with.
        batch: the batch size of the example; None if its tensors have no common first dimension.
    """

    module: fx.GraphModule
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    batch: int | None


def exported(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], any_batch: bool = False
) -> Exported:
    """Return the model as a graph. The model should be in eval mode.

    Args:
        any_batch: make a graph that takes any batch size, if the model's code does. That takes three times as long.

    Raises:
        ValueError: the model cannot evaluate the example, or torch.export cannot follow its code; the message names
            the line and a way out.
    """
    batch = _batch(arguments, keywords)
    if any_batch:
        arguments, keywords, batch = _at_least_two(model, arguments, keywords)
    shapes: Any = ShapesCollection()
    if any_batch and batch is not None:
        for tensor in _tensors(arguments, keywords):
            if tensor.dim() and tensor.shape[0] == batch:
                shapes[tensor] = {0: Dim.AUTO}
    functions: list[str] = []
    with (
        _quietly(),
        _without_stack_traces(),
        slow_attention(),
        _explaining(model, arguments, keywords),
        _attributes_kept(model),
        _functions_noted(functions),
        opaque(model, arguments, keywords),
    ):
        program = export(model, arguments, keywords, dynamic_shapes=shapes if any_batch else None, strict=False)
        module = program.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        has_regions = _inline_regions(module)
        if not _without_mutation(module):
            module = program.run_decompositions({}).module(check_guards=False)
            assert isinstance(module, fx.GraphModule)
            # Torch's functionalization forgets where gradients were switched off.
            module.meta["lost_regions"] = has_regions
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            node.meta["val"] = _attribute(module, str(node.target))
        elif node.op == "call_function" and operation(node) == "s3d_network.registered":
            layer = model.get_submodule(str(Call(node)["name"]))
            custom = custom_layer(layer)
            assert custom is not None
            made = None if custom.activation is None else custom.activation(layer)
            node.meta |= {"is_linear": custom.linear, "activation": made}
        elif node.target is torch.ops.aten.view.default:
            # The graph is also evaluated in channels_last, where there may be no such view.
            node.target = torch.ops.aten.reshape.default
    module.meta["functions"], module.meta["hooks"] = functions, hooks_of(model)
    given = argument_names(model, arguments, keywords)
    positional = list(given)[: len(arguments)]
    module.meta["argument_names"] = [*positional, *keywords]
    module.meta["sizes"] = _input_sizes(module, arguments, keywords)
    module.graph.eliminate_dead_code()
    module.recompile()
    return Exported(module, arguments, keywords, batch)


def _input_sizes(module: fx.GraphModule, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """Return, for every input of a graph, the sizes it must have (None where any will do), or its value."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    leaves = pytree.tree_leaves((arguments, list(keywords.values())))
    found: list[Any] = []
    for node, leaf in zip(inputs, leaves, strict=True):
        value = node.meta.get("val")
        is_tensor = isinstance(leaf, Tensor) and isinstance(value, Tensor)
        found.append([None if isinstance(n, torch.SymInt) else int(n) for n in value.shape] if is_tensor else leaf)
    return found


def takes(module: fx.GraphModule, inputs: list[Any]) -> bool:
    """Return whether a graph can be evaluated with inputs of these sizes."""
    sizes, leaves = module.meta["sizes"], pytree.tree_leaves(inputs)
    if len(sizes) != len(leaves):
        return False
    for wanted, leaf in zip(sizes, leaves, strict=True):
        if isinstance(leaf, Tensor):
            fits = isinstance(wanted, list) and len(wanted) == leaf.dim()
            if not fits or any(n is not None and n != m for n, m in zip(wanted, leaf.shape, strict=True)):
                return False
        elif isinstance(wanted, list) or wanted != leaf:
            return False
    return True


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Make attention modules run their ordinary operations: the fused ones for inference hide their layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _explaining(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _explained(model, arguments, keywords, error) from error


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put every attribute back: torch.export replaces lists and dicts by copies."""
    with AllOrNothing(model.modules()) as undo:
        try:
            yield
        finally:
            undo.undo()


@contextlib.contextmanager
def _functions_noted(names: list[str]) -> Iterator[None]:
    """Note the functions with a backward pass of their own that the model uses: the graph loses it."""

    def apply(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            names.append(cls.__name__)
        return super(_SingleLevelFunction, cls).apply(*arguments, **keywords)

    # All functions come through this class, also those whose `apply` somebody holds already.
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Record no stack trace for every node, where torch can leave them out: nobody reads them, and they take time."""
    config: Any = fx.config
    before = getattr(config, "do_not_emit_stack_traces", None)
    if before is not None:
        config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        if before is not None:
            config.do_not_emit_stack_traces = before


def _tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]


def _batch(*trees: Any) -> int | None:
    """Return the first dimension of the first tensor that has one."""
    return next((int(tensor.shape[0]) for tensor in _tensors(*trees) if tensor.dim()), None)


def _at_least_two(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
    """Return the example with a batch of two if it has one sample: torch.export takes a size of 1 as a constant."""
    batch = _batch(arguments, keywords)
    if batch != 1:
        return arguments, keywords, batch

    def double(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1
        return torch.cat([leaf, leaf]) if is_batch else leaf

    two = pytree.tree_map(double, (arguments, keywords))
    try:
        with torch.no_grad(), slow_attention():
            model(*two[0], **two[1])
    except Exception:
        return arguments, keywords, batch
    return two[0], two[1], 2


def _explained(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], error: Exception) -> ValueError:
    try:
        with torch.no_grad():
            model(*arguments, **keywords)
    except Exception as own:
        return ValueError(f"example_input cannot be evaluated by the model: {own}")
    frames = [frame for frame in _frames(error) if _is_users(frame.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "an unknown line"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(
        f"model cannot be exported by torch.export at {where} ({lines[0]}). Control flow that depends on values is not "
        "supported: move it into a module that treats every channel alone, and register that module with "
        "s3d_fast.register_layer"
    )


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    found: list[traceback.FrameSummary] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = [*traceback.extract_tb(current.__traceback__), *found]
        current = current.__cause__ or current.__context__
    return found


def _is_users(filename: str) -> bool:
    ours = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<", os.path.dirname(contextlib.__file__))
    return not filename.startswith(ours)


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _without_mutation(module: fx.GraphModule) -> bool:
    """Replace in-place operations by functional ones; return whether that was possible.

    Most are activations that write over the result of the operation before them, which nothing else looks at: those
    are replaced here. Anything else is left to torch's own functionalization, which takes longer.
    """
    nodes = list(module.graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    mutable = [node for node in nodes if _is_mutable(node)]
    if not all(_is_simple(node) for node in mutable):
        return False
    for node in mutable:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.target = _functional(node.target)
        for user in list(source.users):
            if order[user] > order[node]:
                user.replace_input_with(source, node)
    return True


def _functional(target: Any) -> Any:
    """Return the operation that computes the same without writing over its argument; None if there is none."""
    name = str(target._schema.name).split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = None if packet is None else getattr(packet, target._overloadname, None)
    if overload is None:
        return None
    same = [a.name for a in overload._schema.arguments] == [a.name for a in target._schema.arguments]
    return overload if same and not overload._schema.is_mutable else None


def _is_simple(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_function" or _functional(node.target) is None:
        return False
    return not _may_share(source) and not any(_may_share(user) for user in source.users)


# Operations whose result never shares memory with their arguments, whatever these are.
_FRESH = frozenset(
    f"aten.{name}"
    for name in (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul"),
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "add", "sub", "mul", "div", "cat", "relu", "silu"),
        *("gelu", "sigmoid", "tanh", "leaky_relu", "elu", "hardswish", "hardsigmoid", "hardtanh", "relu6", "mish"),
        *("max_pool2d", "avg_pool2d", "mean", "addmm", "mm", "bmm", "clone", "upsample_nearest2d", "selu", "celu"),
        *("pad", "roll", "flip"),
    )
)


def _may_share(node: fx.Node) -> bool:
    name = operation(node)
    if name == "aten.einsum":
        # A product is new; einsum of one tensor may be a transposed view of it.
        operands = node.args[1]
        return isinstance(operands, (list, tuple)) and len(operands) == 1
    return node.op == "call_function" and name not in _FRESH and name.removesuffix("_") not in _FRESH


def _inline_regions(module: fx.GraphModule) -> bool:
    """Put the operations of `torch.no_grad` and autocast regions into the graph itself, marked in `meta`.

    Return whether there were any.
    """
    found = [node for node in module.graph.nodes if _region_kind(node)]
    for node in found:
        settings, body, inputs = _region(node)
        inner = _attribute(module, str(body.target))
        environment: dict[fx.Node, Any] = {}
        waiting = iter(inputs)
        with module.graph.inserting_before(node):
            for one in inner.graph.nodes:
                if one.op == "placeholder":
                    environment[one] = next(waiting)
                elif one.op == "output":
                    result = fx.map_arg(one.args[0], lambda n: environment[n])  # noqa: B023
                else:
                    copied = module.graph.node_copy(one, lambda n: environment[n])  # noqa: B023
                    if one.op == "get_attr":
                        copied.target = f"{body.target}.{one.target}"
                    outer = node.meta.get("regions", ())
                    copied.meta = dict(one.meta) | {"regions": (*outer, (_region_kind(node), settings))}
                    environment[one] = copied
        _replace(node, result)
        module.graph.erase_node(node)
    if found:
        # Regions may stand inside regions.
        _inline_regions(module)
    return bool(found)


def _region_kind(node: fx.Node) -> str:
    name = str(getattr(node.target, "__name__", ""))
    return name if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast") else ""


def _region(node: fx.Node) -> tuple[tuple[Any, ...], fx.Node, list[Any]]:
    count = 1 if _region_kind(node) == "wrap_with_set_grad_enabled" else 4
    settings, body, inputs = node.args[:count], node.args[count], list(node.args[count + 1 :])
    assert isinstance(body, fx.Node)
    return tuple(settings), body, inputs


def _replace(node: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):
        # A region with several results is read by getitem.
        picked = result[user.args[1]]
        user.replace_all_uses_with(picked)
        user.graph.erase_node(user)


def _attribute(module: nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
