"""Wrapped models, and inputs and outputs of every form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from tests.model_cases import random_plan


def network() -> nn.Module:
    """Return a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


X = torch.randn(5, 3, dtype=torch.float64)


@pytest.mark.parametrize("wrap", ["DataParallel", "AveragedModel", "compile", "twice"])
def test_wrappers_are_seen_through(wrap: str) -> None:
    inner = network()
    outer: Any = {
        "DataParallel": lambda: nn.DataParallel(inner),
        "AveragedModel": lambda: torch.optim.swa_utils.AveragedModel(inner, device=torch.device("cpu")),
        "compile": lambda: torch.compile(inner, backend="eager"),
        "twice": lambda: nn.DataParallel(torch.compile(inner, backend="eager")),  # type: ignore[arg-type]
    }[wrap]()
    graph = s3d.trace(outer, X)
    assert list(graph.units) == ["0"]
    operators = s3d.capture(outer, F.mse_loss, [(X, torch.zeros(5, 2, dtype=torch.float64))], graph)
    plan = s3d.select(s3d.extremal_eigenpairs(operators), graph, top_k=2)
    s3d.apply_splits(outer, plan, eps=0.1)
    grown = outer.module if wrap == "AveragedModel" else inner
    assert grown[0].out_features == 4 + len(plan)


def test_an_exported_program_is_accepted() -> None:
    graph = s3d.trace(torch.export.export(network(), (X,)), X)  # type: ignore[arg-type]
    assert graph.explain()


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
        s3d.trace(3, X)  # type: ignore[arg-type]


@dataclass
class Output:
    """An output with a name."""

    last: Tensor
    extra: Tensor


class Forms(nn.Module):
    """Takes its inputs and gives its outputs in many forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.up, self.down, self.form = nn.Linear(3, 4), nn.Linear(4, 2), form

    def forward(self, x: Any, *rest: Tensor, scale: Tensor | None = None) -> Any:
        x = x["x"] if isinstance(x, dict) else x
        h = torch.tanh(self.up(x + sum(rest)))
        h = self.down(h if scale is None else h * scale)
        return {"tensor": h, "tuple": (h, 2 * h), "dict": {"h": h}, "class": Output(h, h.mean())}[self.form]


torch.utils._pytree.register_dataclass(Output)
INPUTS: dict[str, Any] = {
    "tensor": X,
    "tuple": (X, X),
    "keywords": {"x": X, "scale": torch.ones(5, 1, dtype=torch.float64)},
    "dict": ({"x": X},),
}


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "class"])
@pytest.mark.parametrize("given", INPUTS)
def test_inputs_and_outputs_may_have_any_form(given: str, form: str) -> None:
    torch.manual_seed(0)
    model, example = Forms(form).double(), INPUTS[given]

    def last(model: nn.Module) -> Tensor:
        out = (
            model(**example) if given == "keywords" else model(*(example if isinstance(example, tuple) else (example,)))
        )
        return {"tensor": lambda: out, "tuple": lambda: out[1], "dict": lambda: out["h"], "class": lambda: out.last}[
            form
        ]()

    graph = s3d.trace(model, example)
    assert list(graph.units) == ["up"]

    def loss(model: nn.Module, batch: object) -> Tensor:
        return last(model).square().mean()

    S = s3d.capture(model, loss, [None], graph)["up"].dense()
    assert bool(S.abs().max() > 0)
    with torch.no_grad():
        before = last(model)
    s3d.apply_splits(model, random_plan(graph, 2), eps=0.0)
    torch.testing.assert_close(last(model), before, rtol=1e-9, atol=1e-9)


def test_batches_of_other_sizes_than_the_example_are_captured() -> None:
    model = network()
    graph = s3d.trace(model, X)
    together = torch.randn(12, 3, dtype=torch.float64)
    target = torch.zeros(12, 2, dtype=torch.float64)
    whole = s3d.capture(model, F.mse_loss, [(together, target)], graph)["0"].dense()
    parts = [(together[i : i + 4], target[i : i + 4]) for i in (0, 4, 8)]
    torch.testing.assert_close(s3d.capture(model, F.mse_loss, parts, graph)["0"].dense(), whole)


def test_a_model_with_nothing_to_split_is_explained_and_not_captured() -> None:
    model = nn.Linear(3, 2).double()
    graph = s3d.trace(model, X)
    assert "it is the model's output" in graph.explain()
    with pytest.raises(ValueError, match="nothing to split"):
        s3d.capture(model, F.mse_loss, [(X, X[:, :2])], graph)
