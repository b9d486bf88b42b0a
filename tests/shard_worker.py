"""Processes that split and train a network together: python -m tests.shard_worker FOLDER.

For each number of processes, forked ones run all its cases: starting processes is slow.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.base.world import World, joined
from s3d_fast.capture.sharding import of_all_processes
from s3d_fast.growth.checkpoint import optimizer_tensors
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.models import DGCNN, MobileNetV1
from s3d_fast.operators import moments_all
from s3d_fast.records.record import Epoch
from tests.forked import launch

# Three processes get 3, 3 and 2 of them.
BATCHES = 8
# By number of processes: models and memory budgets. 0 means no budget; the others are too few bytes for all rows.
CASES = {
    2: [("mobilenet", 0), ("mobilenet", 130_000), ("dgcnn", 0), ("dgcnn", 90_000)],
    3: [("mobilenet", 0)],
    4: [("mobilenet", 0), ("dgcnn", 0)],
}


def case(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a model and data."""
    torch.manual_seed(0)
    if name == "mobilenet":
        model: nn.Module = MobileNetV1([8, 12, 20, 40], 10, stem_stride=1, strides=(1, 2, 1))
        batches = [(torch.randn(4, 3, 8, 8), torch.randint(10, (4,))) for _ in range(BATCHES)]
    else:
        model = DGCNN((6, 8), 5, k=4, embedding=16, hidden=(8,))
        batches = [(torch.randn(4, 16, 3), torch.randint(5, (4,))) for _ in range(BATCHES)]
    return model.eval(), batches


def split_and_train(name: str, world: World, budget: int) -> tuple[dict[str, Tensor], str]:
    """Split a model on this process's part of the data and train it for an epoch; return tensors by name, and the plan.

    Names begin with "size/", "spectrum/", "split/" (weights, buffers, momentum after the split) or "trained/" (the
    same after training); the two losses are "loss" and "trained_loss".
    """
    model, batches = case(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # All processes first take the same step, so that there is momentum to split.
    inputs, targets = batches[0]
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()

    graph = s3d.trace(model, inputs)
    mine = batches[world.rank :: world.size]
    captured = s3d.capture(model, F.cross_entropy, mine, graph, memory_budget=budget or None)
    operators = of_all_processes(captured, len(mine), world)
    assert (operators.stream is None) == (budget == 0)
    tensors = {"loss": torch.tensor(operators.loss, dtype=torch.float64)}
    for unit, operator in operators.items():
        size = operator.magnitude()
        assert size is not None
        tensors[f"size/{unit}"] = size
        V = torch.randn(operator.shape, generator=torch.Generator().manual_seed(3))
        if budget == 0:
            # Without a budget, every batch is a term of its own.
            (tensors[f"size/moments/{unit}"],) = moments_all([operator], [V])
    for solver in ("lanczos", "auto"):
        spectra = s3d.extremal_eigenpairs(operators, solver=solver, tol=1e-6)
        for unit, spectrum in spectra.items():
            tensors[f"spectrum/{solver}/{unit}/min"] = spectrum.lambda_min
            tensors[f"spectrum/{solver}/{unit}/max"] = spectrum.lambda_max
    plan = s3d.select(spectra, graph, m=2, c=1.3, fraction=0.35)
    s3d.apply_splits(model, plan, 0.01, optimizer)
    tensors |= state("split", model, optimizer)

    epochs: list[Epoch] = []
    # Every step waits for the gradients of all processes, so all must take the same number of steps.
    train = EpochTrainer(mine[: BATCHES // world.size], F.cross_entropy, 1, world=world)
    train(model, optimizer, 0, after_epoch=epochs.append)
    tensors |= state("trained", model, optimizer)
    tensors["trained_loss"] = torch.tensor([epoch.loss for epoch in epochs], dtype=torch.float64)
    return tensors, " ".join(f"{split.unit}:{split.neuron}:{split.copies}" for split in plan.splits)


def state(prefix: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of weights, buffers and momentum."""
    momentum, _ = optimizer_tensors(model, optimizer)
    return {f"{prefix}/{name}": value.clone().contiguous() for name, value in (model.state_dict() | momentum).items()}


def file(folder: Path, model: str, budget: int, rank: int) -> Path:
    """Return the path of a process's results."""
    return folder / f"{model}-{budget}-rank-{rank}.safetensors"


def run_cases(folder: Path) -> None:
    """Run all cases of a number of processes, as one of them; write the results."""
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as everyone:
        assert everyone.agree(7)
        assert not everyone.agree(everyone.rank)
        for name, budget in CASES[everyone.size]:
            found, chosen = split_and_train(name, everyone, budget)
            save_file(found, file(folder, name, budget, everyone.rank), metadata={"plan": chosen})


if __name__ == "__main__":
    torch.set_num_threads(1)
    # PyTorch imports modules on first use: import them once here instead of once in every child.
    split_and_train("mobilenet", World(), 0)
    for ranks in CASES:
        place = Path(sys.argv[1]) / f"ranks-{ranks}"
        place.mkdir()
        ended = launch(ranks, run_cases, place)
        if ended.report:
            sys.exit(f"{ranks} processes: {ended.report}")
