"""Rows by sampling: unbiased, the same at every pass, and the operator of the positions that were drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast import PointwiseOperator
from s3d_fast.capture import windows
from s3d_fast.capture.draws import Draw
from s3d_fast.capture.sampling import Sampling
from s3d_fast.operators import GatedOperator, OwnRowsOperator, TiedConvOperator, matvec_all


def rows(samples: int, length: int) -> PointwiseOperator:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(samples * length, 5, generator=generator, dtype=torch.float64)
    return PointwiseOperator(X, torch.randn(samples * length, 3, generator=generator, dtype=torch.float64), bias=True)


@pytest.mark.parametrize(("length", "count"), [(64, 16), (50, 7), (17, 16), (9, 4), (5, 9)])
def test_the_draw_takes_one_part_of_every_strip(length: int, count: int) -> None:
    drawn = Draw.of(200, length, count, torch.device("cpu"), 3)
    assert drawn.index.shape == (200, min(count, length))
    assert int(drawn.weight.sum()) == length
    edges = torch.cat([torch.zeros(1), drawn.weight.cumsum(0)])
    assert bool(((drawn.index >= edges[:-1]) & (drawn.index < edges[1:])).all())
    # Every part can be drawn.
    assert len(drawn.index.unique()) == length


def assert_unbiased(draws: list[Tensor], expected: Tensor) -> None:
    """Check that the mean of random matrices is what it should be, and that they differ."""
    found = torch.stack(draws)
    error = found.std(0) / len(draws) ** 0.5
    assert bool(((found.mean(0) - expected).abs() <= 5.5 * error + 1e-12 * expected.abs().max()).all())
    assert float(found.std(0).max()) > 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["rows", "gated"])
def test_the_mean_over_draws_of_rows_is_the_whole_operator(kind: str) -> None:
    whole: s3d.SplittingOperator = rows(4, 30)
    if kind == "gated":
        assert isinstance(whole, PointwiseOperator)
        whole = GatedOperator(whole.X, whole.C, whole.C.flip(0), None, bias=True)
    draws = [Sampling(10).rows(whole, 4, "unit", batch).dense() for batch in range(600)]
    assert_unbiased(draws, whole.dense())


def test_few_rows_are_kept() -> None:
    whole = rows(4, 30)
    assert Sampling(30).rows(whole, 4, "unit", 0) is whole


class Stream(nn.Module):
    """Two blocks with shortcuts, one of them a convolution with a stride, and a bias in one of the writers."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.stem, self.norm = nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.inner, self.outer = nn.Conv2d(5, 4, 3, padding=1), nn.Conv2d(4, 5, (3, 1), padding=(1, 0))
        self.down, self.short = nn.Conv2d(5, 6, 3, 2, 1, bias=False), nn.Conv2d(5, 6, 1, 2, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = self.act(x + self.outer(self.act(self.inner(x))))
        x = self.act(self.down(x) + self.short(x))
        return self.head(x.mean((2, 3)))


class Gated(nn.Module):
    """A squeeze-and-excitation gate, and a learned scale of every channel."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.conv, self.squeeze, self.gate = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 3, 1), nn.Conv2d(3, 5, 1)
        self.next, self.head = nn.Conv2d(5, 4, 1), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        x = x * torch.sigmoid(self.gate(self.act(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(self.act(self.scale * self.next(x)).mean((2, 3)))


class Factors(nn.Module):
    """Factors of every kind: by channel, by sample, by position, and by row of a map, which windows do not take.

    There are as many channels as samples.
    """

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.first, self.second, self.third = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 5, 1)
        self.along, self.head = nn.Conv2d(2, 4, 1), nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5]).reshape(2, 1, 1))
        self.register_buffer("columns", torch.linspace(0.2, 1, SIZE[1]))

    def forward(self, x: Tensor) -> Tensor:
        by_sample = 1 + x.mean((1, 2, 3), keepdim=True).tanh()
        by_position = torch.sigmoid(x[:, :1])
        h = self.act(self.scale.exp() * self.first(x))
        h = self.act(by_sample * by_position * self.second(h))
        rows = self.act(self.along(h) * torch.sigmoid(h.mean(3, keepdim=True)[:, :1]))
        columns = self.act(self.third(h) * self.columns)
        return self.head(torch.cat([rows, columns], 1).mean((2, 3)))


def depthwise(act: Callable[[Tensor], Tensor], stride: int, bias: bool) -> nn.Module:
    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return act(x)

    return nn.Sequential(
        nn.Conv2d(2, 9, 3, padding=1, bias=bias),
        nn.BatchNorm2d(9),
        Activation(),
        nn.Conv2d(9, 9, 3, stride, 1, groups=9),
        nn.BatchNorm2d(9),
        Activation(),
        nn.Conv2d(9, 4, 1),
        Activation(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def pooled(act: Callable[[Tensor], Tensor], kernel: int, stride: int) -> nn.Module:
    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return act(x)

    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        Activation(),
        nn.MaxPool2d(kernel, stride),
        nn.Conv2d(5, 4, (2, 3), (1, 2), (0, 1)),
        Activation(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


SIZE = (13, 12)
# Networks on maps, and the form of their units on windows.
NETWORKS: dict[str, tuple[Callable[[Any], nn.Module], dict[str, str]]] = {
    "stream": (Stream, {"stem": "JointOperator", "inner": "PointwiseOperator", "down": "JointOperator"}),
    "gated": (Gated, {"conv": "PointwiseOperator", "next": "PointwiseOperator"}),
    "factors": (
        Factors,
        dict.fromkeys(("first", "third", "along"), "PointwiseOperator"),
    ),
    "depthwise": (lambda act: depthwise(act, 1, False), {"0": "DepthwiseOperator", "6": "PointwiseOperator"}),
    "strided": (lambda act: depthwise(act, 2, False), {"0": "DepthwiseOperator", "6": "PointwiseOperator"}),
    "pooled": (lambda act: pooled(act, 2, 2), {"0": "TiedConvOperator", "4": "PointwiseOperator"}),
    "overlapping": (lambda act: pooled(act, 3, 2), {"0": "TiedConvOperator", "4": "PointwiseOperator"}),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


@cache
def made(name: str, act: Callable[[Tensor], Tensor]) -> tuple[nn.Module, s3d.Graph, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = NETWORKS[name][0](act).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.3, 0.6)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
    batches = [(torch.randn(2, 2, *SIZE).double(), torch.randint(3, (2,))) for _ in range(2)]
    return model, s3d.trace(model, batches[0][0]), batches


def captured(
    name: str, act: Callable[[Tensor], Tensor] = F.silu, rows_per_sample: int | None = None, **options: Any
) -> s3d.Captured:
    model, graph, batches = made(name, act)
    return s3d.capture(model, F.cross_entropy, batches, graph, rows_per_sample=rows_per_sample, **options)


@pytest.fixture
def any_share(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Windows are used even if they hold most positions, or all of them several times."""
    monkeypatch.setattr(windows, "LARGEST_SHARE", float("inf"))
    return


@pytest.mark.usefixtures("any_share")
@pytest.mark.parametrize("act", [F.silu, F.relu])
@every_network
def test_windows_of_all_positions_give_the_whole_operator(name: str, act: Callable[[Tensor], Tensor]) -> None:
    whole, drawn = captured(name, act), captured(name, act, 10_000)
    forms = {unit: type(operator.weighted_terms()[0][0]).__name__ for unit, operator in drawn.items()}
    assert forms.items() >= NETWORKS[name][1].items()
    for unit, operator in whole.items():
        scale = float(operator.dense().abs().max())
        torch.testing.assert_close(drawn[unit].dense(), operator.dense(), rtol=1e-9, atol=1e-11 * scale, msg=unit)


@pytest.mark.usefixtures("any_share")
@every_network
def test_the_mean_over_draws_of_windows_is_the_whole_operator(name: str) -> None:
    model, graph, batches = made(name, F.silu)
    whole = s3d.capture(model, F.cross_entropy, batches[:1], graph)
    # Every batch of the same data gets a draw of its own.
    drawn = s3d.capture(model, F.cross_entropy, batches[:1] * 250, graph, rows_per_sample=20)
    for unit, operator in drawn.items():
        draws = [factor * batch.dense() for batch, factor in operator.batches()]
        assert len(draws) == 250
        if float(torch.stack(draws).std(0).max()) > 0:
            assert_unbiased(draws, whole[unit].dense())


@every_network
def test_sampled_rows_are_fewer_and_the_same_in_every_capture(name: str) -> None:
    whole, drawn, again = captured(name), captured(name, rows_per_sample=16), captured(name, rows_per_sample=16)
    for unit in drawn:
        assert torch.equal(drawn[unit].dense(), again[unit].dense())
    assert any(not torch.allclose(drawn[unit].dense(), whole[unit].dense()) for unit in drawn)


class Cloud(nn.Module):
    """A maximum and a mean over all points."""

    def __init__(self, sloped: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 6), nn.Linear(12, 3)
        self.sloped = sloped

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.tanh(x) if self.sloped else F.leaky_relu(x, 0.2)
        return self.head(torch.cat([x.amax(1), x.mean(1)], 1))


@pytest.mark.parametrize("sloped", [False, True])
def test_maxima_over_clouds_keep_their_ties_and_sample_their_points(sloped: bool) -> None:
    torch.manual_seed(0)
    model, batch = Cloud(sloped).double(), (torch.randn(2, 40, 3).double(), torch.randint(3, (2,)))
    graph = s3d.trace(model, batch[0])
    whole = s3d.capture(model, F.cross_entropy, [batch], graph)["embed"]
    drawn = s3d.capture(model, F.cross_entropy, [batch] * 300, graph, rows_per_sample=10)["embed"]
    terms = drawn.batches()
    assert {type(term).__name__ for term, _ in terms} == {"OwnRowsOperator"}
    assert_unbiased([factor * term.dense() for term, factor in terms], whole.dense())
    # Without curvature at the points, nothing is left to chance.
    ((tied, _),) = whole.weighted_terms()
    assert isinstance(tied, TiedConvOperator)
    few = TiedConvOperator(
        tied.X,
        torch.zeros_like(tied.C),
        first=tied.first,
        second=tied.second,
        K=tied.K,
        d1=tied.d1,
        d2=tied.d2,
        bias=True,
    )
    ties_alone = Sampling(10).rows(few, 2, "embed", 0)
    assert isinstance(ties_alone, OwnRowsOperator)
    torch.testing.assert_close(ties_alone.dense(), few.dense(), rtol=1e-12, atol=1e-14)
    assert float(few.dense().abs().max()) > 1e-6


def test_one_by_one_filters_keep_sixteen_positions() -> None:
    drawn = captured("gated", rows_per_sample=16)
    for unit in ("conv", "next"):
        assert drawn[unit].rows == 2 * 2 * 16


def test_units_that_windows_do_not_fit_keep_all_positions() -> None:
    whole = captured("depthwise")
    # A bias would move positions beyond the border.
    model = depthwise(F.silu, 1, bias=True).double().eval()
    batches = made("depthwise", F.silu)[2]
    graph = s3d.trace(model, batches[0][0])
    every, some = (s3d.capture(model, F.cross_entropy, batches, graph, rows_per_sample=count) for count in (None, 16))
    torch.testing.assert_close(some["0"].dense(), every["0"].dense())
    assert whole["0"].shape == (9, 18)


@pytest.mark.parametrize("scratch", [False, True])
def test_a_batch_that_is_captured_again_gives_the_same_rows(scratch: bool) -> None:
    memory = captured("stream", rows_per_sample=16)
    streamed = captured("stream", rows_per_sample=16, memory_budget="60KiB", scratch=scratch)
    assert streamed.stream is not None
    V = [torch.randn(operator.shape, dtype=torch.float64) for operator in memory.values()]
    for _ in range(2):
        for one, other in zip(
            matvec_all(list(memory.values()), V), matvec_all(list(streamed.values()), V), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bad", [0, -3, 1.5, "all"])
def test_a_bad_number_of_rows_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="rows_per_sample"):
        captured("gated", rows_per_sample=bad)
