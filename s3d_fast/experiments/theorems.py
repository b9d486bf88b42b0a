"""The paper's Theorems 4 and 5 tried out: networks of one hidden layer, split exactly as the theorems assume.

The network is f(x) = sum_i w_i act(theta_i . x) with fixed w, the loss L = mean (f(x) - y)^2 / 2 over n samples in R^d,
and e = f(x) - y. Neuron i has the splitting matrix S_i = w_i mean(e act''(theta_i . x) x x^T) with the spectral radius
rho(S_i). With |act''| >= h at all neurons and samples, and lambda_X = lambda_min(X^T X) / d^2 where (X^T X)_kl =
(x_k . x_l)^2, the theorems say:

    Lemma              2 L <= alpha (rho(S_i) / w_i)^2  for every neuron,       alpha = n / (d h^2 lambda_X)
    each split         lowers L by eps^2/4 kappa rho_0 at least,                rho_0 = sqrt(eta / alpha)
    Theorems 4 and 5   L <= eta after T splits at most,                         T = (L_0 - eta) / (eps^2/4 kappa rho_0)

if every neuron that is split has w_i^2 >= 1 and rho(S_i) >= rho_0, and eps <= kappa rho_0 / (4 C). docs/math.md has the
proofs and what we corrected in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.maths.activations import Activation, activation
from s3d_fast.maths.schemes import Split, optimal_split

# Theorem 4 asks for c >= 3. At c = 3, a neuron with |w| = 1 or |w| = 2 is always there to be split.
WEIGHT_BOUND = 3.0


@dataclass(frozen=True)
class Unit:
    """An activation with bounds on its derivatives: |act''| <= `second` and |act'''| <= `third` everywhere."""

    act: Activation
    second: float
    third: float

    @property
    def name(self) -> str:
        """The name in tables and figures."""
        return self.act.name

    def least_curvature(self, reach: float) -> float:
        """Return h, the least |act''(z)| over |z| <= reach; act'' of both units is even and falls with |z|."""
        return self.act.second(torch.tensor(reach, dtype=torch.float64)).abs().item()


QUADRATIC = Unit(Activation("quadratic", lambda z: z * z / 2, lambda z: z, torch.ones_like), 1.0, 0.0)
SOFTPLUS = Unit(activation("softplus"), 1 / 4, 1 / (6 * math.sqrt(3)))


@dataclass(frozen=True)
class Case:
    """A unit and a number of copies; Theorem 4 is about three and four copies, Theorem 5 about two."""

    unit: Unit
    m: int

    @property
    def theorem(self) -> int:
        """The number of the theorem in the paper."""
        return 5 if self.m == 2 else 4

    @property
    def kappa(self) -> float:
        """The factor with G_m <= -kappa rho(S)."""
        return (WEIGHT_BOUND - 1) / (WEIGHT_BOUND + 1 if self.m == 2 else 2)

    @property
    def largest_weight(self) -> float:
        """The largest |w| of a neuron that is split, if the least |w| >= 1 is always split first.

        Three copies have the weights w (1, 1, -1) or w (-1/2, -1/2, 2): of |w| = 1 the second leaves 2, of |w| = 2 it
        leaves 1. Four copies have w (1, 1, -1/2, -1/2). Theorem 5 starts with a neuron of |w| = 1 for every split.
        """
        return 2.0 if self.m == 3 else 1.0


CASES = tuple(Case(unit, m) for unit in (QUADRATIC, SOFTPLUS) for m in (4, 3, 2))


@dataclass(frozen=True)
class TheoremSettings:
    """The numbers of the experiment.

    Attributes:
        dimension: d.
        samples: n, at most d (d + 1) / 2: otherwise lambda_X = 0.
        target: eta as a share of the loss at the start.
        reach: the region |theta . x| <= reach that softplus neurons must not leave; h is the least act'' in it.
        descent: steps of gradient descent on theta between splits. None may raise the loss or leave the inner half of
            the region; the outer half is for splits.
        seed: of the data and the first neurons.
    """

    dimension: int = 3
    samples: int = 5
    target: float = 0.25
    reach: float = 0.5
    descent: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require.count("dimension", self.dimension)
        require.count("samples", self.samples)
        require.count("descent", self.descent, at_least=0)
        require.count("seed", self.seed, at_least=0)
        require.positive("reach", self.reach)
        require.positive("target", self.target)
        require.below_one("target", self.target)
        most = self.dimension * (self.dimension + 1) // 2
        if self.samples > most:
            raise ValueError(
                f"samples must be at most d (d + 1) / 2 = {most} for d = {self.dimension}, got {self.samples}: "
                "with more samples lambda_X = 0 and the theorems say nothing"
            )


@dataclass(frozen=True)
class Data:
    """Samples and labels in float64."""

    x: Tensor  # (n, d)
    y: Tensor  # (n,)

    @property
    def smallest_eigenvalue(self) -> float:
        """lambda_X = lambda_min(X^T X) / d^2, where column k of X is vec(x_k x_k^T)."""
        return torch.linalg.eigvalsh((self.x @ self.x.T) ** 2)[0].item() / self.x.shape[1] ** 2

    def mean_norm(self, power: int) -> float:
        """Return mean |x|^power."""
        return (self.x.norm(dim=1) ** power).mean().item()


def make_data(settings: TheoremSettings) -> Data:
    """Draw unit vectors x and normal labels y; of 1000 draws of x, keep the one with the greatest lambda_X.

    T grows like lambda_X^(-3/2), and lambda_X of a single draw is often a tenth of the greatest one.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    x = torch.randn(1000, settings.samples, settings.dimension, generator=generator, dtype=torch.float64)
    y = torch.randn(settings.samples, generator=generator, dtype=torch.float64)
    x /= x.norm(dim=-1, keepdim=True)
    best = torch.linalg.eigvalsh((x @ x.mT) ** 2)[:, 0].argmax()
    return Data(x[best], y)


@dataclass(frozen=True)
class Guarantee:
    """What the theorems promise for one case, known before the first split."""

    kappa: float
    h: float
    lambda_x: float
    alpha: float
    first_loss: float
    eta: float
    rho_0: float
    C: float
    eps: float

    @property
    def decrease(self) -> float:
        """The least decrease of the loss by a split: eps^2/4 kappa rho_0."""
        return self.eps**2 / 4 * self.kappa * self.rho_0

    @property
    def splits(self) -> int:
        """T, the number of splits after which the loss is at most eta."""
        return math.ceil((self.first_loss - self.eta) / self.decrease)


def guarantee(case: Case, data: Data, first_loss: float, settings: TheoremSettings) -> Guarantee:
    """Return the promise of the theorem with the largest eps that it allows.

    Let F(eps) be the loss along a split. The proofs need |F'''| <= 6 C up to eps. With z = theta . x, a neuron of
    weight w, copies of weights w_k and u_k = delta_k . x, |u_k| <= |x|, the change of f is p(eps) = w sum_k w_k
    (act(z + eps u_k) - act(z)), so that p'(0) = 0 and

        F''' = mean((e + p) p''' + 3 p' p''),      |p'''| <= |w| c |x|^3 act3,   |p''| <= |w| c |x|^2 act2,
                                                   |p'| <= eps |w| c |x|^2 act2.

    By Cauchy's inequality, mean |e + p| |x|^3 <= sqrt(2 F mean |x|^6), and F never exceeds the loss at the start. Hence

        6 C = |w| c act3 sqrt(2 L_0 mean |x|^6) + 3 eps (w c act2)^2 mean |x|^4,

    a bound that holds along every split, whatever it meets; eps solves eps = kappa rho_0 / (4 C).

    Raises:
        ValueError: lambda_X is 0 up to rounding, so that the theorems say nothing about these data.
    """
    n, d = data.x.shape
    lambda_x = data.smallest_eigenvalue
    if lambda_x < 1e-12:
        raise ValueError(f"the data must have lambda_X > 0, got {lambda_x:.1e}: draw them again with another seed")
    h = case.unit.least_curvature(settings.reach)
    alpha = n / (d * h**2 * lambda_x)
    eta = settings.target * first_loss
    rho_0 = math.sqrt(eta / alpha)
    weight = case.largest_weight * WEIGHT_BOUND
    constant = weight * case.unit.third * math.sqrt(2 * first_loss * data.mean_norm(6)) / 6
    slope = (weight * case.unit.second) ** 2 * data.mean_norm(4) / 2
    eps = (math.sqrt(constant**2 + slope * case.kappa * rho_0) - constant) / (2 * slope)
    return Guarantee(case.kappa, h, lambda_x, alpha, first_loss, eta, rho_0, constant + slope * eps, eps)


class Network:
    """A hidden layer with fixed output weights, its error on the data, and the curvature it has left."""

    def __init__(self, unit: Unit, data: Data, theta: Tensor, w: Tensor) -> None:
        self.unit, self.data = unit, data
        self.size = len(w)
        self._theta, self._w = theta.clone(), w.clone()
        self._curvature = self._least_curvature(theta)
        self.error = self._error()
        self._step = 1.0

    @property
    def theta(self) -> Tensor:  # (m, d)
        return self._theta[: self.size]

    @property
    def w(self) -> Tensor:  # (m,)
        return self._w[: self.size]

    @property
    def curvature(self) -> Tensor:  # (m,)
        """The least |act''| of every neuron over the samples."""
        return self._curvature[: self.size]

    @property
    def loss(self) -> float:
        """L = mean e^2 / 2."""
        return (self.error @ self.error).item() / (2 * len(self.error))

    def splitting_matrix(self, neuron: int) -> Tensor:
        """Return S_i = w_i mean(e act''(theta_i . x) x x^T), (d, d)."""
        x = self.data.x
        coefficients = self.error * self.unit.act.second(x @ self._theta[neuron]) * (self._w[neuron] / len(x))
        return x.T @ (coefficients[:, None] * x)

    def lemma(self, neuron: int, alpha: float) -> tuple[float, float]:
        """Return both sides of the Lemma for one neuron: 2 L and alpha (rho(S_i) / w_i)^2."""
        rho = torch.linalg.eigvalsh(self.splitting_matrix(neuron)).abs().max().item()
        return 2 * self.loss, alpha * (rho / self._w[neuron].item()) ** 2

    def choice(self) -> int:
        """Return the neuron to split: among those with w^2 >= 1 the least |w|, then the greatest curvature."""
        sizes = self.w.abs()
        least = sizes.masked_fill(sizes < 1, torch.inf).amin()
        return int(self.curvature.masked_fill(sizes != least, -1).argmax())

    def split(self, neuron: int, copies: Split, eps: float) -> None:
        """Replace a neuron by its copies: theta + eps delta_k with weights w w_k."""
        x, act = self.data.x, self.unit.act
        theta = self._theta[neuron] + eps * copies.offsets
        w = self._w[neuron] * copies.weights
        self.error = self.error + act(x @ theta.T) @ w - self._w[neuron] * act(x @ self._theta[neuron])
        self._make_room(len(w) - 1)
        places = [neuron, *range(self.size, self.size + len(w) - 1)]
        self._theta[places], self._w[places], self._curvature[places] = theta, w, self._least_curvature(theta)
        self.size += len(w) - 1

    def descend(self, least: float) -> None:
        """Take one gradient step on theta, halved until no |act''| falls below `least` and the loss does not rise.

        After eight steps that fail, theta stays as it is. The next call begins with twice the step that succeeded.
        """
        x, before, error = self.data.x, self.theta.clone(), self.error
        slope = self.unit.act.first(before @ x.T) * error
        gradient = self.w[:, None] * (slope @ x) / len(x)
        loss, allowed = self.loss, self.curvature.clamp(max=least)
        for _ in range(8):
            theta = before - self._step * gradient
            self._step /= 2
            curvature = self._least_curvature(theta)
            # A neuron that splits have put outside may not move farther out.
            if bool((curvature < allowed).any()):
                continue
            self._theta[: self.size] = theta
            self.error = self._error()
            if self.loss <= loss:
                self._curvature[: self.size] = curvature
                self._step *= 4
                return
        self._theta[: self.size], self.error = before, error

    def _error(self) -> Tensor:
        return self.unit.act(self.data.x @ self.theta.T) @ self.w - self.data.y

    def _least_curvature(self, theta: Tensor) -> Tensor:
        return self.unit.act.second(theta @ self.data.x.T).abs().amin(-1)

    def _make_room(self, extra: int) -> None:
        while self.size + extra > len(self._w):
            self._theta, self._w, self._curvature = (
                torch.cat([part, torch.zeros_like(part)]) for part in (self._theta, self._w, self._curvature)
            )


@dataclass(frozen=True)
class Step:
    """One split: the neuron before it, and the loss on both sides."""

    before: float
    after: float
    rho: float
    w: float
    lemma: float  # alpha (rho / w)^2, which the Lemma puts above 2 L


@dataclass
class TheoremRun:
    """One case from the first network to the loss eta."""

    case: Case
    promise: Guarantee
    first_neurons: int
    network: Network
    least_curvature: float = math.inf  # the least |act''| of any neuron at any sample, over the whole run
    steps: list[Step] = field(default_factory=list)
    stopped_by: str = ""  # "loss": L <= eta; "rho": rho < rho_0


def first_network(case: Case, data: Data, settings: TheoremSettings) -> tuple[Network, Guarantee]:
    """Return the network that the theorem starts from: one neuron, or for Theorem 5 at least T neurons, all |w| = 1.

    The many neurons are pairs that cancel, so that the loss at the start, and with it T, does not depend on how many.
    """
    generator = torch.Generator().manual_seed(settings.seed + 1)

    def neurons(count: int) -> Tensor:
        theta = torch.randn(count, settings.dimension, generator=generator, dtype=torch.float64)
        return 0.1 * theta / theta.norm(dim=1, keepdim=True)

    if case.theorem == 4:
        network = Network(case.unit, data, neurons(1), data.y.new_ones(1))
        return network, guarantee(case, data, network.loss, settings)
    promise = guarantee(case, data, (data.y @ data.y).item() / (2 * len(data.y)), settings)
    pairs = -(-promise.splits // 2)
    theta = neurons(pairs).repeat_interleave(2, 0)
    return Network(case.unit, data, theta, data.y.new_tensor([1.0, -1.0]).repeat(pairs)), promise


def run_case(
    case: Case, data: Data, settings: TheoremSettings, progress: Callable[[int], object] = lambda splits: None
) -> TheoremRun:
    """Split until the loss is at most eta, or until rho < rho_0, where the Lemma says the same.

    Raises:
        RuntimeError: a neuron left the region where |act''| >= h, so that the theorems do not hold any more.
    """
    network, promise = first_network(case, data, settings)
    inner = case.unit.least_curvature(settings.reach / 2)
    run = TheoremRun(case, promise, network.size, network)
    while True:
        for _ in range(settings.descent):
            network.descend(inner)
        run.least_curvature = min(run.least_curvature, network.curvature.min().item())
        if run.least_curvature < promise.h:
            raise RuntimeError(
                f"a {case.unit.name} neuron left the region |theta . x| <= {settings.reach:g}, where |act''| >= h: "
                "take a larger reach"
            )
        before, neuron = network.loss, network.choice()
        values, vectors = torch.linalg.eigh(network.splitting_matrix(neuron))
        rho, w = values.abs().max().item(), network.w[neuron].item()
        if before <= promise.eta or rho < promise.rho_0:
            run.stopped_by = "loss" if before <= promise.eta else "rho"
            return run
        copies = optimal_split(values[0], vectors[:, 0], values[-1], vectors[:, -1], case.m, WEIGHT_BOUND)
        network.split(neuron, copies, promise.eps)
        run.steps.append(Step(before, network.loss, rho, w, promise.alpha * (rho / w) ** 2))
        progress(1)
