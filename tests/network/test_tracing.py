"""What tracing leaves alone: the model's modes, tensors and gradients, and the random state; and what it exports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import capture, trace
from tests.model_cases import MODELS, ModelCase, data, squared_error
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


def test_a_second_size_has_a_graph_of_its_own_and_further_sizes_share_one() -> None:
    model = two_linear(lambda self, h: F.relu(h))
    graph = trace(model, data(2, 4))
    batches = [(x, torch.zeros_like(model(x))) for x in (data(size, 4) for size in (5, 2, 5, 3, 7, 1))]
    found = capture(model, squared_error, batches, graph)
    assert [variant.module.meta["sizes"] for variant in graph.variants] == [[[5, 4]], [[None, 4]]]
    alone = [capture(model, squared_error, [batch], trace(model, batch[0])) for batch in batches]
    for name, operator in found.items():
        mean = torch.stack([one[name].dense() for one in alone]).mean(0)
        torch.testing.assert_close(operator.dense(), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "fresh",
    [
        lambda h: torch.einsum("ij,j->ij", h, torch.ones(h.shape[1], dtype=h.dtype)),
        lambda h: F.pad(h, (0, 0)),
        lambda h: h.roll(1, 0),
        lambda h: h.flip(0),
    ],
    ids=["einsum", "pad", "roll", "flip"],
)
def test_a_change_in_place_of_a_new_tensor_leaves_the_old_one(fresh: Callable[[Tensor], Tensor]) -> None:
    def forward(self: nn.Module, h: Tensor) -> Tensor:
        return h.sin() + fresh(h).relu_()

    # The graph is compared with the model.
    trace(two_linear(forward), data(3, 4))
