"""Rows by sampling: unbiased, the same at every pass, and the same operator as a gather of the rows drawn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast import ConvOperator, PointwiseOperator
from s3d_fast.capture.sampling import Sampling, patches_at
from s3d_fast.operators import GatedOperator, matvec_all


def rows(samples: int, length: int) -> PointwiseOperator:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(samples * length, 5, generator=generator, dtype=torch.float64)
    return PointwiseOperator(X, torch.randn(samples * length, 3, generator=generator, dtype=torch.float64), bias=True)


def maps(stride: tuple[int, int] = (1, 1)) -> ConvOperator:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(3, 4, 11, 9, generator=generator, dtype=torch.float64)
    geometry = {"kernel_size": (3, 2), "stride": stride, "padding": (1, 2), "dilation": (2, 1)}
    height, width = F.conv2d(X[:, :1], torch.ones(1, 1, 3, 2, dtype=torch.float64), None, stride, (1, 2), (2, 1)).shape[
        2:
    ]
    C = torch.randn(3, 6, height, width, generator=generator, dtype=torch.float64)
    return ConvOperator(X, C, **geometry, bias=True)


@pytest.mark.parametrize(("length", "count"), [(64, 16), (50, 7), (17, 16), (9, 4)])
def test_the_draw_takes_one_position_of_every_strip(length: int, count: int) -> None:
    drawn = Sampling(count).draw(200, length, torch.device("cpu"), 3)
    assert drawn is not None
    assert drawn.index.shape == (200, count)
    assert int(drawn.weight.sum()) == length
    edges = torch.cat([torch.zeros(1), drawn.weight.cumsum(0)])
    assert bool(((drawn.index >= edges[:-1]) & (drawn.index < edges[1:])).all())
    # Every position can be drawn.
    assert len(drawn.index.unique()) == length


@pytest.mark.parametrize("kind", ["rows", "patches", "strided", "gated"])
def test_the_mean_over_draws_is_the_whole_operator(kind: str) -> None:
    whole: s3d.SplittingOperator = rows(4, 30) if kind != "strided" else maps((2, 1))
    if kind == "patches":
        whole = maps()
    if kind == "gated":
        assert isinstance(whole, PointwiseOperator)
        whole = GatedOperator(whole.X, whole.C, whole.C.flip(0), None, bias=True)
    expected, sampling = whole.dense(), Sampling(10)
    draws = torch.stack([sampling(whole, 4, "unit", batch).dense() for batch in range(600)])
    error = draws.std(0) / 600**0.5
    assert bool(((draws.mean(0) - expected).abs() <= 5 * error + 1e-12).all())
    assert float(draws.std(0).max()) > 0.1


def test_patches_are_those_of_unfold() -> None:
    operator = maps((2, 1))
    samples, _, height, width = operator.C.shape
    every = torch.arange(height * width).repeat(samples, 1)
    expected = F.unfold(operator.X, **operator.geometry._asdict()).mT.flatten(0, 1)
    assert torch.equal(patches_at(operator.X, every, operator.geometry, width), expected)


def test_small_maps_keep_all_rows() -> None:
    whole = rows(4, 30)
    assert Sampling(30)(whole, 4, "unit", 0) is whole
    conv = maps()
    assert Sampling(10_000)(conv, 3, "unit", 0) is conv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.point, self.head = nn.Conv2d(8, 7, 1), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        x = F.silu(self.point(F.silu(self.conv(x))))
        return self.head(x.mean((2, 3)))


def captured(rows_per_sample: int | None, memory_budget: str | None = None, scratch: bool = True) -> s3d.Captured:
    torch.manual_seed(0)
    model = Net().double().eval()
    batches = [(torch.randn(5, 2, 12, 12).double(), torch.randint(3, (5,))) for _ in range(3)]
    graph = s3d.trace(model, batches[0][0])
    return s3d.capture(
        model,
        F.cross_entropy,
        batches,
        graph,
        rows_per_sample=rows_per_sample,
        memory_budget=memory_budget,
        scratch=scratch,
    )


def test_a_capture_of_all_positions_is_that_without_sampling() -> None:
    whole, drawn = captured(None), captured(144)
    for name, operator in whole.items():
        torch.testing.assert_close(drawn[name].dense(), operator.dense())


def test_sampled_rows_are_fewer_and_the_same_in_every_capture() -> None:
    whole, drawn, again = captured(None), captured(16), captured(16)
    for name in ("stem", "conv", "point"):
        assert drawn[name].rows == 3 * 5 * 16
        assert torch.equal(drawn[name].dense(), again[name].dense())
        assert not torch.allclose(drawn[name].dense(), whole[name].dense())
    assert drawn.nbytes < whole.nbytes


def test_a_batch_that_is_captured_again_gives_the_same_rows() -> None:
    memory, streamed = captured(16), captured(16, "80KiB", scratch=False)
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
        captured(bad)
