"""Does a better S choose better neurons? python -m benchmarks.choice --data cifar100.npz.

A ReLU MobileNetV1 (the network of `s3d-fast grow cifar100-mobilenet --preset cpu`) is trained on CIFAR-100. Then 35% of
its filters are split: those that the paper's S chooses, those that the exact S chooses, and random ones with the exact
S's own optimal splits. The table has the true change of the loss on test images, which neither S has seen.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast import data, recipes
from s3d_fast.base.tables import text_table

# The floor of the bandwidth of kinks that `Grower` uses.
FLOOR = 0.02
# The size of a step, and whether it is relative to the filters.
STEPS = ((0.01, False), (0.1, True))


def trained(dataset: data.Dataset, seed: int, epochs: int, samples: int) -> nn.Module:
    """Return the recipe's first network after training."""
    recipe = recipes.recipe("cifar100-mobilenet", "cpu")
    torch.manual_seed(seed)
    model = recipe.network(recipe.widths, dataset.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for step, (x, y) in enumerate(dataset.train.batches(recipe.batch_size, train=True)):
            if step * recipe.batch_size >= samples:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def loss(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss over batches."""
    return statistics.fmean(float(F.cross_entropy(model(x), y)) for x, y in batches)


def change(model: nn.Module, plan: s3d.SplitPlan, eps: float, fresh: list[tuple[Tensor, Tensor]]) -> float:
    """Return the true change of the loss on fresh data."""
    grown = copy.deepcopy(model)
    s3d.apply_splits(grown, plan, eps)
    return loss(grown, fresh) - loss(model, fresh)


def plans(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], eps: float, relative: bool, seed: int
) -> dict[str, s3d.SplitPlan]:
    """Return the splits that each S chooses, and random ones."""
    graph = s3d.trace(model, batches[0][0][:2])
    units = [unit for unit in graph.units if unit.startswith("blocks")]
    found: dict[str, s3d.SplitPlan] = {}
    every: s3d.SplitPlan | None = None
    for kind in ("paper", "exact"):
        options: dict[str, Any] = {"curvature": kind, "eps": eps, "relative": relative, "floor": FLOOR, "units": units}
        spectra = s3d.extremal_eigenpairs(s3d.capture(model, F.cross_entropy, batches, graph, **options))
        found[kind] = s3d.select(spectra, graph, m=2, c=1.3, fraction=0.35)
        every = s3d.select(spectra, graph, m=2, c=1.3)
    assert every is not None
    count = len(found["exact"])
    splits = random.Random(seed).sample(list(every.splits), min(count, len(every)))
    found["random"] = s3d.SplitPlan(graph, splits)
    return {kind: plan.relative_to(model) if relative else plan for kind, plan in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=50_000, help="training images per epoch")
    options = parser.parse_args()
    dataset = data.cifar100(options.data)
    fresh = [(x, y) for x, y in dataset.test.batches(500)][:10]
    rows = [["seed", "step", "predicted by paper", "paper", "predicted by exact", "exact", "random", "chosen alike"]]
    for seed in range(options.seeds):
        model = trained(dataset, seed, options.epochs, options.samples)
        torch.manual_seed(1000 + seed)
        batches = list(dataset.train.sample(2048, 256))
        print(f"seed {seed}: loss on fresh images {loss(model, fresh):.3f}", flush=True)
        for eps, relative in STEPS:
            made = plans(model, batches, eps, relative, seed)
            chosen = [{(split.unit, split.neuron) for split in made[kind].splits} for kind in ("paper", "exact")]
            alike = len(chosen[0] & chosen[1]) / max(1, len(chosen[1]))
            cells = []
            for kind in ("paper", "exact"):
                cells += [f"{made[kind].predicted_change(eps):.2e}", f"{change(model, made[kind], eps, fresh):.2e}"]
            cells.append(f"{change(model, made['random'], eps, fresh):.2e}")
            rows.append([str(seed), f"{eps:g}{' |theta|' if relative else ''}", *cells, f"{alike:.0%}"])
            print(" | ".join(rows[-1]), flush=True)
    print(text_table(rows))


if __name__ == "__main__":
    main()
