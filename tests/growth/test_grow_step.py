"""One step of growth in one call, and models that load the weights of grown ones."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import s3d_fast as s3d
from s3d_fast.capture.curvature import GROWTH_FLOOR
from s3d_fast.models import MLP


def made() -> tuple[MLP, Tensor, Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, x, y = MLP([5, 4, 4, 3]).double(), torch.randn(32, 5, dtype=torch.float64), torch.randint(3, (32,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return model, x, y, optimizer


def test_a_step_is_the_five_calls() -> None:
    model, x, y, optimizer = made()
    one, two = copy.deepcopy((model, optimizer)), (model, optimizer)
    grown = s3d.grow_step(one[0], F.cross_entropy, [(x, y)], one[1], top_k=3, eps=0.1)

    graph = s3d.trace(two[0], x)
    operators = s3d.capture(two[0], F.cross_entropy, [(x, y)], graph, eps=0.1, floor=GROWTH_FLOOR)
    plan = s3d.select(s3d.extremal_eigenpairs(operators, tol=1e-2), graph, m=2, c=1.3, top_k=3)
    s3d.apply_splits(two[0], plan, 0.1, two[1])

    assert grown
    assert grown.loss == operators.loss
    assert grown.predicted_change == plan.predicted_change(0.1) < 0
    assert "predicted change -" in str(grown)
    for name, tensor in two[0].state_dict().items():
        assert torch.equal(one[0].state_dict()[name], tensor), name
    for mine, theirs in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(one[1].state[mine]["exp_avg_sq"], two[1].state[theirs]["exp_avg_sq"])


def test_batches_may_come_from_a_loader_and_once_only() -> None:
    model, x, y, optimizer = made()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    grown = s3d.grow_step(model, F.cross_entropy, itertools.islice(loader, 2), optimizer)
    # By default 35 % of the eight neurons.
    assert len(grown.plan) == 3


def test_a_loss_of_model_and_batch_takes_dicts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MLP([5, 4, 4, 3]).double()

        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.net(inputs), labels)

    _, x, y, _ = made()
    model = Net()
    grown = s3d.grow_step(model, lambda model, batch: model(**batch), [{"inputs": x, "labels": y}], top_k=2)
    assert sum(grown.plan.widths().values()) == 10


def test_moving_averages_grow_along() -> None:
    model, x, y, optimizer = made()
    ema = torch.optim.swa_utils.AveragedModel(model)
    s3d.grow_step(model, F.cross_entropy, [(x, y)], optimizer, also=[ema], top_k=2)
    ema.update_parameters(model)
    assert [p.shape for p in ema.module.parameters()] == [p.shape for p in model.parameters()]


def test_a_threshold_that_nothing_reaches_changes_nothing() -> None:
    model, x, y, optimizer = made()
    held = [id(parameter) for parameter in model.parameters()]
    grown = s3d.grow_step(model, F.cross_entropy, [(x, y)], optimizer, threshold=1e9)
    assert not grown
    assert [id(parameter) for parameter in model.parameters()] == held


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "batches must hold at least one batch, got none"),
        ({"batches": [3]}, "got int; give example_input"),
        ({"fraction": 2}, "fraction"),
        ({"eps": 0}, "eps"),
        ({"units": ["nothing"]}, "'nothing' is not a unit of the model"),
        ({"curvature": "flat"}, "curvature"),
        ({"also": [MLP([5, 9, 4, 3])]}, r"plan does not fit also\[0\]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_error_changes_nothing(options: dict, message: str) -> None:
    model, x, y, optimizer = made()
    before, held = copy.deepcopy(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    arguments = {"batches": [(x, y)], **options}
    with pytest.raises(ValueError, match=message):
        s3d.grow_step(model, F.cross_entropy, optimizer=optimizer, **arguments)
    assert [id(p) for p in model.parameters()] == held == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_an_unknown_option_of_the_selection_is_an_error() -> None:
    model, x, y, _ = made()
    with pytest.raises(TypeError, match="fractoin"):
        s3d.grow_step(model, F.cross_entropy, [(x, y)], fractoin=0.5)


def test_a_growable_model_loads_the_weights_of_a_grown_one() -> None:
    model, x, y, _ = made()
    s3d.grow_step(model, F.cross_entropy, [(x, y)], top_k=3)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        MLP([5, 4, 4, 3]).double().load_state_dict(state)
    fresh = s3d.growable(s3d.growable(MLP([5, 4, 4, 3]).double()))
    assert len(fresh._load_state_dict_pre_hooks) == 1
    # Copies are growable too, and so is a part of a larger model, and what a pickle gives back.
    copies = [copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))]
    for one in (fresh, *copies):
        one.load_state_dict(state)
        assert torch.equal(one(x), model(x))
    larger = nn.Sequential(nn.Identity(), s3d.growable(MLP([5, 4, 4, 3]).double()))
    larger.load_state_dict({f"1.{name}": tensor for name, tensor in state.items()})
    assert torch.equal(larger(x), model(x))


def test_a_growable_model_reports_what_is_missing_as_others_do() -> None:
    model = s3d.growable(MLP([5, 4, 4, 3]))
    state = MLP([5, 4, 4, 3]).state_dict()
    left_out, value = state.popitem()
    assert model.load_state_dict(state | {"more": value}, strict=False) == ([left_out], ["more"])
    with pytest.raises(ValueError, match="must have shape"):
        model.load_state_dict(state | {"layers.0.weight": torch.zeros(7, 5)}, strict=False)
