"""Theorems 4 and 5: the splitting matrix, the Lemma, the constant C, and runs that keep every promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from s3d_fast.experiments import theorems
from s3d_fast.experiments.theorem_records import TheoremRecord, explanation, record, theorem_table
from s3d_fast.experiments.theorems import (
    CASES,
    QUADRATIC,
    SOFTPLUS,
    WEIGHT_BOUND,
    Case,
    Data,
    Network,
    TheoremSettings,
    Unit,
)
from s3d_fast.maths.schemes import optimal_split
from s3d_fast.report import theorem_figure
from s3d_fast.report.plot import beside

SMALL = TheoremSettings(dimension=2, samples=3, target=0.5)
each_unit = pytest.mark.parametrize("unit", [QUADRATIC, SOFTPLUS], ids=lambda unit: unit.name)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.unit.name}-m{case.m}")


def random_network(unit: Unit, seed: int, d: int = 3, n: int = 5, neurons: int = 4, scale: float = 1.0) -> Network:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Network(unit, Data(normal(n, d), normal(n)), scale * normal(neurons, d), normal(neurons))


def alpha_of(network: Network, h: float) -> float:
    n, d = network.data.x.shape
    return n / (d * h**2 * network.data.smallest_eigenvalue)


def loss_along_a_split(network: Network, neuron: int, weights: Tensor, offsets: Tensor) -> Callable[[Tensor], Tensor]:
    """Return F(eps), the loss with the neuron's copies at theta + eps delta_k, by no formula of the experiment."""
    x, y, act = network.data.x, network.data.y, network.unit.act.function
    others = [i for i in range(network.size) if i != neuron]

    def loss(eps: Tensor) -> Tensor:
        f = act(x @ network.theta[others].T) @ network.w[others]
        for weight, offset in zip(weights, offsets, strict=True):
            f = f + network.w[neuron] * weight * act(x @ (network.theta[neuron] + eps * offset))
        return ((f - y) ** 2).mean() / 2

    return loss


def derivative(function: Callable[[Tensor], Tensor], order: int, at: float) -> float:
    eps = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    value = function(eps)
    for _ in range(order):
        (value,) = torch.autograd.grad(value, eps, create_graph=True)
    return value.item()


@cache
def small_run(case: Case) -> theorems.TheoremRun:
    return theorems.run_case(case, theorems.make_data(SMALL), SMALL)


@each_unit
def test_the_splitting_matrix_is_the_second_derivative_of_a_split(unit: Unit) -> None:
    network = random_network(unit, 0)
    half = torch.full((2,), 0.5, dtype=torch.float64)
    for neuron in range(network.size):
        S = network.splitting_matrix(neuron)
        for v in torch.eye(3, dtype=torch.float64).unsqueeze(0) + torch.eye(3, dtype=torch.float64).unsqueeze(1):
            for one in v:
                loss = loss_along_a_split(network, neuron, half, torch.stack([one, -one]))
                assert derivative(loss, 2, 0.0) == pytest.approx((one @ S @ one).item(), rel=1e-10, abs=1e-13)


def test_lambda_x_is_that_of_the_vectorised_products() -> None:
    data = random_network(QUADRATIC, 1).data
    columns = torch.stack([torch.outer(x, x).flatten() for x in data.x], 1)
    expected = torch.linalg.svdvals(columns)[-1] ** 2 / 9
    assert data.smallest_eigenvalue == pytest.approx(expected.item(), rel=1e-9)


@each_unit
@pytest.mark.parametrize("seed", range(20))
def test_the_lemma_holds_for_every_neuron_of_random_networks(unit: Unit, seed: int) -> None:
    network = random_network(unit, seed, neurons=6)
    alpha = alpha_of(network, network.curvature.min().item())
    for neuron in range(network.size):
        left, right = network.lemma(neuron, alpha)
        assert left <= right * (1 + 1e-9)


def test_the_lemma_is_attained() -> None:
    # With one sample in one dimension, every inequality of its proof is an equality.
    network = random_network(QUADRATIC, 3, d=1, n=1, neurons=1)
    left, right = network.lemma(0, alpha_of(network, 1.0))
    assert left == pytest.approx(right, rel=1e-12)


def test_the_lemma_fails_with_more_than_d_d_plus_1_half_samples() -> None:
    # d^2 = n = 4 and d (d + 1) / 2 = 3: errors exist that S does not see.
    network = random_network(QUADRATIC, 0, d=2, n=4, neurons=1)
    x = network.data.x
    products = torch.stack([x[:, 0] ** 2, x[:, 0] * x[:, 1], x[:, 1] ** 2])
    unseen = torch.linalg.svd(products)[2][-1]
    network.error = unseen
    assert network.data.smallest_eigenvalue == pytest.approx(0, abs=1e-14)
    assert network.loss == pytest.approx(1 / 8)
    assert network.splitting_matrix(0).abs().max().item() < 1e-14


def test_the_lemma_fails_where_the_curvature_is_below_h() -> None:
    network = random_network(SOFTPLUS, 0, scale=50.0)
    assert network.curvature.min().item() < 1e-3
    alpha = alpha_of(network, 0.25)
    assert any(left > right for left, right in (network.lemma(neuron, alpha) for neuron in range(network.size)))


@each_unit
def test_the_bounds_of_the_derivatives_hold_and_are_attained(unit: Unit) -> None:
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(unit.act(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), z) if unit.third else (torch.zeros_like(z),)
    assert second.abs().max().item() == pytest.approx(unit.second, rel=1e-5)
    assert third.abs().max().item() == pytest.approx(unit.third, rel=1e-5)
    assert unit.least_curvature(2.0) == pytest.approx(second[z.abs() <= 2].abs().min().item(), rel=1e-9)


@each_case
def test_c_bounds_the_third_derivative_along_splits(case: Case) -> None:
    data = theorems.make_data(SMALL)
    network, promise = theorems.first_network(case, data, SMALL)
    assert 4 * promise.C * promise.eps == pytest.approx(promise.kappa * promise.rho_0, rel=1e-12)
    # The many neurons of Theorem 5 cancel in pairs; one pair is enough.
    network = Network(case.unit, data, network.theta[:2], network.w[:2] * case.largest_weight)
    promise = theorems.guarantee(case, data, network.loss, SMALL)
    values, vectors = torch.linalg.eigh(network.splitting_matrix(0))
    copies = optimal_split(values[0], vectors[:, 0], values[-1], vectors[:, -1], case.m, WEIGHT_BOUND)
    loss = loss_along_a_split(network, 0, copies.weights, copies.offsets)
    for share in (0.1, 0.5, 1.0):
        third = derivative(loss, 3, share * promise.eps)
        assert abs(third) <= 6 * promise.C


def test_c_is_of_the_size_of_the_third_derivative_where_act_has_its_largest() -> None:
    # One sample at the largest |act'''|, and a step so small that only the first term of C counts. The negative pair,
    # weights -1 and 2 with offsets 1 and 1/2, has |sum w_k delta_k^3| = 3/4, where C has room for c = 3.
    x = torch.ones(1, 1, dtype=torch.float64)
    steepest = torch.full_like(x, math.log(2 - math.sqrt(3)))
    data = Data(x, SOFTPLUS.act(steepest)[0] - 100)
    network = Network(SOFTPLUS, data, steepest, x[0])
    promise = theorems.guarantee(Case(SOFTPLUS, 2), data, network.loss, replace(SMALL, target=1e-9))
    S = network.splitting_matrix(0)
    copies = optimal_split(S[0, 0], x[0], S[0, 0], x[0], 2, WEIGHT_BOUND)
    third = derivative(loss_along_a_split(network, 0, copies.weights, copies.offsets), 3, 0.0)
    assert abs(third) == pytest.approx(6 * promise.C / 4, rel=1e-3)


@each_case
def test_kappa_bounds_the_gain(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    low, high = torch.randn(200, 2, generator=generator, dtype=torch.float64).sort(-1).values.unbind(-1)
    v = torch.zeros(200, 2, dtype=torch.float64)
    gain = optimal_split(low, v, high, v, case.m, WEIGHT_BOUND).gain
    assert bool((gain <= -case.kappa * torch.maximum(low.abs(), high.abs()) + 1e-12).all())


@each_case
def test_every_split_keeps_the_promise(case: Case) -> None:
    run = small_run(case)
    promise = run.promise
    assert run.steps
    for step in run.steps:
        assert abs(step.w) >= 1
        assert abs(step.w) <= case.largest_weight
        assert step.rho >= promise.rho_0
        assert step.before - step.after >= promise.decrease
        assert 2 * step.before <= step.lemma
    assert run.least_curvature >= promise.h


@each_case
def test_the_target_is_reached_within_t_splits(case: Case) -> None:
    run = small_run(case)
    assert run.network.loss <= run.promise.eta
    assert len(run.steps) <= run.promise.splits
    assert run.network.size == run.first_neurons + (case.m - 1) * len(run.steps)
    assert run.first_neurons == 1 if case.theorem == 4 else run.first_neurons >= run.promise.splits


@each_case
def test_the_loss_that_is_kept_is_that_of_the_network(case: Case) -> None:
    network = small_run(case).network
    again = Network(case.unit, network.data, network.theta, network.w)
    assert network.loss == pytest.approx(again.loss, rel=1e-9)
    torch.testing.assert_close(network.curvature, again.curvature, rtol=1e-12, atol=0)


@each_case
def test_the_lemma_holds_for_all_neurons_at_the_end(case: Case) -> None:
    run = small_run(case)
    for neuron in range(0, run.network.size, 1 + run.network.size // 200):
        left, right = run.network.lemma(neuron, run.promise.alpha)
        assert left <= right


@each_case
def test_t_is_the_papers_with_the_corrected_beta(case: Case) -> None:
    promise = small_run(case).promise
    n, d = SMALL.samples, SMALL.dimension
    excess = promise.first_loss - promise.eta
    beta = 4 / (promise.kappa * promise.h * promise.lambda_x**0.5) * excess
    assert promise.splits == pytest.approx(beta / promise.eps**2 * (n / (d * promise.eta)) ** 0.5, abs=1)
    # Theorem 5 as printed. Its T is a factor 1 / (h lambda_X^(3/2)) too large.
    printed = 4 / (promise.kappa * promise.h**2 * promise.lambda_x**2) * excess
    assert printed / beta == pytest.approx(1 / (promise.h * promise.lambda_x**1.5))


def test_a_larger_step_than_the_theorem_allows_can_break_the_promise() -> None:
    case = Case(QUADRATIC, 4)
    network, promise = theorems.first_network(case, theorems.make_data(SMALL), SMALL)
    before = network.loss
    values, vectors = torch.linalg.eigh(network.splitting_matrix(0))
    copies = optimal_split(values[0], vectors[:, 0], values[-1], vectors[:, -1], case.m, WEIGHT_BOUND)
    network.split(0, copies, 30 * promise.eps)
    assert network.loss > before - promise.decrease


def test_a_neuron_that_leaves_the_region_ends_the_run() -> None:
    settings = replace(SMALL, reach=0.101)
    with pytest.raises(RuntimeError, match=r"left the region \|theta . x\| <= 0.101"):
        theorems.run_case(Case(SOFTPLUS, 4), theorems.make_data(settings), settings)


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"samples must be at most d \(d \+ 1\) / 2 = 3 for d = 2, got 4"):
        TheoremSettings(dimension=2, samples=4)


def test_data_with_lambda_x_zero_are_refused() -> None:
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="lambda_X > 0"):
        theorems.guarantee(Case(QUADRATIC, 4), Data(x, x[:, 0]), 1.0, SMALL)


@each_unit
def test_descent_lowers_the_loss_inside_the_region(unit: Unit) -> None:
    case, settings = Case(unit, 4), replace(SMALL, descent=2)
    run = theorems.run_case(case, theorems.make_data(settings), settings)
    assert len(run.steps) < len(small_run(case).steps)
    assert run.least_curvature >= run.promise.h
    for step, following in zip(run.steps, run.steps[1:], strict=False):
        assert following.before <= step.after


def test_descent_that_finds_no_lower_loss_changes_nothing() -> None:
    network = random_network(QUADRATIC, 0)
    # All gradients vanish at theta = 0.
    network = Network(QUADRATIC, network.data, torch.zeros_like(network.theta), network.w)
    network.descend(1.0)
    assert torch.equal(network.theta, torch.zeros_like(network.theta))


def test_table_and_figure_show_the_runs() -> None:
    records = [record(small_run(case)) for case in CASES]
    rows = theorem_table(records)
    assert [row[:3] for row in rows[1:4]] == [["quadratic", "4", "4"], ["quadratic", "3", "4"], ["quadratic", "2", "5"]]
    for row, case in zip(rows[1:], CASES, strict=True):
        run = small_run(case)
        assert row[4:6] == [f"{run.promise.splits:,}", f"{len(run.steps):,}"]
    assert "d = 2, n = 3" in explanation(records)
    figure = theorem_figure(records)
    assert len(figure.plots) == 2
    svg = beside(figure.plots)
    for case in CASES:
        assert f"at most T = {small_run(case).promise.splits:,}" in svg
        assert f"m = {case.m}: {len(small_run(case).steps):,} splits" in svg


def test_a_run_without_a_split_has_a_record_and_a_figure() -> None:
    run = small_run(CASES[0])
    one = record(replace(run, steps=[]))
    assert (one.splits, one.losses, one.least_lemma) == (0, [], None)
    assert theorem_table([one])[1][5:8] == ["0", "-", "-"]
    assert "0 splits" in beside(theorem_figure([one]).plots)


def test_a_record_survives_as_plain_data() -> None:
    one = record(small_run(CASES[0]))
    assert TheoremRecord(**asdict(one)) == one
    assert one.losses[-1] == (one.splits, one.last_loss)
