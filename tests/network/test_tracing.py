"""What tracing leaves alone: the model's modes, tensors and gradients, and the random state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from s3d_fast import trace
from tests.model_cases import MODELS, ModelCase, data
from tests.network.tracing_cases import two_linear


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_tracing_changes_nothing(case: ModelCase) -> None:
    model = case.model()
    model.train()
    # Mixed modes, which no single call of train or eval would restore.
    for index, module in enumerate(model.modules()):
        module.training = index % 3 != 0
    modes = [module.training for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    tensors = model.state_dict(keep_vars=True)
    state = {name: value.clone() for name, value in tensors.items()}
    random_state = torch.get_rng_state()
    trace(model, case.inputs())
    assert [module.training for module in model.modules()] == modes
    assert [vars(module) for module in model.modules()] == attributes
    # The same objects, not copies: the trial splits have been undone.
    assert all(value is tensors[name] for name, value in model.state_dict(keep_vars=True).items())
    assert all(torch.equal(value, state[name]) for name, value in tensors.items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tracing_keeps_lists_and_dicts_that_others_hold() -> None:
    model = two_linear(lambda self, h: F.relu(h))
    model.log, model.options = log, options = [], {"depth": 2}  # type: ignore[assignment]
    model.up.options = options  # type: ignore[assignment]
    trace(model, data(3, 4))
    assert model.log is log
    assert model.options is options
    assert model.up.options is options


def test_tracing_a_model_that_draws_random_numbers_keeps_the_random_state() -> None:
    model = two_linear(lambda self, h: F.dropout(F.relu(h), 0.5))
    random_state = torch.get_rng_state()
    trace(model, data(3, 4))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_modes_are_restored_when_tracing_fails() -> None:
    model = two_linear(lambda self, h: self.odd(h) if h.sum() > 0 else h, odd=nn.ReLU())
    model.train()
    model.down.eval()
    with pytest.raises(ValueError, match="cannot be exported"):
        trace(model, data(3, 4))
    assert model.training
    assert model.up.training
    assert not model.down.training


def test_the_length_of_a_graph_is_its_number_of_units() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 2))
    graph = trace(model, torch.zeros(1, 3))
    assert len(graph) == len(list(graph)) == 2
    assert len(trace(nn.Linear(3, 4), torch.zeros(1, 3))) == 0
