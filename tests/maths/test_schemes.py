"""Splitting schemes: the closed forms are feasible, attain their gain, and nothing feasible beats them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from s3d_fast import optimal_split, split_gain
from tests.cases import TOLERANCE

Array = NDArray[np.float64]

COPIES = (2, 3, 4)
BOUNDS = (1.0, 1.3, 2.0, 3.0, 5.0)
INDEFINITE = {
    "balanced": (-1.0, 1.0),
    "mostly-negative": (-2.0, 0.5),
    "mostly-positive": (-0.3, 1.5),
    "mixed": (-1.0, 2.0),
}
SPECTRA = {
    **INDEFINITE,
    "positive-definite": (0.4, 1.2),
    "negative-definite": (-1.7, -0.2),
    "positive-semidefinite": (0.0, 1.5),
    "negative-semidefinite": (-1.5, 0.0),
}

every_m = pytest.mark.parametrize("m", COPIES)
every_c = pytest.mark.parametrize("c", BOUNDS)
every_spectrum = pytest.mark.parametrize("spectrum", SPECTRA)
reproducible = settings(max_examples=60, deadline=None, derandomize=True, database=None)

eigenvalue = st.floats(-100, 100, allow_subnormal=False)
weight_bound = st.floats(1, 20)


def matrices(low: Tensor, high: Tensor, D: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return symmetric matrices (..., D, D) with the given extreme eigenvalues, and the vectors of both ends."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(*low.shape, D, D, dtype=torch.float64, generator=generator))
    inner = torch.rand(*low.shape, D, dtype=torch.float64, generator=generator)
    inner[..., 0], inner[..., -1] = 0, 1
    values = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * inner
    return Q @ torch.diag_embed(values) @ Q.mT, Q[..., 0], Q[..., -1]


def change(weights: Tensor, offsets: Tensor, S: Tensor) -> Tensor:
    """Return sum_k w_k delta_k^T S delta_k."""
    return torch.einsum("...k,...kd,...de,...ke->...", weights, offsets, S, offsets)


def assert_feasible(weights: Tensor, offsets: Tensor, c: float, slack: float = 1e-12) -> None:
    total = weights.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=slack * c)
    assert float(weights.abs().sum(-1).max()) <= c * (1 + slack)
    assert float((weights.unsqueeze(-1) * offsets).sum(-2).norm(dim=-1).max()) <= slack * c
    assert float(offsets.norm(dim=-1).max()) <= 1 + slack


def random_ends(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    ends = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return ends.amin(0), ends.amax(0)


@every_m
@every_c
@pytest.mark.parametrize("D", [2, 5])
def test_the_optimal_split_is_feasible_and_attains_its_gain(m: int, c: float, D: int) -> None:
    low, high = random_ends((3, 40), seed=m)
    S, v_min, v_max = matrices(low, high, D)
    split = optimal_split(low, v_min, high, v_max, m, c)
    assert split.weights.shape == (3, 40, m)
    assert split.offsets.shape == (3, 40, m, D)
    assert_feasible(split.weights, split.offsets, c)
    torch.testing.assert_close(change(split.weights, split.offsets, S), split.gain, rtol=0, atol=1e-12 * c)
    assert torch.equal(split.gain, split_gain(low, high, m, c))


@given(st.tuples(eigenvalue, eigenvalue), st.sampled_from(COPIES), weight_bound, st.integers(2, 4))
@reproducible
def test_any_optimal_split_is_feasible_and_attains_its_gain(
    ends: tuple[float, float], m: int, c: float, D: int
) -> None:
    low, high = torch.tensor(sorted(ends), dtype=torch.float64)
    S, v_min, v_max = matrices(low, high, D)
    split = optimal_split(low, v_min, high, v_max, m, c)
    assert_feasible(split.weights, split.offsets, c)
    scale = max(abs(end) for end in ends) * c
    assert float(change(split.weights, split.offsets, S)) == pytest.approx(float(split.gain), abs=1e-12 * scale)
    assert float(split.gain) <= 0


@every_m
@every_c
@pytest.mark.parametrize("value", [-1.5, 0.0, 2.0])
def test_one_dimension_has_one_vector_for_both_ends(m: int, c: float, value: float) -> None:
    low = torch.tensor([value], dtype=torch.float64)
    v = torch.ones(1, 1, dtype=torch.float64)
    split = optimal_split(low, v, low, v, m, c)
    assert_feasible(split.weights, split.offsets, c)
    torch.testing.assert_close(change(split.weights, split.offsets, low.reshape(1, 1, 1)), split.gain)


def test_two_copies_and_positive_weights_are_steepest_descent_splitting() -> None:
    low, high = random_ends((50,), seed=1)
    _, v_min, v_max = matrices(low, high, 4)
    split = optimal_split(low, v_min, high, v_max, m=2, c=1)
    torch.testing.assert_close(split.gain, low.clamp(max=0), rtol=0, atol=0)
    splits = low < 0
    assert bool(splits.any())
    assert torch.equal(split.weights[splits], torch.full_like(split.weights[splits], 0.5))
    assert torch.equal(split.offsets[splits], torch.stack([v_min, -v_min], -2)[splits])


@every_m
def test_more_copies_with_positive_weights_gain_nothing(m: int) -> None:
    low, high = random_ends((50,), seed=2)
    torch.testing.assert_close(split_gain(low, high, m, 1), split_gain(low, high, 2, 1), rtol=1e-14, atol=0)


@every_m
@pytest.mark.parametrize(("low", "high", "c"), [(0.0, 0.0, 1.0), (0.0, 0.0, 3.0), (0.0, 2.0, 1.0), (0.5, 2.0, 1.0)])
def test_a_neuron_without_gain_is_left_alone(m: int, low: float, high: float, c: float) -> None:
    ends = torch.tensor([[low], [high]], dtype=torch.float64)
    _, v_min, v_max = matrices(ends[0], ends[1], 3)
    split = optimal_split(ends[0], v_min, ends[1], v_max, m, c)
    assert split.gain.tolist() == [0.0]
    assert split.weights.tolist() == [[1.0] + [0.0] * (m - 1)]
    assert torch.equal(split.offsets, torch.zeros(1, m, 3, dtype=torch.float64))


@every_m
def test_a_neuron_without_gain_does_not_disturb_its_neighbours(m: int) -> None:
    low, high = torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([2.0, 0.0, -1.0])
    V = torch.eye(3)
    together = optimal_split(low, V, high, V.roll(1, 0), m, 2)
    for j in range(3):
        alone = optimal_split(low[j], V[j], high[j], V.roll(1, 0)[j], m, 2)
        assert all(torch.equal(a[j], b) for a, b in zip(together, alone, strict=True))


@given(st.tuples(eigenvalue, eigenvalue), weight_bound, weight_bound)
@reproducible
def test_the_gain_grows_with_copies_and_with_the_weight_bound(ends: tuple[float, float], c: float, d: float) -> None:
    low, high = torch.tensor(sorted(ends), dtype=torch.float64)
    slack = 1e-12 * float(torch.maximum(low.abs(), high.abs())) * max(c, d)
    gains = [float(split_gain(low, high, m, c)) for m in COPIES]
    assert 0 >= gains[0] >= gains[1] - slack
    assert gains[1] >= gains[2] - slack
    for m in COPIES:
        assert float(split_gain(low, high, m, max(c, d))) <= float(split_gain(low, high, m, min(c, d))) + slack


@every_m
@every_c
def test_float32_follows_float64(m: int, c: float) -> None:
    low, high = random_ends((30,), seed=4)
    _, v_min, v_max = matrices(low, high, 3)
    single = optimal_split(*(tensor.float() for tensor in (low, v_min, high, v_max)), m, c)
    assert all(part.dtype == torch.float32 for part in single)
    assert_feasible(single.weights, single.offsets, c, slack=1e-6)
    torch.testing.assert_close(single.gain.double(), split_gain(low, high, m, c), rtol=0, atol=TOLERANCE[torch.float32])


def test_numbers_stand_for_tensors() -> None:
    assert float(split_gain(-1.0, 2.0, m=2, c=3)) == pytest.approx(-1.0)
    assert float(split_gain(-1, 2, m=4, c=3)) == pytest.approx(-4.0)


def random_schemes(count: int, m: int, c: float, D: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random feasible weights (count, m) and offsets (count, m, D), most of them on the boundary."""
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(count, m, generator=generator, dtype=torch.float64) < 0.5
    positive[:, 0] = True
    # Sum |w| = s splits into (s + 1) / 2 on positive weights and (s - 1) / 2 on negative ones.
    s = 1 + (c - 1) * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    s[: count // 2] = c
    s[positive.all(-1)] = 1
    size = -torch.rand(count, m, generator=generator, dtype=torch.float64).log()

    def share(mask: Tensor) -> Tensor:
        return size * mask / (size * mask).sum(-1, keepdim=True).clamp(min=1e-300)

    weights = share(positive) * (s + 1) / 2 - share(~positive) * (s - 1) / 2
    offsets = torch.randn(count, m, D, generator=generator, dtype=torch.float64)
    drift = (weights.unsqueeze(-1) * offsets).sum(-2, keepdim=True)
    offsets = offsets - drift * (weights / weights.square().sum(-1, keepdim=True)).unsqueeze(-1)
    return weights, offsets / offsets.norm(dim=-1).amax(-1)[:, None, None]


@every_m
@every_c
@every_spectrum
def test_no_random_scheme_beats_the_closed_form(m: int, c: float, spectrum: str) -> None:
    low, high = torch.tensor(SPECTRA[spectrum], dtype=torch.float64)
    for D in (2, 3):
        S, _, _ = matrices(low, high, D)
        weights, offsets = random_schemes(4000, m, c, D, seed=10 * m + D)
        assert_feasible(weights, offsets, c, slack=1e-9)
        assert float(change(weights, offsets, S).min()) >= float(split_gain(low, high, m, c)) - 1e-9


@pytest.mark.parametrize("m", [5, 7])
@every_c
@every_spectrum
def test_more_than_four_copies_gain_nothing(m: int, c: float, spectrum: str) -> None:
    low, high = torch.tensor(SPECTRA[spectrum], dtype=torch.float64)
    S, _, _ = matrices(low, high, 2)
    weights, offsets = random_schemes(4000, m, c, 2, seed=m)
    assert_feasible(weights, offsets, c, slack=1e-9)
    assert float(change(weights, offsets, S).min()) >= float(split_gain(low, high, 4, c)) - 1e-9


class Descent:
    """The numerical minimum of sum_k w_k delta_k^T S delta_k over feasible schemes.

    The weights are w = p - q with p, q >= 0 and sum(p + q) <= c, which makes every constraint smooth. The variables
    are p, q (m each) and delta (m, D), in that order.
    """

    def __init__(self, S: Array, m: int, c: float) -> None:
        self.S, self.m, self.c, self.D = S, m, c, len(S)
        signs = np.concatenate([np.ones(m), -np.ones(m), np.zeros(m * self.D)])
        self.constraints = [
            {"type": "eq", "fun": lambda x: [signs @ x - 1], "jac": lambda x: signs[None]},
            {"type": "eq", "fun": self.drift, "jac": self.drift_slope},
            {"type": "ineq", "fun": lambda x: [c - abs(signs) @ x], "jac": lambda x: -abs(signs)[None]},
            {"type": "ineq", "fun": self.room, "jac": self.room_slope},
        ]
        self.limits = [(0, None)] * (2 * m) + [(-1, 1)] * (m * self.D)

    def parts(self, x: Array) -> tuple[Array, Array]:
        m = self.m
        return x[:m] - x[m : 2 * m], x[2 * m :].reshape(m, self.D)

    def value(self, x: Array) -> tuple[float, Array]:
        w, delta = self.parts(x)
        image = delta @ self.S
        each = (delta * image).sum(1)
        return float(w @ each), np.concatenate([each, -each, (2 * w[:, None] * image).ravel()])

    def drift(self, x: Array) -> Array:
        w, delta = self.parts(x)
        return w @ delta

    def drift_slope(self, x: Array) -> Array:
        w, delta = self.parts(x)
        return np.concatenate([delta.T, -delta.T, np.kron(w, np.eye(self.D))], 1)

    def room(self, x: Array) -> Array:
        return 1 - (self.parts(x)[1] ** 2).sum(1)

    def room_slope(self, x: Array) -> Array:
        _, delta = self.parts(x)
        slope = np.zeros((self.m, len(x)))
        for k, d in enumerate(delta):
            slope[k, 2 * self.m + k * self.D : 2 * self.m + (k + 1) * self.D] = -2 * d
        return slope

    def run(self, rng: np.random.Generator) -> float | None:
        """Return the value that a random start descends to, or None if that is not feasible to 1e-8."""
        positive = rng.random(self.m) < 0.5
        p, q = rng.dirichlet(np.ones(self.m)) * positive, rng.dirichlet(np.ones(self.m)) * ~positive
        delta = rng.standard_normal((self.m, self.D))
        delta /= np.linalg.norm(delta, axis=1, keepdims=True)
        start = np.concatenate([(self.c + 1) / 2 * p, (self.c - 1) / 2 * q, delta.ravel()])
        result = minimize(
            self.value,
            start,
            jac=True,
            method="SLSQP",
            bounds=self.limits,
            constraints=self.constraints,
            options={"maxiter": 200, "ftol": 1e-11},
        )
        w, _ = self.parts(result.x)
        violation = max(
            abs(w.sum() - 1),
            abs(w).sum() - self.c,
            float(np.abs(self.drift(result.x)).max()),
            -float(self.room(result.x).min()),
        )
        return float(result.fun) if violation < 1e-8 else None


@every_m
@every_c
@every_spectrum
def test_the_closed_form_is_the_numerical_minimum(m: int, c: float, spectrum: str) -> None:
    low, high = torch.tensor(SPECTRA[spectrum], dtype=torch.float64)
    S, _, _ = matrices(low, high, 2 if m == 4 else 3, seed=m)
    gain = float(split_gain(low, high, m, c))
    descent, rng = Descent(S.numpy(), m, c), np.random.default_rng(m)
    best = math.inf
    for restart in range(100):
        value = descent.run(rng)
        if value is not None:
            assert value >= gain - 1e-7, "a feasible scheme beats the closed form"
            best = min(best, value)
        if restart >= 4 and best <= gain + 1e-4 * abs(gain) + 1e-7:
            return
    pytest.fail(f"the closed form says {gain}, the best scheme found gains {best}")


def test_the_triplet_of_the_paper_is_beaten_by_a_mixed_one() -> None:
    low, high, c = -1.0, 2.0, 3.0
    paper = min((c + 1) / 2 * low, -(c - 1) / 2 * high, 0)
    S = torch.diag(torch.tensor([low, high], dtype=torch.float64))
    weights = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    offsets = torch.tensor([[0.75**0.5, 0.5], [-(0.75**0.5), 0.5], [0.0, 1.0]], dtype=torch.float64)
    assert_feasible(weights, offsets, c)
    assert float(change(weights, offsets, S)) == pytest.approx(-2.5)
    assert paper == -2.0
    assert float(split_gain(low, high, 3, c)) == pytest.approx(-2.5)


def test_the_papers_triplets_gain_less_where_both_ends_count() -> None:
    low, high, c = torch.tensor([-1.0]), torch.tensor([1.0]), 3.0
    paper, true = (float(split_gain(low, high, 3, c, theorem)) for theorem in ("paper", "true"))
    assert paper == pytest.approx(min((c + 1) / 2 * -1.0, -(c - 1) / 2 * 1.0))
    assert true == pytest.approx(2 * c / (c + 1) * -1.0 - (c - 1) / (c + 1))
    assert true <= paper
    v = torch.eye(2)[:1]
    w = torch.eye(2)[1:]
    split = optimal_split(low, v, high, w, 3, c, theorem="paper")
    S = torch.diag(torch.tensor([-1.0, 1.0]))
    value = float((split.weights[0] * torch.einsum("kd,de,ke->k", split.offsets[0], S, split.offsets[0])).sum())
    assert value == pytest.approx(paper)
    with pytest.raises(ValueError, match="theorem"):
        split_gain(low, high, 3, c, theorem="other")
