"""S of every kind of chain is the second derivative of the grown network's loss, and fused forms are the definition."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import s3d_fast as s3d
from s3d_fast.capture import forms, one_batch
from s3d_fast.capture.pairs import difference_norms
from s3d_fast.operators import SplittingOperator
from tests.cases import relative_error
from tests.chain_cases import CASES, MAXIMA, ChainCase
from tests.model_cases import squared_error


def second_derivative(
    model: nn.Module, graph: s3d.Graph, unit: str, V: Tensor, loss: Callable[[Callable[[Tensor], Any]], Tensor]
) -> float:
    """Return d^2 loss / d eps^2 at 0 if every filter j of a unit becomes two halves theta +- eps v_j.

    The network is really grown. Its parameters are linear in eps, so automatic differentiation gives the rest.
    """
    halves = torch.tensor([0.5, 0.5], dtype=torch.float64)
    plan = s3d.SplitPlan(graph, [s3d.NeuronSplit(unit, j, halves, torch.stack([v, -v]), 0.0) for j, v in enumerate(V)])
    grown, moved = copy.deepcopy(model), copy.deepcopy(model)
    s3d.apply_splits(grown, plan, eps=0.0)
    s3d.apply_splits(moved, plan, eps=1.0)
    state = {name: tensor.detach() for name, tensor in grown.state_dict().items()}
    step = {name: tensor.detach() - state[name] for name, tensor in moved.state_dict().items()}
    eps = torch.zeros((), dtype=torch.float64, requires_grad=True)
    parameters = dict(grown.named_parameters())
    at = {name: value + eps * step[name] if name in parameters else value for name, value in state.items()}
    value = loss(lambda x: functional_call(grown, at, (x,)))
    (first,) = torch.autograd.grad(value, eps, create_graph=True)
    (second,) = torch.autograd.grad(first, eps)
    return float(second)


@cache
def traced(case: ChainCase, act: Callable[[], nn.Module]) -> tuple[nn.Module, s3d.Graph, Tensor, Tensor]:
    """Return a model, its graph, inputs and targets, the same ones for all tests."""
    model, x = case.model(act), case.inputs()
    target = torch.randn(model(x).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return model, s3d.trace(model, x), x, target


def captured(
    case: ChainCase, act: Callable[[], nn.Module] = nn.SiLU, **options: Any
) -> tuple[nn.Module, s3d.Graph, s3d.Captured, Tensor, Tensor]:
    model, graph, x, target = traced(case, act)
    return model, graph, s3d.capture(model, squared_error, [(x, target)], graph, **options), x, target


def vectors(operator: SplittingOperator, seed: int = 3) -> Tensor:
    return torch.randn(operator.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_smooth_chain_has_the_second_derivative_of_the_grown_network(case: ChainCase) -> None:
    model, graph, operators, x, target = captured(case)
    assert {name: type(operator).__name__ for name, operator in operators.items()} == case.operators
    for name, operator in operators.items():
        V = vectors(operator)
        forms_of = (V * operator.matvec(V)).sum(-1)
        wanted = second_derivative(model, graph, name, V, lambda f: squared_error(f(x), target))
        assert abs(wanted - float(forms_of.sum())) <= 1e-8 * float(forms_of.abs().sum()), name


@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU, nn.Hardswish, nn.PReLU, lambda: nn.LeakyReLU(0.2), nn.ReLU6])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_forms_are_the_definition(
    case: ChainCase, act: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step so large that kinks have curvature on these few samples.
    _, _, fused, _, _ = captured(case, act, eps=0.5)
    monkeypatch.setattr(one_batch, "unit_operator", lambda *given: forms.ChainBuilder(*given).operator())
    _, _, defined, _, _ = captured(case, act, eps=0.5)
    for name, operator in fused.items():
        assert type(defined[name]).__name__ == "ChainOperator"
        V = vectors(operator)
        assert relative_error(operator.matvec(V), defined[name].matvec(V)) <= 1e-12


@pytest.mark.parametrize("case", [*CASES, *MAXIMA], ids=str)
def test_magnitudes_bound_the_sums_without_cancellation(case: ChainCase, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, fused, _, _ = captured(case, sharpness=4.0)
    monkeypatch.setattr(one_batch, "unit_operator", lambda *given: forms.ChainBuilder(*given).operator())
    _, _, defined, _, _ = captured(case, sharpness=4.0)
    for name, operator in defined.items():
        size, other = operator.magnitude(), fused[name].magnitude()
        if size is None:
            assert any(type(step).__name__ == "Differentiated" for step in operator.steps)
            continue
        # The sum of |eigenvalues| is at most that of the terms that S is made of.
        nuclear = torch.linalg.eigvalsh(operator.dense()).abs().sum(-1)
        assert bool((size >= nuclear * (1 - 1e-12)).all()), name
        if type(fused[name]).__name__ in ("PointwiseOperator", "ConvOperator", "DepthwiseOperator", "GatedOperator"):
            # Several activations of one filter add their coefficients before the absolute value is taken.
            assert bool(((size >= other * (1 - 1e-12)) & (size <= 2 * other)).all()), name
        chosen = torch.tensor([len(size) - 1, 0])
        assert torch.equal(operator.restrict(chosen).magnitude(), size[chosen])


@pytest.mark.parametrize("order", [(nn.SiLU, nn.ReLU), (nn.ReLU, nn.SiLU), (nn.GELU, nn.ReLU6)])
@pytest.mark.parametrize("name", ["depthwise", "two depthwise stages"])
def test_depthwise_chains_of_unlike_activations_are_the_definition(
    name: str, order: tuple[type[nn.Module], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(one for one in CASES if one.name == name)

    def both() -> s3d.Captured:
        kinds = itertools.cycle(order)
        return captured(case, lambda: next(kinds)(), eps=0.5)[2]

    fused = both()
    assert "DepthwiseOperator" in {type(operator).__name__ for operator in fused.values()}
    monkeypatch.setattr(one_batch, "unit_operator", lambda *given: forms.ChainBuilder(*given).operator())
    for unit, operator in both().items():
        V = vectors(operator)
        assert relative_error(fused[unit].matvec(V), operator.matvec(V)) <= 1e-12


@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU, lambda: nn.LeakyReLU(0.2)])
@pytest.mark.parametrize("case", MAXIMA, ids=str)
def test_fused_forms_of_maxima_are_the_definition(
    case: ChainCase, act: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fixed sharpness: the definition estimates lengths of differences from random directions.
    _, _, fused, _, _ = captured(case, act, sharpness=4.0)
    assert case.operators.items() <= {name: type(operator).__name__ for name, operator in fused.items()}.items()
    monkeypatch.setattr(one_batch, "unit_operator", lambda *given: forms.ChainBuilder(*given).operator())
    _, _, defined, _, _ = captured(case, act, sharpness=4.0)
    for name, operator in fused.items():
        V = vectors(operator)
        assert relative_error(operator.matvec(V), defined[name].matvec(V)) <= 1e-12


@pytest.mark.parametrize("case", MAXIMA, ids=str)
def test_maxima_without_ties_have_the_second_derivative_of_the_grown_network(case: ChainCase) -> None:
    model, graph, operators, x, target = captured(case, sharpness=1e12)
    for name, operator in operators.items():
        V = vectors(operator)
        forms_of = (V * operator.matvec(V)).sum(-1)
        wanted = second_derivative(model, graph, name, V, lambda f: squared_error(f(x), target))
        assert abs(wanted - float(forms_of.sum())) <= 1e-8 * float(forms_of.abs().sum()), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_lengths_of_differences_between_patches_are_exact(stride: int, bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, (3, 2), stride=stride, padding=(1, 0), dilation=(1, 2), bias=bias).double()
    model = nn.Sequential(conv, nn.SiLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.LazyLinear(2, dtype=torch.float64))
    x = torch.randn(2, 3, 9, 10, dtype=torch.float64)
    model(x)
    graph = s3d.trace(model, x)
    (call,) = graph.units["0"].filters[0].calls
    output = conv(x).detach()
    factors = torch.randn_like(output)
    winner = torch.randint(output.numel(), (50,))
    # The runner-up is in the same map, nearby.
    size = output.shape[2] * output.shape[3]
    runner = winner // size * size + (winner % size + torch.randint(-12, 12, (50,))).clamp(0, size - 1)
    rows = nn.functional.unfold(x, (3, 2), (1, 2), (1, 0), stride).mT
    rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1) if bias else rows

    def row(place: Tensor) -> Tensor:
        return factors.take(place).unsqueeze(-1) * rows[place // (4 * size), place % size]

    found = difference_norms(call.node, x, output, (factors.take(winner), factors.take(runner)), (winner, runner), bias)
    assert found is not None
    torch.testing.assert_close(found, (row(winner) - row(runner)).norm(dim=-1), rtol=1e-10, atol=1e-10)
