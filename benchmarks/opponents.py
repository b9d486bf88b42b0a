"""Other ways to the extreme eigenvalues of many matrices: `python -m benchmarks.opponents` prints a Markdown table.

M matrices S_j = X^T diag(C_j) X of size D x D, from N rows. Every way has to bring both ends of all filters within 1 %
of the spectral radius; that is checked, against float64, before anything is timed. Every way is asked for that
accuracy, tol = 1e-2 or, if that is not good enough, the next stricter one. "Best" rows get the loosest tolerance that
happens to be good enough, found by comparing with the truth, which nobody knows who has to solve the problem. So do
lobpcg, whose tolerance means something else, and RMSprop, which has none.

A cell is the CPU time of one thread over that of ours on rows, all ways in turn, the median over rounds, with the
setting. What is slow is timed on some of the matrices and scaled to all: "8 of 64". RMSprop is done when 99 % of the
filters are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.data import digits

ACCURACY = 1e-2
# The settings that are tried: tolerances from loose to strict, learning rates.
TOLERANCES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 3e-3, 1e-3, 1e-4)
RATES = (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
# Descent is given up after so many steps, and counts as done when this share of the filters is.
MOST_STEPS, ENOUGH = 600, 0.99

# The way that others are compared with.
BASE = "ours, rows"

Ends = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """The rows and coefficients of a layer, and the true ends of the first filters."""

    name: str
    X: Tensor  # (N, D)
    C: Tensor  # (N, M)
    low: Tensor  # (K,), float64
    high: Tensor  # (K,)

    @property
    def filters(self) -> int:
        """M."""
        return self.C.shape[1]

    def product(self, V: Tensor) -> Tensor:  # (M, D) -> (M, D)
        """Return S_j v_j, in plain PyTorch."""
        return ((self.X @ V.T) * self.C).T @ self.X

    def matrix(self, j: int, dtype: torch.dtype = torch.float32) -> Tensor:  # (D, D)
        """Return S_j."""
        X = self.X.to(dtype)
        return (X * self.C[:, j : j + 1].to(dtype)).T @ X

    def errors(self, ends: Ends) -> Tensor:
        """Return the larger error of the two ends of the first filters, in units of the radius."""
        radius = torch.maximum(self.low.abs(), self.high.abs())
        low, high = (end.double()[: len(self.low)] for end in ends)
        count = len(low)
        off = torch.maximum((low - self.low[:count]).abs(), (high - self.high[:count]).abs())
        return off / radius[:count]

    def is_solved(self, ends: Ends, share: float = 1.0) -> bool:
        """Return whether both ends are good enough for this share of the filters."""
        return float((self.errors(ends) <= ACCURACY).double().mean()) >= share


def problem(name: str, X: Tensor, C: Tensor, known: int) -> Problem:
    """Return the problem with the true ends of the first `known` filters."""
    blank = Problem(name, X, C, X.new_empty(0), X.new_empty(0))
    values = torch.stack([torch.linalg.eigvalsh(blank.matrix(j, torch.float64)) for j in range(known)])
    return Problem(name, X, C, values[:, 0], values[:, -1])


def random_rows(N: int, D: int, M: int, known: int) -> Problem:
    """Return normal rows and coefficients."""
    generator = torch.Generator().manual_seed(0)
    X, C = torch.randn(N, D, generator=generator), torch.randn(N, M, generator=generator)
    return problem(f"random, N = {N}, D = {D}, M = {M}", X, C, known)


def trained_layer() -> Problem:
    """Return the second layer of a network that was trained on digits: 31 inputs and a bias."""
    torch.manual_seed(0)
    data = digits().train
    x, y = data.inputs.float() / 8 - 1, data.labels
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 31), nn.SiLU(), nn.Linear(31, 64), nn.SiLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(200):
        at = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        optimizer.step()
    graph = s3d.trace(model.eval(), x[:2])
    operator = s3d.capture(model, F.cross_entropy, [(x, y)], graph)["3"]
    assert isinstance(operator, s3d.PointwiseOperator)
    X = torch.cat([operator.X, torch.ones(len(x), 1)], 1)
    # A sum of losses instead of a mean: the size of S does not matter to us, but it does to lobpcg.
    C = operator.C * len(x)
    return problem(f"trained, N = {len(x)}, D = {X.shape[1]}, M = {C.shape[1]}", X, C, C.shape[1])


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "trained": trained_layer,
    "8192-64-64": lambda: random_rows(8192, 64, 64, 64),
    "8192-256-256": lambda: random_rows(8192, 256, 256, 64),
    "2048-1024-256": lambda: random_rows(2048, 1024, 256, 8),
}


@dataclass(frozen=True)
class Way:
    """A way to the ends of the first `matrices` filters; its times are scaled to all of them."""

    name: str
    run: Callable[[], Ends]
    matrices: int
    setting: str = ""


def ours(given: Problem) -> list[Way]:
    """Return our ways: by a function, and by rows."""

    def by_function() -> Ends:
        found = s3d.extremal_eigenpairs(given.product, tol=ACCURACY, shape=(given.filters, given.X.shape[1]))
        return found.lambda_min, found.lambda_max

    def by_rows(tol: float = ACCURACY, precision: str = "highest") -> Ends:
        found = s3d.extremal_eigenpairs((given.X, given.C), tol=tol, precision=precision)
        return found.lambda_min, found.lambda_max

    return [
        Way("ours, a function", by_function, given.filters, f"tol {ACCURACY:g}"),
        Way(BASE, by_rows, given.filters, f"tol {ACCURACY:g}"),
        tuned(given, "ours, rows, bfloat16", partial(by_rows, precision="medium"), given.filters, ACCURACY),
        tuned(given, "ours, rows, best", by_rows, given.filters),
    ]


def dense(given: Problem, matrices: int) -> list[Way]:
    """Return the ways that form S: plain PyTorch, with and without vectors."""

    def values() -> Ends:
        found = [torch.linalg.eigvalsh(given.matrix(j)) for j in range(matrices)]
        return torch.stack([one[0] for one in found]), torch.stack([one[-1] for one in found])

    def vectors() -> Ends:
        found = [torch.linalg.eigh(given.matrix(j)).eigenvalues for j in range(matrices)]
        return torch.stack([one[0] for one in found]), torch.stack([one[-1] for one in found])

    return [
        Way("formed S, torch.linalg.eigvalsh", values, matrices),
        Way("formed S, torch.linalg.eigh", vectors, matrices),
    ]


def lobpcg(given: Problem, matrices: int) -> Way:
    """Return torch.lobpcg on formed matrices, for S and for -S: at negative eigenvalues it stops too early."""

    def run(tol: float) -> Ends:
        torch.manual_seed(0)
        S = [given.matrix(j) for j in range(matrices)]
        low, high = (
            torch.stack([sign * torch.lobpcg(sign * one, k=1, niter=1000, tol=tol)[0][0] for one in S])
            for sign in (-1, 1)
        )
        return low, high

    return tuned(given, "formed S, torch.lobpcg, best", run, matrices)


def eigsh(given: Problem, matrices: int) -> list[Way]:
    """Return scipy's eigsh with a LinearOperator per matrix, both ends at once; nothing without scipy."""
    try:
        from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator
        from scipy.sparse.linalg import eigsh as solve
    except ImportError:
        return []
    X, C = given.X.numpy(), given.C.numpy()
    D = X.shape[1]
    starts = torch.randn(matrices, D, generator=torch.Generator().manual_seed(1)).numpy()

    def run(tol: float) -> Ends:
        found = []
        for j in range(matrices):
            c = C[:, j].copy()
            operator = LinearOperator((D, D), matvec=lambda v, c=c: (c * (X @ v)) @ X, dtype=X.dtype)
            try:
                found.append(
                    torch.tensor(solve(operator, 2, which="BE", v0=starts[j], tol=tol, return_eigenvectors=False))
                )
            except ArpackNoConvergence:
                found.append(torch.full((2,), torch.nan))
        values = torch.stack(found)
        return values.amin(-1), values.amax(-1)

    name = "scipy eigsh, LinearOperator"
    return [tuned(given, name, run, matrices, ACCURACY), tuned(given, f"{name}, best", run, matrices)]


def rmsprop(given: Problem) -> Way:
    """Return RMSprop with momentum 0.9 on the Rayleigh quotients of both ends, at its best rate.

    All filters share a batched product, ours. The error is looked at for free, which a user cannot do.
    """
    count, D = min(given.filters, 64), given.X.shape[1]
    C = given.C[:, :count].contiguous()
    signs = torch.tensor([1.0, -1.0])[:, None, None]

    def run(rate: float, steps: int, stop: bool = False) -> tuple[Ends, int]:
        V = torch.randn(count, D, generator=torch.Generator().manual_seed(2))
        V = F.normalize(V, dim=-1).repeat(2, 1, 1).requires_grad_()
        optimizer = torch.optim.RMSprop([V], lr=rate, momentum=0.9)
        # The gradient is of the order of the radius: the optimizer divides it out.
        for step in range(1, steps + 1):
            with torch.no_grad():
                unit = F.normalize(V, dim=-1)
                SV = s3d.splitting_matvec(given.X, C, unit, check_finite=False)
                quotients = (unit * SV).sum(-1)
                V.grad = signs * 2 * (SV - quotients[..., None] * unit) / V.norm(dim=-1, keepdim=True)
            if stop and given.is_solved((quotients[0], quotients[1]), ENOUGH):
                return (quotients[0], quotients[1]), step
            optimizer.step()
        return (quotients[0], quotients[1]), steps

    best, needed = RATES[0], MOST_STEPS + 1
    for rate in RATES:
        ends, steps = run(rate, min(needed, MOST_STEPS), stop=True)
        if given.is_solved(ends, ENOUGH) and steps < needed:
            best, needed = rate, steps
    if needed > MOST_STEPS:
        raise RuntimeError(f"RMSprop does not get there in {MOST_STEPS} steps")
    setting = f"{needed} steps, rate {best:g}"
    return Way("RMSprop on the Rayleigh quotient, best", lambda: run(best, needed)[0], count, setting)


def tuned(
    given: Problem, name: str, run: Callable[[float], Ends], matrices: int, loosest: float = TOLERANCES[0]
) -> Way:
    """Return the way with the loosest tolerance that is good enough."""
    for tol in TOLERANCES:
        if tol <= loosest and given.is_solved(run(tol)):
            return Way(name, partial(run, tol), matrices, f"tol {tol:g}")
    raise RuntimeError(f"{name} is not good enough at any tolerance")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--match", default="", help="run only problems whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns: dict[str, dict[str, str]] = {}
    for name, build in PROBLEMS.items():
        if options.match in name:
            given = build()
            few = 4 if given.X.shape[1] > 256 else 8
            scipy = eigsh(given, few)
            ways = [*ours(given), *dense(given, few), lobpcg(given, few // 2), *scipy, rmsprop(given)]
            columns[given.name] = measure(given, ways, options.rounds)
            print(given.name, columns[given.name], file=sys.stderr, flush=True)
            if not scipy:
                print("eigsh is not measured: scipy is missing", file=sys.stderr)
    print(f"| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for way in next(iter(columns.values()), {}):
        print(f"| {way} | {' | '.join(column[way] for column in columns.values())} |")


def measure(given: Problem, ways: Sequence[Way], rounds: int) -> dict[str, str]:
    """Return the time of every way over that of ours on rows, with its setting."""
    for way in ways:
        if not given.is_solved(way.run(), ENOUGH if way.name.startswith("RMSprop") else 1.0):
            raise RuntimeError(f"{way.name} is wrong")
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            times[way.name].append(seconds(way.run) * given.filters / way.matrices)
    cells = {}
    for way in ways:
        ratio = statistics.median(own / base for own, base in zip(times[way.name], times[BASE], strict=True))
        scaled = f"{way.matrices} of {given.filters}" if way.matrices < given.filters else ""
        remarks = ", ".join(remark for remark in (way.setting, scaled) if remark)
        cells[way.name] = f"{ratio:.2f} ({remarks})" if remarks else f"{ratio:.2f}"
    return cells


def seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
