"""Faults that were found once: caps, changes that failed half-way, registrations that crashed later, stray output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.growth import checkpoint
from s3d_fast.models.mlp import MLP
from s3d_fast.network import layers
from s3d_fast.splitting.quiet import quiet
from tests.model_cases import Net, data, net, outputs, random_plan, squared_error
from tests.splitting.test_selection import (
    all_choices,
    best_gain,
    conv_graph,
    gain_table,
    mlp_graph,
    negative,
    random_spectra,
)

Copies = int | str


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_CUSTOM", dict(layers._CUSTOM))


# Caps and budgets.


@pytest.mark.parametrize("cost", ["filters", "params", "macs"])
@pytest.mark.parametrize(("m", "caps", "most"), [(4, 2, 0), (4, 1, 0), (3, 1, 0), (4, 4, 3), (4, 5, 3), (3, 3, 2)])
def test_a_cap_between_two_steps_is_the_lower_one(m: int, caps: int, most: int, cost: str) -> None:
    graph = mlp_graph(4, 4)
    spectra = negative(graph, [[-4.0, -1.0, -3.0, -2.0], [-1.0, -2.0, -3.0, -4.0]])
    for relax in (False, True):
        plan = s3d.select(spectra, graph, m=m, c=1, caps=caps, budget=10**6, cost=cost, relax=relax)
        assert all(width - 4 <= caps for width in plan.widths().values())
        if not relax:
            assert plan.widths() == {"layers.0": 4 + most, "layers.2": 4 + most}


def test_a_unit_that_cannot_grow_leaves_the_budget_to_others() -> None:
    graph = mlp_graph(2, 2)
    spectra = negative(graph, [[-9.0, -8.0], [-2.0, -1.0]])
    plan = s3d.select(spectra, graph, m=4, c=1, caps={"layers.0": 2}, budget=3)
    assert plan.widths() == {"layers.0": 2, "layers.2": 5}


def added_cost(graph: s3d.Graph, cost: str, growth: np.ndarray) -> np.ndarray:
    """Return what every row of new filters per unit adds, as `count` says."""
    rows, place = np.unique(growth, axis=0, return_inverse=True)
    if cost == "filters":
        return growth.sum(1)
    before, widths = s3d.count(graph), graph.widths()
    found = []
    for row in rows.tolist():
        grown = {name: width + more for (name, width), more in zip(widths.items(), row, strict=True)}
        found.append(getattr(s3d.count(graph, grown) - before, cost))
    return np.array(found)[place.reshape(-1)]


GRAPHS: dict[str, Callable[[], s3d.Graph]] = {
    "mlp-2-4": lambda: mlp_graph(2, 4),
    "mlp-2-2-2": lambda: mlp_graph(2, 2, 2),
    "conv-2-3": lambda: conv_graph(2, 3),
    "mlp-5": lambda: mlp_graph(5),
}


@pytest.mark.parametrize("m", [2, 3, 4, "knapsack"])
@pytest.mark.parametrize("cost", ["filters", "params", "macs"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_plans_within_caps_and_budget_are_the_best_of_all(kind: str, cost: str, m: Copies) -> None:
    graph = GRAPHS[kind]()
    copies, growth = all_choices(graph)
    price = added_cost(graph, cost, growth)
    rng = np.random.default_rng(list(GRAPHS).index(kind))
    for _ in range(8):
        spectra, c = random_spectra(graph, rng), float(rng.choice([1, 1.3, 3]))
        budget = int(price.max() * rng.random() ** 2)
        each = {name: int(rng.integers(0, 7)) for name in graph.units if rng.random() < 0.7}
        caps: int | dict[str, int] | None = [None, int(rng.integers(0, 7)), each][int(rng.integers(3))]
        cap = [(caps.get(name, 99) if isinstance(caps, dict) else 99 if caps is None else caps) for name in graph.units]
        allowed = (price <= budget) & (growth <= cap).all(1)
        if m != "knapsack":
            allowed &= np.isin(copies, (1, m)).all(1)
        best = best_gain(np.minimum(gain_table(graph, spectra, c), 0), copies, allowed)
        for relax in (False, True):
            plan = s3d.select(spectra, graph, m=m, c=c, cost=cost, budget=budget, caps=caps, relax=relax)
            grown = np.array([[plan.widths()[unit.name] - unit.width for unit in graph]])
            assert (grown <= cap).all(), (caps, grown)
            assert added_cost(graph, cost, grown)[0] <= budget
            assert plan.gain >= best - 1e-9
            if not relax:
                assert plan.gain == pytest.approx(best, abs=1e-6)


def test_ties_go_to_the_first_only_within_the_budget() -> None:
    graph = mlp_graph(7, 7)
    # 3 x 0.1 + 4 x 0.1 is 0.7, and 7 x 0.1 is a little more.
    spectra = negative(graph, [[-1.0] * 7, [-1.0] * 7])
    for budget in np.arange(1, 14) / 10:
        plan = s3d.select(spectra, graph, c=1, budget=float(budget), cost=lambda unit: 0.1)
        grown = np.array([plan.widths()[name] - 7 for name in graph.units], dtype=np.float64)
        assert np.full(2, 0.1) @ grown <= budget


# Surgery, all or nothing.


class Scale(nn.Module):
    """A factor per channel; subclasses say how many channels it has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.offset: nn.Parameter | None
        self.register_parameter("offset", None)
        self.factor = nn.Parameter(torch.rand(channels, dtype=torch.float64) + 0.5)
        self.register_buffer("seen", torch.arange(channels))
        self._channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class ReadOnly(Scale):
    """The number of channels cannot be set."""

    @property
    def channels(self) -> int:
        return self._channels


class Refusing(ReadOnly):
    """Setting the number of channels fails half-way."""

    error: BaseException = RuntimeError("no other size than mine")

    @property
    def channels(self) -> int:
        return self._channels

    @channels.setter
    def channels(self, channels: int) -> None:
        self._channels = channels
        self.extra = "left behind"
        raise self.error


class Interrupted(Refusing):
    """The user stops the programme while the number of channels is set."""

    error = KeyboardInterrupt()


class Following(Scale):
    """The number of channels is that of the tensor."""

    @property
    def channels(self) -> int:
        return len(self.factor)


def scaled(scale: type[Scale], width: int = 5) -> nn.Module:
    """Return a model with a registered layer between two others, all in float64."""
    s3d.register_layer(
        scale, per_channel=["offset", "factor", "seen"], size_attributes=["channels"], activation=None, linear=True
    )
    torch.manual_seed(0)
    parts = {"up": nn.Linear(3, width), "scale": scale(width), "down": nn.Linear(width, 2)}
    return net(lambda self, x: self.down(self.scale(F.silu(self.up(x)))), **parts)  # type: ignore[operator]


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[object]:
    """Return the objects that a model and its optimizer consist of, and what they hold."""
    found: list[object] = []

    def note(name: object, value: object) -> None:
        held = value.detach().cpu().numpy().tobytes() if isinstance(value, Tensor) else None
        found.append((name, id(value), held))

    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            note((name, attribute), value)
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            note((name, attribute), tensor)
    if optimizer is not None:
        for group in optimizer.param_groups:
            note("group", group)
            for key, value in group.items():
                note(key, value)
            found.append([id(parameter) for parameter in group["params"]])
        for parameter, state in optimizer.state.items():
            note("state", state)
            found.append(id(parameter))
            for key, value in state.items():
                note(key, value)
    return found


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer | None]] = {
    "none": lambda parameters: None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("scale", "error"), [(ReadOnly, ValueError), (Refusing, ValueError), (Interrupted, KeyboardInterrupt)]
)
def test_a_size_that_cannot_be_set_leaves_model_and_optimizer_alone(
    scale: type[Scale], error: type[BaseException], name: str
) -> None:
    model = scaled(scale)
    x = data(4, 3)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(x).square().sum().backward()
    if optimizer is not None:
        optimizer.step()
    plan = random_plan(s3d.trace(model, x), 2)
    result = outputs(model, x)
    before = contents(model, optimizer)
    words = f"'channels' of {scale.__name__} cannot be set to 10" if error is ValueError else None
    with pytest.raises(error, match=words):
        s3d.apply_splits(model, plan, 0.1, optimizer)
    assert contents(model, optimizer) == before
    assert torch.equal(outputs(model, x), result)


def test_a_size_that_follows_the_tensors_need_not_be_set() -> None:
    model = scaled(Following)
    x = data(4, 3)
    before = outputs(model, x)
    s3d.apply_splits(model, random_plan(s3d.trace(model, x), 2), 0.0)
    assert isinstance(model.scale, Following)
    assert model.scale.channels == 10
    torch.testing.assert_close(outputs(model, x), before)


# Loading, all or nothing.


class Padded(nn.Module):
    """A layer and a buffer that is an expanded view."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.register_buffer("padding", torch.zeros(1).expand(5))
        with torch.inference_mode():
            self.register_buffer("made_elsewhere", torch.zeros(2))
        self.register_buffer("windows", torch.arange(5.0).unfold(0, 3, 1))
        self.last = nn.Linear(width, 2)

    @property
    def out_features(self) -> int:
        """The size of a part, which nobody can set."""
        return self.first.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) + self.padding.sum() + self.made_elsewhere.sum()


@pytest.mark.parametrize("width", [3, 4])
def test_views_that_cannot_be_written_are_replaced(width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, model = Padded(4), Padded(width)
    source.padding = torch.arange(5.0)
    source.made_elsewhere = torch.tensor([7.0, 8.0])
    source.windows = torch.arange(9.0).reshape(3, 3)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.out_features == 4
    assert torch.equal(outputs(model, torch.ones(1, 2)), outputs(source, torch.ones(1, 2)))
    # What has its size already stays the same object.
    again = [id(parameter) for parameter in model.parameters()]
    s3d.load_grown(model, tmp_path / "net.safetensors")
    assert [id(parameter) for parameter in model.parameters()] == again


@pytest.mark.parametrize(
    ("scale", "error"), [(ReadOnly, ValueError), (Refusing, ValueError), (Interrupted, KeyboardInterrupt)]
)
def test_a_load_that_fails_leaves_the_model_alone(
    scale: type[Scale], error: type[BaseException], tmp_path: Path
) -> None:
    source, model = scaled(scale, 7), scaled(scale, 5)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    before = contents(model)
    with pytest.raises(error):
        s3d.load_grown(model, tmp_path / "net.safetensors")
    # The bias of the last layer has the size of the one in the file: it has been written, and written back.
    assert contents(model) == before


def test_a_tensor_that_fails_half_way_leaves_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MLP([2, 3, 2])
    s3d.save_grown(MLP([2, 3, 2]), tmp_path / "net.safetensors")
    before = contents(model)
    copy = Tensor.copy_

    def failing(tensor: Tensor, *arguments: Any) -> Tensor:
        if tensor is model.get_parameter("layers.2.weight"):
            raise RuntimeError("cannot be written")
        return copy(tensor, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", failing)
        with pytest.raises(RuntimeError, match="cannot be written"):
            s3d.load_grown(model, tmp_path / "net.safetensors")
    assert contents(model) == before


def test_a_size_that_follows_the_tensors_is_loaded(tmp_path: Path) -> None:
    source, model = scaled(Following, 7), scaled(Following, 5)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    x = data(4, 3)
    assert torch.equal(outputs(model, x), outputs(source, x))
    assert list(s3d.trace(model, x).widths().values()) == [7]


def test_a_registered_layer_without_size_and_without_its_first_tensor_is_loaded(tmp_path: Path) -> None:
    source, model = scaled(Scale, 7), scaled(Scale, 5)
    s3d.register_layer(Scale, per_channel=["offset", "factor", "seen"], linear=True)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    assert torch.equal(outputs(model, data(4, 3)), outputs(source, data(4, 3)))
    # A tensor without dimensions has no channels.
    tensors, record = checkpoint.read(tmp_path / "net.safetensors")
    tensors["scale.factor"] = torch.zeros((), dtype=torch.float64)
    before = contents(model)
    with pytest.raises(ValueError, match=r"scale\.factor"):
        checkpoint.restore(model, tensors, record)
    assert contents(model) == before


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("width", [3, 4])
def test_a_weight_that_two_layers_share_stays_one_weight(width: int, tmp_path: Path) -> None:
    source, model = Tied(4), Tied(width)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, source.first.weight)


# Registration.


class Act(nn.Module):
    """An activation that nobody knows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


@dataclass
class Maker:
    """A function with options of its own, which cannot be hashed."""

    name: str

    def __call__(self, module: nn.Module) -> s3d.Activation:
        assert isinstance(module, Act)
        return s3d.activation(self.name)


@pytest.mark.parametrize(
    "which",
    ["silu", nn.SiLU(), F.silu, s3d.activation("silu"), lambda module: s3d.activation("silu"), Maker("silu")],
    ids=["name", "module", "function", "activation", "lambda", "callable"],
)
def test_an_activation_is_registered_by_what_it_is(which: Any) -> None:
    s3d.register_layer(Act, activation=which)
    model = net(lambda self, x: self.down(self.act(self.up(x))), up=nn.Linear(3, 4), act=Act(), down=nn.Linear(4, 2))  # type: ignore[operator]
    x, target = data(5, 3), data(5, 2)
    graph = s3d.trace(model, x)
    assert graph.units["up"].activation.name == "silu"
    assert s3d.capture(model, squared_error, [(x, target)], graph)["up"].dense().shape == (4, 4, 4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"activation": 3}, TypeError, "activation must be an Activation, a name, module or function .*got 3"),
        ({"activation": ["silu"]}, TypeError, "activation must be an Activation"),
        ({"activation": nn.SiLU}, TypeError, "activation must be an Activation"),
        ({"activation": nn.Linear(2, 2)}, TypeError, "activation must be an Activation"),
        ({"activation": "swoosh"}, ValueError, "activation must be one of relu, .*got 'swoosh'"),
        ({"per_channel": "weight"}, TypeError, "per_channel must be a sequence of names.*got 'weight'"),
        ({"per_channel": ["weight", 3]}, TypeError, "per_channel must be a sequence of names"),
        ({"per_channel": None}, TypeError, "per_channel must be a sequence of names"),
        ({"per_channel": {"weight"}}, TypeError, "per_channel must be a sequence of names"),
        ({"size_attributes": "channels"}, TypeError, "size_attributes must be a sequence of names"),
        ({"size_attributes": [None]}, TypeError, "size_attributes must be a sequence of names"),
    ],
)
def test_a_bad_registration_is_refused_at_once(options: Mapping[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        s3d.register_layer(Act, **options)
    assert layers.custom_layer(Act()) is None


def test_a_function_that_makes_no_activation_is_named() -> None:
    s3d.register_layer(Act, activation=lambda module: "silu")  # type: ignore[arg-type, return-value]
    model = net(lambda self, x: self.down(self.act(self.up(x))), up=nn.Linear(3, 4), act=Act(), down=nn.Linear(4, 2))  # type: ignore[operator]
    with pytest.raises(TypeError, match="the activation of Act must make an Activation, got 'silu'"):
        s3d.trace(model, data(5, 3))


# Output of the solver.

# Budgets at which HiGHS prints a line when it is left alone.
LOUD = (0, 5, 59, 65, 89, 99)


def test_budgets_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    graph = mlp_graph(4, 4, 4)
    for seed in LOUD:
        spectra = random_spectra(graph, np.random.default_rng(seed))
        assert len(s3d.select(spectra, graph, m="knapsack", c=1.3, cost="params", budget=128)) > 0
    assert capfd.readouterr() == ("", "")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run a programme; its output is a pipe, for which C keeps what it is given until it is flushed."""
    root = Path(__file__).parent.parent
    head = "import ctypes, os, sys, threading\nfrom s3d_fast.splitting.quiet import quiet\nC = ctypes.CDLL(None)\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=120,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )


def test_only_what_is_printed_inside_is_lost() -> None:
    done = run(
        """
        print("python before")
        C.printf(b"C before\\n")
        with quiet():
            C.printf(b"C inside\\n")
            os.write(1, b"1 inside\\n")
            os.write(2, b"2 inside\\n")
        C.printf(b"C after\\n")
        C.fflush(None)
        print("python after")
        print("error after", file=sys.stderr)
        """
    )
    assert done.stdout == "python before\nC before\nC after\npython after\n"
    assert done.stderr == "error after\n"


def test_streams_are_restored_after_errors_and_by_the_last_of_several() -> None:
    done = run(
        """
        try:
            with quiet():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("stopped", flush=True)
        entered, leave = threading.Event(), threading.Event()

        def other():
            with quiet():
                entered.set()
                leave.wait()

        thread = threading.Thread(target=other)
        with quiet():
            thread.start()
            entered.wait()
        # The other block is not over.
        os.write(1, b"lost\\n")
        leave.set()
        thread.join()
        print("restored", flush=True)
        """
    )
    assert (done.stdout, done.stderr) == ("stopped\nrestored\n", "")


@pytest.mark.parametrize("closed", ["1", "2", "1, 2", "0, 1", "0, 1, 2"])
def test_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    done = run(
        f"""
        closed = ({closed},)
        sys.stdout = sys.stderr = None
        for descriptor in closed:
            os.close(descriptor)
        before = sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else []
        with quiet():
            C.printf(b"inside\\n")
            os.write(1, b"inside\\n")
            os.write(2, b"inside\\n")
        after = sorted(os.listdir("/proc/self/fd")) if before else []
        with open({str(tmp_path / "found")!r}, "w") as file:
            file.write(str(before == after))
        """
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "found").read_text() == "True"


def test_without_descriptors_the_block_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("too many open files")

    entered = 0
    for name in ("open", "dup"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with quiet():
                entered += 1
    assert entered == 2
    os.fstat(1)


# What tests did not notice when it was changed.


class Separable(nn.Module):
    """A convolution, a depthwise one with bias and several outputs per channel, and another convolution."""

    def __init__(self, width: int, second: int = 3, multiplier: int = 1) -> None:
        super().__init__()
        self.up = nn.Conv2d(2, width, 3)
        self.depthwise = nn.Conv2d(width, width * multiplier, (3, 2), groups=width, bias=True)
        self.down = nn.Conv2d(width * multiplier, second, 1)
        self.head = nn.Linear(second, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.down(F.silu(self.depthwise(F.silu(self.up(x))))))
        return self.head(x.mean((2, 3)))


IMAGES = (2, 2, 6, 6)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_depthwise_layer_that_has_changed_makes_a_graph_stale(multiplier: int) -> None:
    model = Separable(4, multiplier=multiplier)
    graph = s3d.trace(model, torch.zeros(IMAGES))
    graph.check(model)
    graph.check(Separable(4, multiplier=multiplier))
    for channels in (3, 5, 8):
        model.depthwise = Separable(channels, multiplier=multiplier).depthwise
        # All other layers are as they were.
        with pytest.raises(ValueError, match="'depthwise'"):
            graph.check(model)
        assert not graph.is_current(model)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("multiplier", [1, 3])
def test_the_bias_of_a_depthwise_layer_is_counted(multiplier: int) -> None:
    graph = s3d.trace(Separable(4, 3, multiplier), torch.zeros(IMAGES))
    assert list(graph.units) == ["up", "down"]
    for width, second in ((4, 3), (5, 3), (2, 7), (11, 1)):
        widths = {"up": width, "down": second}
        here = parameters(Separable(width, second, multiplier))
        assert s3d.count(graph, widths).params == here
        more = {name: cost.params for name, cost in s3d.marginal(graph, widths).items()}
        assert more["up"] == parameters(Separable(width + 1, second, multiplier)) - here
        assert more["down"] == parameters(Separable(width, second + 1, multiplier)) - here


def normalised(norm: nn.Module | Callable[[Tensor], Tensor], last: bool = False) -> nn.Module:
    """Return a model whose first layer has a norm between itself and its activation, or after that."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = norm(F.silu(self.up(x))) if last else F.silu(norm(self.up(x)))
        return self.head(F.silu(self.down(x)).mean((2, 3)))

    torch.manual_seed(0)
    parts = {"up": nn.Conv2d(2, 4, 3), "down": nn.Conv2d(4, 3, 3), "head": nn.Linear(3, 2)}
    return Net(forward, **parts, **({"norm": norm} if isinstance(norm, nn.Module) else {})).double().eval()


def by_the_batch(x: Tensor) -> Tensor:
    """Return what a BatchNorm makes of its input that has no statistics."""
    return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("last", [False, True], ids=["before", "after"])
def test_a_batchnorm_without_statistics_is_not_one_to_evaluate(last: bool) -> None:
    x, target = data(*IMAGES), data(2, 2)
    model = normalised(nn.BatchNorm2d(4, track_running_stats=False), last)
    graph = s3d.trace(model, x)
    # Its outputs depend on the whole batch: the layer before it cannot be split, the one behind it can.
    assert list(graph.units) == ["down"]
    assert re.search("BatchNorm2d 'norm'|'norm' comes first", graph.layers["up"].reason or "")
    assert "norm" not in graph.layers
    # Nor is it folded into the convolution before it.
    other = normalised(by_the_batch, last)
    wanted = s3d.capture(other, squared_error, [(x, target)], s3d.trace(other, x))["down"].dense()
    found = s3d.capture(model, squared_error, [(x, target)], graph)["down"].dense()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    # With statistics both layers are units, and the norm follows.
    assert list(s3d.trace(normalised(nn.BatchNorm2d(4), last), x).units) == ["up", "down"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk whose free space a test sets."""
    usage = SimpleNamespace(total=2**62, used=0, free=2**60)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    return usage


def test_a_capture_leaves_a_share_of_the_disk_free(disk: SimpleNamespace, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MLP([60, 50, 2])
    batches = [(torch.randn(64, 60), torch.randn(64, 2)) for _ in range(12)]
    graph = s3d.trace(model, batches[0][0])
    whole = sum(s3d.capture(model, F.mse_loss, batches, graph).memory().values())

    def places() -> tuple[set[str], int]:
        plan = s3d.capture(model, F.mse_loss, batches, graph, memory_budget=whole // 4, scratch=tmp_path).plan
        assert plan is not None
        return set(plan.places.values()), plan.disk_bytes

    found, size = places()
    assert found == {"disk"}
    for share, place in ((0.5, "disk"), (0.85, "disk"), (0.95, "recompute"), (1.0, "recompute"), (2.0, "recompute")):
        disk.free = int(size / share)
        assert places() == ({place}, size if place == "disk" else 0), share
