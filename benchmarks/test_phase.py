"""The whole eigen phase of a network: capture, and both ends of every filter's spectrum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

import s3d_fast as s3d
from benchmarks.autodiff_rayleigh import AutodiffRayleigh
from benchmarks.compare import compare, error
from benchmarks.device import DEVICE
from s3d_fast.models import MobileNetV1, ResNet
from s3d_fast.operators import ChainOperator
from s3d_fast.solvers.eigenpairs import DEFAULT_SEED
from s3d_fast.solvers.noise import COARSE_DELTA, COARSEST

TOLERANCE = 1e-2


def test_eigen_phase_of_mobilenet(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "eigen phase"
    torch.manual_seed(0)
    model = MobileNetV1([32] * 14, 100, stem_stride=1).to(DEVICE)
    x, y = torch.randn(128, 3, 32, 32).to(DEVICE), torch.randint(100, (128,)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    graph = s3d.trace(model, x[:2])

    def phase() -> dict[str, s3d.Spectrum]:
        operators = s3d.capture(model, F.cross_entropy, [(x, y)], graph, curvature="paper")
        return s3d.extremal_eigenpairs(operators, solver="auto", tol=TOLERANCE)

    def training_step() -> None:
        model.train()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    model.eval()
    operators = s3d.capture(model, F.cross_entropy, [(x, y)], graph, curvature="paper")
    spectra = phase()
    exact = s3d.extremal_eigenpairs(operators, solver="exact", backend="reference")
    for name, spectrum in spectra.items():
        assert bool(spectrum.converged.all())
        assert float(error(spectrum, exact[name]).max()) <= TOLERANCE

    # Count the steps that descent needs for the same accuracy with the fast kernels. The time of one step by automatic
    # differentiation is measured beside the phase.
    steps = descent_steps(operators, exact)
    generator = torch.Generator().manual_seed(DEFAULT_SEED)
    starts = {
        name: F.normalize(torch.randn(operator.shape, generator=generator), dim=-1).to(DEVICE)
        for name, operator in operators.items()
    }
    descent = AutodiffRayleigh(model, graph, F.cross_entropy, starts)
    rate = {name: 0.45 / exact[name].radius.clamp(min=1e-30)[:, None] for name in starts}
    check_quotients(descent.quotients(x, y), operators, starts)
    compare(
        benchmark,
        phase,
        {"forward + backward": training_step, "descent step": lambda: descent.step(x, y, rate)},
        rounds=5,
    )
    if "ratios" in benchmark.extra_info:
        ratios = benchmark.extra_info["ratios"]
        ratios[f"descent, {steps} steps"] = steps * ratios.pop("descent step")
        benchmark.extra_info["aims"] = {"forward + backward": 1 / 3, f"descent, {steps} steps": 50.0}


def test_eigen_phase_of_mobilenet_with_all_curvature(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "eigen phase, exact curvature, with Grower's defaults"
    torch.manual_seed(0)
    model = MobileNetV1([32] * 14, 100, stem_stride=1).to(DEVICE)
    x, y = torch.randn(128, 3, 32, 32).to(DEVICE), torch.randint(100, (128,)).to(DEVICE)
    graph = s3d.trace(model, x[:2])

    cut = s3d.Cut(round(0.35 * sum(unit.width for unit in graph.captured())), 2, 1.3)

    def phase(curvature: str) -> None:
        operators = s3d.capture(model, F.cross_entropy, [(x, y)], graph, curvature=curvature, rows_per_sample=64)
        s3d.extremal_eigenpairs(operators, tol=COARSEST, delta=COARSE_DELTA, until=cut, precision="medium")

    def all_rows() -> None:
        operators = s3d.capture(model, F.cross_entropy, [(x, y)], graph)
        s3d.extremal_eigenpairs(operators, solver="auto", tol=TOLERANCE)

    def training_step() -> None:
        model.train()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    others = {
        "forward + backward": training_step,
        "the paper's curvature": lambda: phase("paper"),
        f"all rows, tol {TOLERANCE:g}": all_rows,
    }
    compare(benchmark, lambda: phase("exact"), others, rounds=5)
    if "ratios" in benchmark.extra_info:
        benchmark.extra_info["aims"] = {"forward + backward": 1 / 3}


def test_product_of_a_residual_stream(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "S v by the definition"
    torch.manual_seed(0)
    model = ResNet((2, 2), (16, 32), num_classes=10, activation=nn.SiLU).to(DEVICE).eval()
    x, y = torch.randn(64, 3, 32, 32).to(DEVICE), torch.randint(10, (64,)).to(DEVICE)
    operator = s3d.capture(model, F.cross_entropy, [(x, y)], s3d.trace(model, x[:2]))["stem.0"]
    assert isinstance(operator, ChainOperator)
    V = torch.randn(operator.shape, device=DEVICE)

    def forward_and_backward() -> None:
        """The layers that write the stream, with their activations, and the gradients of their weights."""
        weights = [torch.randn(write.shape, device=DEVICE, requires_grad=True) for write in operator.writes]
        pairs = zip(operator.writes, weights, strict=True)
        sum(F.silu(write.evaluated(weight, None, operator.tensor)).sum() for write, weight in pairs).backward()

    name = "forward + backward of the chain"
    compare(benchmark, lambda: operator.matvec(V), {name: forward_and_backward}, rounds=5, aims={name: 1 / 3})


def descent_steps(operators: s3d.Captured, exact: dict[str, s3d.Spectrum]) -> int:
    """Return how many steps, by doubling, bring every eigenvalue within the tolerance by descent and ascent."""
    for steps in (125, 250, 500, 1000, 2000, 4000, 8000):
        found = s3d.extremal_eigenpairs(operators, "rayleigh", 1e-9, steps)
        worst = max(float(error(found[name], exact[name]).max()) for name in found)
        print(f"descent: error {worst:.1e} of the spectral radius after {steps} steps")
        if worst <= TOLERANCE:
            return steps
    raise AssertionError("descent does not reach the tolerance")


def check_quotients(
    quotients: dict[str, torch.Tensor], operators: s3d.Captured, starts: dict[str, torch.Tensor]
) -> None:
    """Assert that the quotients by automatic differentiation equal those of the splitting operators."""
    assert set(quotients) == set(operators)
    for name, operator in operators.items():
        expected = (starts[name] * operator.matvec(starts[name])).sum(-1)
        torch.testing.assert_close(
            quotients[name][0].detach(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
        )
