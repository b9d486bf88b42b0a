"""Measured against predicted loss changes of DGCNN's splits: python -m benchmarks.rebuilt_graphs.

A split moves the features of all points a little. This can change the neighbours that the next EdgeConv layer finds and
the winners of its maxima; the splitting matrix assumes that both stay the same. This measures the change of the loss
twice, with graphs rebuilt from the new features and with the graphs from before the split, on clouds of simple shapes.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.base.tables import text_table
from s3d_fast.models import DGCNN
from s3d_fast.network.edgeconv import EdgeConv, leaky

SEEDS = range(8)
STEPS = (0.03, 0.01, 0.003)
CLOUDS, POINTS = 64, 64


def shapes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return point clouds of noisy spheres, boxes, rings and rods, and their classes."""
    target = torch.arange(CLOUDS) % 4
    points = torch.randn(CLOUDS, POINTS, 3, dtype=torch.float64, generator=generator)
    sphere = F.normalize(points, dim=-1)
    box = points / points.abs().amax(-1, keepdim=True)
    ring = F.normalize(points * torch.tensor([1.0, 1, 0]), dim=-1)
    rod = points * torch.tensor([1.0, 0.1, 0.1])
    x = torch.stack([sphere, box, ring, rod])[target, torch.arange(CLOUDS)]
    return x + 0.05 * torch.randn(x.shape, dtype=x.dtype, generator=generator), target


@contextmanager
def same_graphs(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Make every EdgeConv layer, in copies of the model too, use the graph that this model builds on x."""
    search, graphs = EdgeConv.neighbours, []

    def remember(self: EdgeConv, features: Tensor) -> Tensor:
        graphs.append(search(self, features))
        return graphs[-1]

    EdgeConv.neighbours = remember  # type: ignore[method-assign]
    model(x)
    EdgeConv.neighbours = lambda self, features: graphs.append(graphs.pop(0)) or graphs[-1]  # type: ignore[method-assign]
    try:
        yield
    finally:
        EdgeConv.neighbours = search  # type: ignore[method-assign]


@torch.no_grad()
def change(model: nn.Module, plan: s3d.SplitPlan, eps: float, x: Tensor, y: Tensor) -> float:
    """Return the measured change of the loss by a split, divided by the predicted one."""
    grown = copy.deepcopy(model)
    s3d.apply_splits(grown, plan, eps)
    return float(F.cross_entropy(grown(x), y) - F.cross_entropy(model(x), y)) / plan.predicted_change(eps)


def trained(seed: int, activation: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network trained to classify the shapes, the clouds and their classes."""
    torch.manual_seed(seed)
    model = DGCNN((16, 16, 16), 4, k=8, embedding=32, hidden=(16,), activation=activation).double()
    x, y = shapes(torch.Generator().manual_seed(seed))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), x, y


def main() -> None:
    """Print measured / predicted changes of the loss for splits of the EdgeConv layers."""
    rows = [["activation", "eps", "graphs", "measured / predicted: median", "least", "greatest"]]
    for name, activation in (("SiLU", nn.SiLU), ("LeakyReLU", leaky)):
        found: dict[tuple[float, str], list[float]] = {}
        for seed in SEEDS:
            model, x, y = trained(seed, activation)
            graph = s3d.trace(model, x[:2])
            units = [unit for unit in graph.units if isinstance(model.get_submodule(unit), EdgeConv)]
            operators = s3d.capture(model, F.cross_entropy, [(x, y)], graph, units=units)
            plan = s3d.select(s3d.extremal_eigenpairs(operators, "exact"), graph, m=2, c=1.3, fraction=0.35)
            for eps in STEPS:
                found.setdefault((eps, "rebuilt"), []).append(change(model, plan, eps, x, y))
                with same_graphs(model, x):
                    found.setdefault((eps, "as before"), []).append(change(model, plan, eps, x, y))
        for (eps, graphs), ratios in found.items():
            figures = (statistics.median(ratios), min(ratios), max(ratios))
            rows.append([name, f"{eps:g}", graphs, *(f"{figure:.2f}" for figure in figures)])
    print(text_table(rows))


if __name__ == "__main__":
    main()
