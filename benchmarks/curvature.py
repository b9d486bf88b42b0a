"""Measured against predicted changes of the loss for every kind of chain: python -m benchmarks.curvature.

Small networks, random and trained, on scikit-learn's digits (DGCNN: on clouds of simple shapes), in float64. Every unit
is split alone, with m = 2 and c = 1.3, on the data that S was computed from. The table has the median over units and
seeds of measured over predicted change, for the paper's curvature and for the exact one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import s3d_fast as s3d
from benchmarks.rebuilt_graphs import same_graphs, shapes
from s3d_fast.base.tables import text_table
from s3d_fast.capture.curvature import FLOOR
from s3d_fast.models import DGCNN, MLP

STEPS = (0.003, 0.01, 0.03)
WIDTH = 8
Act = Callable[[], nn.Module]


class Block(nn.Module):
    """An inverted residual (MobileNetV2), perhaps with squeeze and excitation."""

    def __init__(self, act: Act, excite: bool) -> None:
        super().__init__()
        wide = 2 * WIDTH
        self.expand = nn.Sequential(nn.Conv2d(WIDTH, wide, 1, bias=False), nn.BatchNorm2d(wide), act())
        self.deep = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.norm, self.act = nn.BatchNorm2d(wide), act()
        self.down, self.up = (nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)) if excite else (None, None)
        self.project = nn.Sequential(nn.Conv2d(wide, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.deep(self.expand(x))))
        if self.down is not None and self.up is not None:
            h = h * torch.sigmoid(self.up(self.act(self.down(h.mean((2, 3), keepdim=True)))))
        return x + self.project(h)


class Residual(nn.Module):
    """A block of a ResNet: its stream passes the last activation."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(WIDTH, act), nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH))
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.body(x))


class Feedforward(nn.Module):
    """A transformer block with a gated feed-forward layer."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.gate, self.value, self.out = nn.Linear(16, 2 * WIDTH), nn.Linear(16, 2 * WIDTH), nn.Linear(2 * WIDTH, 16)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = self.norm2(x)
        return x + self.out(self.act(self.gate(y)) * self.value(y))


class Pool(nn.Module):
    """The mean over all positions or tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2) if x.dim() == 4 else x.mean(1)


def _conv(fan_in: int, act: Act, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(fan_in, WIDTH, 3, stride, 1), nn.BatchNorm2d(WIDTH), act()]


def _separable(act: Act, stride: int) -> list[nn.Module]:
    deep = nn.Conv2d(WIDTH, WIDTH, 3, stride, 1, groups=WIDTH, bias=False)
    point = nn.Conv2d(WIDTH, WIDTH, 1, bias=False)
    return [deep, nn.BatchNorm2d(WIDTH), act(), point, nn.BatchNorm2d(WIDTH), act()]


NETWORKS: dict[str, Callable[[Act], nn.Module]] = {
    "MLP": lambda act: nn.Sequential(nn.Flatten(), MLP((64, 16, 16, 10), activation=act)),
    "VGG": lambda act: nn.Sequential(
        *_conv(1, act), nn.MaxPool2d(2), *_conv(WIDTH, act), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, 10)
    ),
    "ResNet": lambda act: nn.Sequential(*_conv(1, act), Residual(act), Residual(act), Pool(), nn.Linear(WIDTH, 10)),
    "MobileNetV1": lambda act: nn.Sequential(
        *_conv(1, act), *_separable(act, 1), *_separable(act, 2), Pool(), nn.Linear(WIDTH, 10)
    ),
    "MobileNetV2": lambda act: nn.Sequential(
        *_conv(1, act), Block(act, False), Block(act, False), act(), Pool(), nn.Linear(WIDTH, 10)
    ),
    "SE": lambda act: nn.Sequential(*_conv(1, act), Block(act, True), act(), Pool(), nn.Linear(WIDTH, 10)),
    "gated transformer": lambda act: nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(8, 16), Feedforward(act), Feedforward(act), Pool(), nn.Linear(16, 10)
    ),
    "DGCNN": lambda act: DGCNN((8, 8), 4, k=8, embedding=16, hidden=(8,), activation=act),
}


def data(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of a network, and their classes."""
    if name == "DGCNN":
        return shapes(torch.Generator().manual_seed(seed))
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float64)[:800, None] / 8 - 1
    return x, torch.tensor(digits.target)[:800]


def prepared(name: str, act: Act, seed: int, train: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network in eval mode, after 60 steps of training if asked, and its data."""
    torch.manual_seed(seed)
    model = NETWORKS[name](act).double()
    x, y = data(name, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if train else 0.0)
    for step in range(60 if train else 10):
        batch = torch.arange(step * 100, step * 100 + 100) % len(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model.eval(), x, y


def ratios(model: nn.Module, x: Tensor, y: Tensor, eps: float, curvature: str, held: bool, floor: float) -> list[float]:
    """Return measured over predicted change of the loss, for the split of every unit alone."""
    graph = s3d.trace(model, x[:2])
    operators = s3d.capture(model, F.cross_entropy, [(x, y)], graph, eps=eps, curvature=curvature, floor=floor)
    spectra = s3d.extremal_eigenpairs(operators, tol=1e-3)
    found = []
    for unit, spectrum in spectra.items():
        plan = s3d.select({unit: spectrum}, graph, m=2, c=1.3)
        if not len(plan):
            continue
        grown = copy.deepcopy(model)
        s3d.apply_splits(grown, plan, eps)
        context: Any = same_graphs(model, x) if held else nullcontext()
        with context, torch.no_grad():
            change = float(F.cross_entropy(grown(x), y) - F.cross_entropy(model(x), y))
        found.append(change / plan.predicted_change(eps))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3, help="networks of every kind; default: %(default)s")
    parser.add_argument("--floor", type=float, default=FLOOR, help="as for capture; default: %(default)s")
    options = parser.parse_args()
    rows = [["network", "activation", "weights", *(f"{kind} {eps:g}" for kind in ("paper", "exact") for eps in STEPS)]]
    for name in options.only:
        for activation, act in (("SiLU", nn.SiLU), ("ReLU", nn.ReLU)):
            for train in (False, True):
                for held in (False, True) if name == "DGCNN" else (False,):
                    cells = []
                    for kind in ("paper", "exact"):
                        for eps in STEPS:
                            every = [
                                ratio
                                for seed in range(options.seeds)
                                for ratio in ratios(*prepared(name, act, seed, train), eps, kind, held, options.floor)
                            ]
                            cells.append(f"{statistics.median(every):.2f}" if every else "-")
                    words = name + (", graphs held" if held else ", graphs rebuilt" if name == "DGCNN" else "")
                    rows.append([words, activation, "trained" if train else "random", *cells])
                    print(" | ".join(rows[-1]), flush=True)
    print(text_table(rows))


if __name__ == "__main__":
    main()
