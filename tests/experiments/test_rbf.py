"""The RBF experiment: its networks, its splits compared with the real loss, and its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from s3d_fast import report
from s3d_fast.experiments import rbf_growth as rbf
from s3d_fast.maths.schemes import split_gain
from s3d_fast.models.rbf_batch import RBFBatch, random_rbf
from s3d_fast.report import rbf_panels

SMALL = rbf.RBFSettings(seeds=4, neurons=5, steps=40, points=200)


@pytest.fixture(scope="module")
def problem() -> rbf.Problem:
    return rbf.make_problem(SMALL)


@pytest.fixture(scope="module")
def runs(problem: rbf.Problem) -> list[rbf.MethodRun]:
    return [rbf.grow(problem, method, SMALL) for method in rbf.METHODS]


def test_network_is_the_papers_sum_of_gaussians() -> None:
    generator = torch.Generator().manual_seed(1)
    model = random_rbf(2, 3, generator)
    x = torch.linspace(-5, 5, 7).expand(2, -1)
    expected = torch.zeros(2, 7)
    for r in range(2):
        for i in range(3):
            expected[r] += model.w[r, i] * torch.exp(-((model.theta[r, i, 0] * x[r] + model.theta[r, i, 1]) ** 2) / 2)
    torch.testing.assert_close(model(x), expected)


def test_the_data_of_a_seed_do_not_depend_on_the_number_of_seeds(problem: rbf.Problem) -> None:
    alone = rbf.make_problem(rbf.RBFSettings(seeds=1, first_seed=2, points=200))
    assert torch.equal(alone.x[0], problem.x[2])
    assert torch.equal(alone.y[0], problem.y[2])


def test_dead_neurons_never_move(problem: rbf.Problem) -> None:
    theta, w = torch.randn(4, 2, 2), torch.randn(4, 2)
    alive = torch.tensor([[1.0, 0.0]]).expand(4, -1).clone()
    model = RBFBatch(theta.clone(), w.clone(), alive)
    rbf.train(model, problem, 5, 0.01)
    assert torch.equal(model.theta[:, 1], theta[:, 1])
    assert torch.equal(model.w[:, 1], w[:, 1])
    assert not torch.equal(model.theta[:, 0], theta[:, 0])


@pytest.mark.parametrize("method", rbf.METHODS, ids=lambda method: method.name)
def test_split_changes_the_real_loss_by_the_gain(problem: rbf.Problem, method: rbf.Method) -> None:
    double = rbf.Problem(*(part.double() for part in (problem.x, problem.y, problem.theta, problem.w)))
    model = random_rbf(4, 3, torch.Generator().manual_seed(5)).double()
    stage = rbf.examine(model, double, method, 3, 0)
    gains = torch.stack([split_gain(s.lambda_min, s.lambda_max, method.m, method.c) for s in stage.spectra]).amin(-1)
    errors = []
    for eps in (1e-2, 1e-3):
        grown = rbf.split(stage, double, method, eps)
        change = ((grown(double.x) - double.y) ** 2).mean(-1) - stage.loss
        errors.append((change - eps**2 / 2 * gains).abs().max())
    assert float(gains.max()) < 0
    # The error is at least of third order: a tenth of the step gives at most a thousandth of the error.
    assert errors[1] < 2e-3 * errors[0] + 1e-14


def test_s2d_does_not_split_a_stable_network_and_s3d_does() -> None:
    # With one Gaussian of negative weight and data on one side of it, S is definite near the centre. Its sign depends
    # on the side, so S2D splits on one side only.
    x = torch.linspace(-0.5, 0.5, 50, dtype=torch.float64)[None]
    model = RBFBatch(torch.tensor([[[1.0, 0.0]]]).double(), torch.tensor([[-1.0]]).double())
    above = rbf.Problem(x, model(x).detach() - 1, model.theta.detach(), model.w.detach())
    below = rbf.Problem(x, model(x).detach() + 1, model.theta.detach(), model.w.detach())
    chosen = {
        (name, method.c): int(rbf.examine(model, data, method, 1, 0).chosen)
        for name, data in (("above", above), ("below", below))
        for method in (rbf.S2D, rbf.Method(2, 3.0))
    }
    assert sorted([chosen["above", 1.0], chosen["below", 1.0]]) == [-1, 0]
    assert chosen["above", 3.0] == chosen["below", 3.0] == 0


def test_methods_have_the_sizes_and_steps_of_the_paper(runs: list[rbf.MethodRun]) -> None:
    for run in runs:
        extra = run.method.m - 1
        assert [stage.neurons for stage in run.stages] == list(range(1, SMALL.neurons + 1, extra))
        for stage in run.stages[:-1]:
            assert stage.steps == SMALL.steps * (stage.neurons + extra - 1)
        assert run.stages[-1].steps <= SMALL.steps * SMALL.neurons
        for stage in run.stages:
            assert int(stage.sizes.max()) <= stage.neurons
            assert torch.isfinite(stage.loss).all()


def test_positive_splitting_never_takes_a_negative_weight(runs: list[rbf.MethodRun]) -> None:
    by_method = {run.method: run for run in runs}
    assert not any(bool(stage.negative.any()) for stage in by_method[rbf.S2D].stages)
    assert any(bool(stage.negative.any()) for stage in by_method[rbf.Method(2, 5.0)].stages)


def test_table_and_verdict_show_the_losses_of_the_runs(runs: list[rbf.MethodRun]) -> None:
    rows = rbf.loss_table(runs, rbf.BY_COPIES, SMALL.neurons)
    assert rows[0] == ["neurons", "S2D", "S3D m=2 c=3", "S3D m=3 c=3", "S3D m=4 c=3"]
    assert rows[2][3] == "-"
    stage = runs[0].at(5)
    assert stage is not None
    assert rows[5][1].startswith(f"{stage.loss.quantile(0.5).item():.3g} [")
    text = rbf.verdict(runs)
    assert f"S2D ends at {stage.loss.quantile(0.5).item():.3g}" in text
    assert text.count("seed by seed") == 5


def test_the_figure_is_drawn_from_the_runs(problem: rbf.Problem, runs: list[rbf.MethodRun], tmp_path: Path) -> None:
    report.rbf_figure(runs, problem, SMALL, tmp_path / "rbf.png")
    assert (tmp_path / "rbf.png").read_bytes().startswith(b"\x89PNG")


def test_a_positive_branch_of_s2d_is_its_next_stage(problem: rbf.Problem, runs: list[rbf.MethodRun]) -> None:
    stage, following = runs[0].stages[:2]
    assert runs[0].method == rbf.S2D
    for seed, neuron in enumerate(stage.chosen.tolist()):
        branch = problem.positive_branch(stage, seed, SMALL)
        if neuron < 0:
            assert branch is None
        else:
            assert branch is not None
            torch.testing.assert_close(branch.theta[0].double(), following.model.theta[seed], rtol=1e-4, atol=1e-5)
    assert (stage.chosen >= 0).any()


def test_methods_part_where_half_of_the_seeds_are_split_differently(runs: list[rbf.MethodRun]) -> None:
    base, signed = (next(run for run in runs if run.method == method) for method in (rbf.S2D, rbf.Method(2, 3.0)))
    assert rbf_panels.divergence(base, base) is None
    stages = [replace(stage, chosen=stage.chosen.clone()) for stage in base.stages]
    stages[1].chosen[0] = 99
    stages[2].chosen[2] = 99
    assert rbf_panels.divergence(replace(base, stages=stages), base) == base.stages[2].steps
    at = base.at(5)
    assert at is not None
    losses = torch.tensor([4.0, 1.0, 3.0, 2.0])
    bases = replace(base, stages=[replace(at, loss=losses)])
    other = replace(signed, stages=[replace(at, loss=torch.ones(4))])
    assert rbf_panels.typical_seed(bases, other) == 3


def test_runs_are_reproducible(problem: rbf.Problem, runs: list[rbf.MethodRun]) -> None:
    again = rbf.grow(problem, rbf.METHODS[1], SMALL)
    assert torch.equal(again.stages[-1].loss, runs[1].stages[-1].loss)


@pytest.mark.parametrize(
    ("name", "value"),
    [("neurons", 4), ("seeds", 0), ("steps", -1), ("eps", 0.0), ("eps", float("nan")), ("learning_rate", -1.0)],
)
def test_bad_settings_name_the_argument(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must .*got"):
        rbf.RBFSettings(**{name: value})  # type: ignore[arg-type]
