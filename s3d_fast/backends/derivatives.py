"""The derivatives of the operators torch.ops.s3d_fast.*, and their refusal where there are none.

S is symmetric and S v linear in v: with G = dL/d(S v), dL/dv = S G is the same product. Every formula consists of
operations that can be differentiated again. Without an entry here, PyTorch would return a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from s3d_fast.maths import reference

# The gradient of an argument: a list if the argument is one.
Gradient = Tensor | Sequence[Tensor]
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """The derivative of one operator: the arguments that have one, and the function that computes it.

    `gradients(arguments, G, wanted)` returns the gradients of the wanted arguments by their names, from the gradient of
    the result, which is a list if the result is.
    """

    differentiable: tuple[str, ...]
    gradients: Callable[[Arguments, Any, set[str]], dict[str, Gradient]]


def register(library: torch.library.Library) -> None:
    """Give every operator of the library an autograd kernel."""
    for name in _names():
        library.impl(name, _kernel(name), "Autograd", with_keyset=True)


def _splitting_gradients(
    X: Tensor, C: Tensor, V: Tensor, bias: bool, G: Tensor, wanted: set[str], rounded: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of ((X V^T) * C)^T X; X and C may be stored in 16 bits.

    dV = S G, rounded as S V is;  dC = (X V^T) * (X G^T),  dX = (C * X V^T) G + (C * X G^T) V.
    """
    found: dict[str, Tensor] = {}
    if "V" in wanted:
        found["V"] = torch.ops.s3d_fast.splitting_matvec(X, C, G, bias, rounded)
    if wanted & {"X", "C"}:
        rows, coefficients = X.to(V.dtype), C.to(V.dtype)
        rows = reference.with_ones(rows) if bias else rows
        p, q = rows @ V.mT, rows @ G.mT
        if "C" in wanted:
            found["C"] = (p * q).reshape(-1, *C.shape).sum(0).to(C.dtype)
        if "X" in wanted:
            total = ((coefficients * p) @ G + (coefficients * q) @ V).reshape(-1, *rows.shape).sum(0)
            found["X"] = total[:, : X.shape[1]].to(X.dtype)
    return found


def _splitting_matvec(arguments: Arguments, G: Tensor, wanted: set[str]) -> dict[str, Gradient]:
    return {**_splitting_gradients(**arguments, G=G, wanted=wanted)}


def _splitting_matvec_grouped(arguments: Arguments, G: Sequence[Tensor], wanted: set[str]) -> dict[str, Gradient]:
    X, C, V, bias = (arguments[name] for name in ("X", "C", "V", "bias"))
    found: dict[str, Gradient] = {}
    if "V" in wanted:
        found["V"] = torch.ops.s3d_fast.splitting_matvec_grouped(X, C, list(G), bias, arguments.get("rounded", False))
    rest = wanted - {"V"}
    layers = [_splitting_gradients(*layer, wanted=rest) for layer in zip(X, C, V, bias, G, strict=True)]
    return found | {name: [layer[name] for layer in layers] for name in rest}


def _same_product(name: str, vectors: str) -> Rule:
    """Return the rule of a symmetric product that can be differentiated in its vectors only."""

    def gradients(arguments: Arguments, G: Any, wanted: set[str]) -> dict[str, Gradient]:
        G = list(G) if isinstance(G, tuple) else G
        return {vectors: getattr(torch.ops.s3d_fast, name)(**{**arguments, vectors: G})}

    return Rule((vectors,), gradients)


RULES = {
    "splitting_matvec": Rule(("X", "C", "V"), _splitting_matvec),
    "splitting_matvec_grouped": Rule(("X", "C", "V"), _splitting_matvec_grouped),
    "joint_matvec": _same_product("joint_matvec", "V"),
    "gated_matvec": _same_product("gated_matvec", "V"),
    "depthwise_matvec_grouped": _same_product("depthwise_matvec_grouped", "V"),
    "edgeconv_matvec": _same_product("edgeconv_matvec", "V"),
    "tied_maps": _same_product("tied_maps", "P"),
    "tied_rows_matvec": _same_product("tied_rows_matvec", "V"),
}
REFUSED = (
    "depthwise_row_norms",
    "splitting_matrices",
    "add_splitting_matrices",
    "curvature_coefficients",
    "curvature_coefficients_",
    "activation_slopes",
    "grow_weights",
    "krylov_extend",
    "symmetric_extremes",
    "tridiagonal_extremes",
    "certified_widths",
    "top_two",
    "gather_patches",
)


def asks_for_derivatives(arguments: Sequence[Any]) -> bool:
    """Return whether a call with these arguments may need a derivative; False is certain."""
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*_flatten(arguments)[0])


def _names() -> tuple[str, ...]:
    return (*RULES, *REFUSED)


def _kernel(name: str) -> Callable[..., Any]:
    """Return the autograd kernel of an operator: it passes on the call, prepares the derivative, or refuses."""
    operator = getattr(torch.ops.s3d_fast, name).default
    parameters = [argument.name for argument in operator._schema.arguments]
    rule = RULES.get(name)

    def kernel(keyset: Any, *values: Any) -> Any:
        if not asks_for_derivatives(values):
            return _below_autograd(operator, keyset, values)
        given = dict(zip(parameters, values, strict=False))
        for parameter, value in given.items():
            if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(value)):
                raise NotImplementedError(f"s3d_fast::{name} has no forward-mode derivative, but {parameter} a tangent")
        wanted: set[str] = set()
        if torch.is_grad_enabled():
            wanted = {key for key, value in given.items() if any(tensor.requires_grad for tensor in _tensors(value))}
        if not wanted:
            return _below_autograd(operator, keyset, values)
        if rule is None or not wanted <= set(rule.differentiable):
            raise _refusal(name, rule, wanted)
        flat, lengths = _flatten(values)
        # torch.func calls this kernel at one level of its own, where a function of plain autograd is what it needs.
        with enable_single_level_autograd_function():
            result = super(torch.autograd.Function, _Product).apply(rule, operator, keyset, parameters, lengths, *flat)
        return list(result) if isinstance(result, tuple) else result

    return kernel


def _refusal(name: str, rule: Rule | None, wanted: set[str]) -> NotImplementedError:
    parameter = min(wanted - set(rule.differentiable if rule else ()))
    known = f" in {parameter}, only in {' and '.join(rule.differentiable)}" if rule else ""
    return NotImplementedError(
        f"the derivative of s3d_fast::{name} is not implemented{known}, and {parameter} requires a gradient: detach "
        "it, call the operator under torch.no_grad(), or use backend='reference'"
    )


def _below_autograd(operator: Any, keyset: Any, values: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *values)


class _Product(torch.autograd.Function):
    """An operator with a rule. Lists are given as their items, which is all that autograd knows."""

    @staticmethod
    def forward(rule: Rule, operator: Any, keyset: Any, parameters: list[str], lengths: list[int], *flat: Any) -> Any:
        # Autograd turns gradients off here, but an outer level of torch.func may need them.
        with torch.enable_grad():
            result = _below_autograd(operator, keyset, _unflatten(flat, lengths))
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rule, _, _, ctx.parameters, ctx.lengths, *flat = inputs
        ctx.is_list = isinstance(output, tuple)
        ctx.others = [None if isinstance(value, Tensor) else value for value in flat]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in flat))

    @staticmethod
    def backward(ctx: Any, *G: Tensor) -> tuple[Any, ...]:
        flat = [
            saved if saved is not None else other for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        arguments = dict(zip(ctx.parameters, _unflatten(flat, ctx.lengths), strict=False))
        needed = dict(zip(ctx.parameters, _unflatten(ctx.needs_input_grad[5:], ctx.lengths), strict=False))
        wanted = {name for name, need in needed.items() if (any(need) if isinstance(need, list) else need)}
        found = ctx.rule.gradients(arguments, G if ctx.is_list else G[0], wanted)
        gradients: list[Any] = []
        for name, length in zip(ctx.parameters, ctx.lengths, strict=False):
            own = found.get(name)
            gradients += [own] if length < 0 else list(own) if own is not None else [None] * length
        return (None,) * 5 + tuple(gradients)


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in (value if isinstance(value, list | tuple) else (value,)) if isinstance(item, Tensor)]


def _flatten(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the values, with the items of lists in their place, and the length of each list; -1 for what is none."""
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, list | tuple) else [value]
    return flat, [len(value) if isinstance(value, list | tuple) else -1 for value in values]


def _unflatten(flat: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    values: list[Any] = []
    at = 0
    for length in lengths:
        values.append(flat[at] if length < 0 else list(flat[at : at + length]))
        at += abs(length)
    return values
