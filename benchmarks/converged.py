"""How often `converged` is wrong: `python -m benchmarks.converged --filters 300000 --out docs/reliability.json`.

Every filter is solved by every solver at every tolerance, each time from another random start. The truth is `eigvalsh`
of S, formed in float64 from the same float32 numbers by the reference backend. Two things are counted:

- a filter that counts as converged, with an eigenvalue that is off by more than tol times the true spectral radius;
- a filter, converged or not, with a residual below the true one of the vector returned, |S v - lambda v| in float64.

Descent on the Rayleigh quotient is slow: it gets the filters of one layer in forty.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.data import digits
from s3d_fast.operators import DenseOperator, PointwiseOperator, SplittingOperator
from s3d_fast.solvers import Spectrum

TOLERANCES = (1e-1, 1e-2, 1e-3)
# By name in the table: solvers and their options.
SOLVERS: dict[str, tuple[str, dict[str, float]]] = {
    "lanczos": ("lanczos", {}),
    "lanczos, delta 1e-4": ("lanczos", {"delta": 1e-4}),
    "auto": ("auto", {}),
    "exact": ("exact", {}),
    "rayleigh": ("rayleigh", {}),
}
# Of the filters of each family.
SHARES = {"trained": 0.35, "random": 0.35, "cancelling": 0.1, "adversarial": 0.2}
# One layer in so many is solved by descent as well.
RARE = 40
# Residuals are stored in float32.
SLACK = 1e-6

Layers = tuple[str, list[SplittingOperator]]
Counts = dict[str, float]


def trained(seed: int) -> Iterator[Layers]:
    """Yield the layers of small networks, after different numbers of training steps on digits or on made data."""
    torch.manual_seed(seed)
    data = digits().train
    images = data.inputs.float() / 8 - 1
    centres = torch.randn(10, 1, 8, 8)
    labels = torch.randint(10, (1500,))
    sources = {"digits": (images, data.labels), "made": (centres[labels] + torch.randn(1500, 1, 8, 8), labels)}
    networks = {f"{kind.__name__}-{act.__name__}": kind(act) for kind in (mlp, cnn) for act in (nn.ReLU, nn.SiLU)}
    graphs = {name: s3d.trace(model.eval(), images[:2]) for name, model in networks.items()}
    while True:
        for source, (x, y) in sources.items():
            for name, model in networks.items():
                for layer in model:
                    if hasattr(layer, "reset_parameters"):
                        layer.reset_parameters()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
                done = 0
                for steps in (0, 3, 10, 30, 100):
                    train(model, optimizer, x, y, steps - done)
                    done = steps
                    at = torch.randint(len(x), (150,))
                    captured = s3d.capture(model, F.cross_entropy, [(x[at], y[at])], graphs[name], rows_per_sample=16)
                    yield f"{name} {source}", list(captured.values())


def mlp(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Return two hidden layers, 48 and 32 wide."""
    first, second, head = nn.Linear(64, 48), nn.Linear(48, 32), nn.Linear(32, 10)
    return nn.Sequential(nn.Flatten(), first, activation(), second, activation(), head)


def cnn(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Return convolutions with 3 x 3 and 1 x 1 kernels, 8, 16 and 32 wide, with BatchNorms."""
    layers: list[nn.Module] = []
    for conv in (nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 32, 1)):
        layers += [conv, nn.BatchNorm2d(conv.out_channels), activation()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    """Take some training steps and leave the model in eval mode."""
    model.train()
    for _ in range(steps):
        at = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        optimizer.step()
    model.eval()


def random(seed: int) -> Iterator[Layers]:
    """Yield layers of random rows and coefficients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    while True:
        for rows, width in ((60, 40), (300, 16), (300, 64), (1000, 32), (1000, 96)):
            X, C = draw(rows, width), draw(rows, 128)
            columns = torch.logspace(0, -4, width)
            kinds = {
                "normal": (X, C),
                "rows not negative": (X.relu(), C),
                "rows with a common mean": (X + 3 * draw(width), C),
                "columns of sizes 1 to 1e-4": (X * columns, C),
                "coefficients of one sign": (X, C.abs()),
                "few coefficients": (X, C * (draw(rows, 128) > 1.5)),
            }
            for kind, pair in kinds.items():
                yield kind, [PointwiseOperator(*pair)]


def cancelling(seed: int) -> Iterator[Layers]:
    """Yield layers whose rows come twice, nearly equal, with opposite coefficients: S is the rest of large sums."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows, width in ((100, 12), (300, 24), (300, 48)):
            for apart in (1e-3, 1e-5, 0.0):
                X = torch.randn(rows, width, generator=generator)
                other = X + apart * torch.randn(rows, width, generator=generator)
                C = torch.randn(rows, 64, generator=generator)
                yield f"{apart:g} apart", [PointwiseOperator(torch.cat([X, other]), torch.cat([C, -C]))]


def adversarial(seed: int) -> Iterator[Layers]:
    """Yield matrices with spectra that hide their ends, diagonal or in a random basis."""
    generator = torch.Generator().manual_seed(seed)
    for turn in count():
        for width in (32, 64):
            for kind, values in spectra(100, width, generator).items():
                S = torch.diag_embed(values)
                if turn % 2:
                    Q = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator)).Q
                    S = Q @ S @ Q.T
                    S = (S + S.mT) / 2
                yield kind, [DenseOperator(S.float())]


def spectra(filters: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return spectra (filters, width) by name; most have few eigenvalues that matter and many that hide them."""

    def uniform() -> Tensor:
        return torch.rand(filters, width, dtype=torch.float64, generator=generator)

    def planted(bulk: Tensor, *ends: float) -> Tensor:
        return torch.cat([torch.tensor(ends, dtype=bulk.dtype).expand(filters, -1), bulk[:, len(ends) :]], 1)

    bulk, ramp, signs = 2 * uniform() - 1, torch.linspace(0, 1, width, dtype=torch.float64), 1 - 2 * (uniform() < 0.5)
    return {
        "uniform": bulk,
        "end at 1.1 of the bulk": planted(bulk, 1.1),
        "end at 1.5 of the bulk": planted(bulk, 1.5),
        "end at 10 times the bulk": planted(0.1 * bulk, 1.0),
        "both ends close to the bulk": planted(bulk, 1.02, -1.02),
        "close pair": planted(bulk, 1.05, 1.03),
        "second at 0.9": planted(0.1 * bulk, 1.0, 0.9),
        "small end behind a bulk": planted(uniform(), -0.05),
        "small end alone": planted(uniform() * 0.2 + 0.8, -0.02),
        "fast decay": 10 ** (-6 * ramp) * signs,
        "slow decay": 1 / (1 + width * ramp) * signs,
        "cluster": 1 + 1e-3 * uniform(),
        "two clusters and an end": planted(torch.where(signs > 0, 0.5, -0.5) + 1e-4 * bulk, 1.0),
        "gaps": 2.0 ** -(8 * uniform()).floor() * signs,
    }


FAMILIES = {"trained": trained, "random": random, "cancelling": cancelling, "adversarial": adversarial}


class Census:
    """The counts of all solves, by family, kind, solver and tolerance."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str, float], Counts] = defaultdict(lambda: defaultdict(float))
        self.seed = 0

    def solve(self, family: str, kind: str, operators: list[SplittingOperator], solver: str) -> None:
        """Solve layers together at every tolerance, and count what is wrong."""
        matrices = [formed(operator) for operator in operators]
        values = [torch.linalg.eigvalsh(S) for S in matrices]
        for tol in TOLERANCES:
            self.seed += 1
            generator = torch.Generator().manual_seed(self.seed)
            name, options = SOLVERS[solver]
            found = s3d.extremal_eigenpairs(operators, name, tol=tol, generator=generator, **options)
            counts = self.counts[family, kind, solver, tol]
            for S, true, spectrum in zip(matrices, values, found, strict=True):
                for name, number in judged(spectrum, S, true, tol).items():
                    counts[name] += number

    def table(self, kinds: bool = False) -> dict[str, dict[str, Counts]]:
        """Return the counts of every family, or of every kind, and solver, by tolerance."""
        sums: dict[str, dict[str, Counts]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
        for (family, kind, solver, tol), counts in self.counts.items():
            for name, number in counts.items():
                sums[f"{family}: {kind}, {solver}" if kinds else f"{family}, {solver}"][f"{tol:g}"][name] += number
        return {
            row: {tol: {name: round(number) for name, number in counts.items()} for tol, counts in one.items()}
            for row, one in sums.items()
        }


def formed(operator: SplittingOperator) -> Tensor:  # (M, D, D)
    """Return S, formed in float64 by the reference backend."""
    terms = operator.weighted_terms()
    return torch.stack([weight * term.in_dtype(torch.float64).dense("reference") for term, weight in terms]).sum(0)


def judged(spectrum: Spectrum, S: Tensor, values: Tensor, tol: float) -> Counts:
    """Return how many filters there are, have converged, and are wrong."""
    radius = values.abs().amax(-1)
    off, below = torch.zeros_like(radius), torch.zeros_like(radius, dtype=torch.bool)
    for value, vector, residual, true in (
        (spectrum.lambda_min, spectrum.v_min, spectrum.residual_min, values[:, 0]),
        (spectrum.lambda_max, spectrum.v_max, spectrum.residual_max, values[:, -1]),
    ):
        value, v = value.double(), vector.double()
        off = torch.maximum(off, (value - true).abs())
        error = (torch.einsum("mde,me->md", S, v) - value[:, None] * v).norm(dim=-1)
        below |= error * (1 - SLACK) > residual.double()
    return {
        "filters": len(values),
        "converged": int(spectrum.converged.sum()),
        "wrong eigenvalue": int((spectrum.converged & (off > tol * radius)).sum()),
        "wrong residual": int(below.sum()),
        "products": int(spectrum.matvecs.sum()),
    }


def main() -> None:
    """Run the census; print the kinds with faults, and store the sums."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--filters", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", default="", help="run only families whose name contains this")
    parser.add_argument("--out", type=Path, help="a JSON file whose entry `converged` is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    census = Census()
    for family, make in FAMILIES.items():
        if options.match in family:
            began, filters = time.process_time(), 0
            for number, (kind, operators) in enumerate(make(options.seed)):
                filters += sum(operator.shape[0] for operator in operators)
                for solver in SOLVERS:
                    if solver != "rayleigh" or number % RARE == 0:
                        census.solve(family, kind, operators, solver)
                if filters >= SHARES[family] * options.filters:
                    break
            print(f"{family}: {filters} filters, {time.process_time() - began:.0f} s", file=sys.stderr, flush=True)
    for row, one in census.table(kinds=True).items():
        print(row, json.dumps(one))
    for row, one in census.table().items():
        print(row, json.dumps(one))
    if options.out is not None:
        record = json.loads(options.out.read_text())
        record["converged"] = census.table()
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
