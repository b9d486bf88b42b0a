"""Models as users write them, from end to end: splits keep the outputs, and unsupported layers are refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import s3d_fast as s3d
from tests.cases import relative_error
from tests.model_cases import data, net, outputs, random_plan, squared_error


def pad(x: Tensor) -> Tensor:
    """A user's function with the name of a PyTorch function; it mixes channels."""
    return x.cumsum(1)


class Optional(nn.Module):
    """A model with optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        h = F.silu(self.up(x)) * scale
        if mask is not None:
            h = h * mask
        self.calls.add_(1)
        return self.down(h)


class TwoInputs(nn.Module):
    """A layer for each of two inputs, and a layer that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(8, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([torch.tanh(self.left(a)), torch.tanh(self.right(b))], 1))


def attention_like(self: nn.Module, x: Tensor) -> Tensor:
    x = F.relu(self.embed(x))
    batch, places, channels = x.shape
    q = self.query(x).reshape(batch, places, 2, channels // 2)
    return self.out(q.flatten(2))


def view_like_another(self: nn.Module, x: Tensor) -> Tensor:
    a, b = F.silu(self.first(x)), F.silu(self.second(x))
    batch, channels, _, _ = a.shape
    return self.head(b.view(batch, channels, -1).mean(-1)) + self.other(a.mean((2, 3)))


def test_a_size_of_one_layer_must_not_shape_another() -> None:
    model = net(attention_like, embed=nn.Linear(4, 8), query=nn.Linear(8, 8), out=nn.Linear(8, 2))
    graph = s3d.trace(model, data(2, 3, 4))
    assert graph.units == {}
    assert "rearranges its channels" in (graph.layers["query"].reason or "")
    parts = {
        "first": nn.Conv2d(3, 4, 3),
        "second": nn.Conv2d(3, 4, 3),
        "head": nn.Linear(4, 2),
        "other": nn.Linear(4, 2),
    }
    model, x = net(view_like_another, **parts), data(2, 3, 6, 6)
    graph = s3d.trace(model, x)
    # A unit must be safe to split alone.
    for name in graph.units:
        split = copy.deepcopy(model)
        s3d.apply_splits(split, random_plan(graph, 2, units=[name]), eps=0.0)
        assert relative_error(outputs(split, x), outputs(model, x)) < 1e-10, name


def test_a_sum_of_sizes_depends_on_both_layers() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        a, b = F.silu(self.first(x)), F.silu(self.second(x))
        return self.head(torch.cat([a, b], 1)) / (a.size(1) + b.size(1))

    parts = {"first": nn.Linear(3, 4), "second": nn.Linear(3, 5), "head": nn.Linear(9, 2)}
    assert s3d.trace(net(forward, **parts), data(2, 3)).units == {}


def test_a_users_function_is_not_taken_for_pytorchs() -> None:
    model = net(lambda self, x: self.head(pad(F.relu(self.conv(x)))), conv=nn.Conv2d(3, 4, 3), head=nn.Conv2d(4, 2, 1))
    graph = s3d.trace(model, data(2, 3, 6, 6))
    assert graph.units == {}
    assert "cumsum" in (graph.layers["conv"].reason or "")


def test_optional_arguments_have_their_defaults() -> None:
    model = Optional().double()
    x, target = data(5, 4), data(5, 2)
    graph = s3d.trace(model, x)
    assert list(graph.units) == ["up"]
    expected = squared_error(copy.deepcopy(model)(x), target).item()
    for loss in (squared_error, lambda model, batch: squared_error(model(x=batch[0], scale=2.0), batch[1])):
        captured = s3d.capture(model, loss, [(x, target)], graph)
        assert captured.loss == pytest.approx(expected, rel=1e-14)
    assert model.calls == 0, "tracing or capturing has changed a buffer"


def test_an_input_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="example_input cannot be evaluated"):
        s3d.trace(Optional(), torch.randn(5, 3))


def test_a_model_with_two_inputs_trains_and_grows() -> None:
    torch.manual_seed(0)
    batches = [[[torch.randn(8, 3), torch.randn(8, 2)], torch.randint(2, (8,))] for _ in range(2)]
    grower = s3d.Grower(
        TwoInputs(),
        tuple(batches[0][0]),
        F.cross_entropy,
        batches,
        s3d.EpochTrainer(batches, F.cross_entropy, epochs=2),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        phases=2,
        selection={"top_k": 3},
    )
    first, second = grower.run()
    assert sum(second.widths.values()) == sum(first.widths.values()) + 3


def test_a_layer_behind_a_blocked_tensor_has_its_full_cost() -> None:
    model = net(
        lambda self, x: self.head(F.gelu(self.mix(self.dw(self.norm(F.relu(self.stem(x)))))).mean((2, 3))),
        stem=nn.Conv2d(3, 4, 3, padding=1),
        norm=nn.GroupNorm(2, 4),
        dw=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        mix=nn.Conv2d(4, 6, 1),
        head=nn.Linear(6, 2),
    )
    x = data(1, 3, 8, 8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert 2 * s3d.count(s3d.trace(model, x)).macs == counter.get_total_flops()


def test_every_layer_is_explained() -> None:
    model = net(
        lambda self, x: self.last(self.line(self.bn(F.relu(self.conv(x))).flatten(2)).mean(-1)),
        conv=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4),
        line=nn.Conv1d(4, 4, 1),
        last=nn.Linear(4, 2),
    )
    text = s3d.trace(model, data(2, 3, 6, 6)).explain()
    rows = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert list(rows) == ["conv", "bn", "line", "last"]
    assert "relu, consumed by line" in rows["conv"]
    assert "follows conv" in rows["bn"]
    assert "no activation follows it" in rows["line"]
    assert "it is the model's output" in rows["last"]


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (F.mish, nn.Mish()),
        (F.hardtanh, nn.Hardtanh()),
        (F.selu, nn.SELU()),
        (F.celu, nn.CELU()),
        (F.logsigmoid, nn.LogSigmoid()),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), nn.ReflectionPad2d(1)),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), nn.ReplicationPad2d(1)),
        (lambda x: F.pad(x, (1, 1, 1, 1), value=2.0), nn.ConstantPad2d(1, 2.0)),
        (F.alpha_dropout, nn.AlphaDropout()),
        (lambda x: F.relu(F.max_pool2d(x, 2)), nn.Sequential(nn.MaxPool2d(2), nn.ReLU())),
    ],
)
def test_functions_and_modules_are_followed_alike(function: object, module: nn.Module) -> None:
    graphs = []
    for between in (lambda self, h: function(h), lambda self, h: self.between(h)):  # type: ignore[operator]
        model = net(
            lambda self, x, between=between: self.head(between(self, F.silu(self.conv(x)))),
            conv=nn.Conv2d(3, 4, 3),
            head=nn.Conv2d(4, 2, 1),
            between=module,
        )
        x = data(2, 3, 8, 8)
        graph = s3d.trace(model, x)
        graphs.append((list(graph.units), [len(unit.activations()) for unit in graph]))
        before = outputs(model, x)
        s3d.apply_splits(model, random_plan(graph, 2), eps=0.0)
        assert relative_error(outputs(model, x), before) < 1e-10
    assert graphs[0] == graphs[1]
    assert graphs[0][0] == ["conv"]


def test_a_maximum_between_layer_and_activation_is_part_of_the_second_derivative() -> None:
    model = net(
        lambda self, x: self.head(F.silu(F.max_pool2d(self.bn(self.conv(x)), 3, stride=2)).mean((2, 3))),
        conv=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4),
        head=nn.Linear(4, 2),
    )
    x, target = data(4, 3, 9, 9), data(4, 2)
    graph = s3d.trace(model, x)
    # So sharp that no tie counts: within these steps, no winner changes.
    captured = s3d.capture(model, squared_error, [(x, target)], graph, sharpness=1e9)
    plan = s3d.select(s3d.extremal_eigenpairs(captured, "exact"), graph, m=2, c=1.3)
    errors = []
    for eps in (1e-3, 1e-4):
        grown = copy.deepcopy(model)
        s3d.apply_splits(grown, plan, eps)
        change = squared_error(grown(x), target).item() - captured.loss
        errors.append(abs(change - plan.predicted_change(eps)) / abs(plan.predicted_change(eps)))
    assert errors[1] < 1e-3


class LoRA(nn.Linear):
    """A linear layer with an additional parameter."""

    def __init__(self, fan_in: int, width: int) -> None:
        super().__init__(fan_in, width)
        self.low_rank = nn.Parameter(torch.randn(3, 2))


def test_layers_with_further_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(LoRA(4, 5), nn.ReLU(), torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 2)))

    model, other = make(), make()
    s3d.save_grown(model, tmp_path / "net.safetensors")
    s3d.load_grown(other, tmp_path / "net.safetensors")
    x = torch.randn(3, 4)
    assert torch.equal(model(x), other(x))


def make_grower(**options: object) -> s3d.Grower:
    """Return a small Grower whose training does nothing."""
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    arguments = {"optimizer": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)), "phases": 2, **options}
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return s3d.Grower(model, x, F.cross_entropy, [(x, y)], lambda *_: None, **arguments)  # type: ignore[arg-type]


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    assert len(make_grower(out=tmp_path).run()) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"selection": {"m": 5}},
        {"selection": {"fraction": 2.0}},
        {"solver": {"tol": -1.0}},
        {"solver": {"generator": torch.Generator()}},
    ],
)
def test_bad_options_of_a_grower_are_found_before_it_trains(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|leave it out"):
        make_grower(**options)


def test_options_that_need_a_budget_are_refused_without_one() -> None:
    grower = make_grower()
    graph = s3d.trace(grower.model, torch.randn(2, 3))
    for options in ({"relax": True}, {"cost": "params"}, {"m": "knapsack"}):
        with pytest.raises(ValueError, match="budget"):
            s3d.select({}, graph, **options)
