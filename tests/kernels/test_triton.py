"""The Triton backend as a whole, in Triton's interpreter: solvers and surgery by it, and what it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import s3d_fast as s3d
from s3d_fast.models import DGCNN
from s3d_fast.operators import EdgeConvOperator, PointwiseOperator, SplittingOperator, SumOperator
from s3d_fast.solvers import lanczos
from tests.cases import EdgeCase, RowsCase

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def small_network() -> nn.Module:
    """Return a network with a convolution, 1 x 1 convolutions, a linear layer and one wider than 256."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 2),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Conv2d(4, 3, 1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 11, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(11 * 25, 3),
        nn.GELU(),
        nn.Linear(3, 4),
    ).double()


def captured(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> s3d.Captured:
    target = torch.arange(len(x)) % 4
    graph = s3d.trace(model, x)
    return s3d.capture(model, nn.functional.cross_entropy, [(x, target), (x.flip(0), target)], graph, dtype=dtype)


def test_eigenvalues_of_a_network_are_those_of_the_reference() -> None:
    x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    operators = captured(small_network(), x)
    kinds = {type(term).__name__ for operator in operators.values() for term in _terms(operator)}
    assert {"PointwiseOperator", "ConvOperator"} <= kinds
    assert max(operator.shape[1] for operator in operators.values()) > 256
    found = s3d.extremal_eigenpairs(operators, "lanczos", tol=1e-4, backend="triton")
    expected = s3d.extremal_eigenpairs(operators, "lanczos", tol=1e-4, backend="reference")
    _assert_same(found, expected)


def test_eigenvalues_of_dgcnn_are_those_of_the_reference() -> None:
    torch.manual_seed(0)
    model = DGCNN((4, 5), 4, k=3, embedding=6, hidden=(5,)).double()
    x = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    operators = captured(model, x)
    assert any(isinstance(term, EdgeConvOperator) for operator in operators.values() for term in _terms(operator))
    found = s3d.extremal_eigenpairs(operators, "lanczos", tol=1e-4, backend="triton")
    expected = s3d.extremal_eigenpairs(operators, "lanczos", tol=1e-4, backend="reference")
    _assert_same(found, expected)


def _terms(operator: SplittingOperator) -> list[SplittingOperator]:
    return [term for term, _ in operator.weighted_terms()]


def _assert_same(found: dict[str, s3d.Spectrum], expected: dict[str, s3d.Spectrum]) -> None:
    assert found.keys() == expected.keys()
    for name, spectrum in found.items():
        truth = expected[name]
        assert bool(spectrum.converged.all())
        for end in ("lambda_min", "lambda_max"):
            error = (getattr(spectrum, end) - getattr(truth, end)).abs()
            assert bool((error <= 1e-5 * truth.radius).all()), name


class _Waiting(TorchDispatchMode):
    """Count the calls for which a host would wait for its device."""

    SYNCHRONISING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_linalg_eigh", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for argument in args
            if isinstance(argument, (list, tuple))
            for index in argument
        )
        if name in self.SYNCHRONISING or by_mask:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what makes a host wait for its device, while tensors are on the CPU and nothing really waits."""
    mode = _Waiting()

    def counted(name: str) -> Any:
        method = getattr(Tensor, name)

        def call(self: Tensor, *arguments: Any, **keywords: Any) -> Any:
            mode.calls[name] += 1
            return method(self, *arguments, **keywords)

        return call

    with monkeypatch.context() as patch, mode:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(Tensor, name, counted(name))
        yield mode.calls


def test_the_counter_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4.0)
    ways = [
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: bool(x.any()),
        lambda: int(x[1]),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.index_put((x > 1,), x[0]),
        lambda: torch.linalg.eigh(torch.outer(x, x)),
        lambda: torch.masked_select(x, x > 1),
    ]
    for way in ways:
        with waiting(monkeypatch) as calls:
            way()
        assert sum(calls.values()) >= 1
    with waiting(monkeypatch) as calls:
        torch.where(x > 1, x, 0).gather(0, x.long()).copy_(x + x[2])
    assert not calls


def layers() -> list[SplittingOperator]:
    """Return layers that converge at different steps, with filters that leave early: few rows, S = 0, EdgeConv."""
    X, C = RowsCase(90, 24, 6).tensors()
    C[:, :2] = 0
    low_rank = PointwiseOperator(*RowsCase(5, 40, 7).tensors())
    points, neighbours, slot, coefficients = EdgeCase(2, 11, 4, 3, 5).tensors()
    edges = EdgeConvOperator(points, neighbours.gather(-1, slot), coefficients)
    half = PointwiseOperator(X, C * torch.tensor([1, 1, 1e-30, 0, 0, 0], dtype=torch.float64), check_finite=False)
    return [PointwiseOperator(X, C), low_rank, edges, SumOperator([half, half], [0.5, 2.0])]


def test_lanczos_waits_once_per_check_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    operators, checks, kept = layers(), [], []
    check, keep = lanczos._check, lanczos._Spaces.keep
    monkeypatch.setattr(
        lanczos, "_check", lambda *arguments, **keywords: (checks.append(1), check(*arguments, **keywords))
    )
    monkeypatch.setattr(lanczos._Spaces, "keep", lambda self, index: (kept.append(index), keep(self, index)))
    with waiting(monkeypatch) as calls:
        spectra = s3d.extremal_eigenpairs(operators, "lanczos", tol=1e-4, backend="triton")
    # Some filters left before others, which is where indices are needed.
    assert kept
    assert len(checks) >= 3
    # And once more at the end, for the filters that need a product in float64.
    assert calls == {"tolist": len(checks) + 1}
    steps = max(int(spectrum.iterations.max()) for spectrum in spectra)
    assert len(checks) <= steps / lanczos.CHECK_EVERY + len(operators)
    for found, truth in zip(spectra, s3d.extremal_eigenpairs(layers(), "exact"), strict=True):
        assert bool(found.converged.all())
        assert bool(((found.lambda_min - truth.lambda_min).abs() <= 1e-4 * truth.radius).all())
