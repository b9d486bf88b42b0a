"""Processes that grow a network together.

    python -m tests.distributed_worker deaths FOLDER    every case of DEATHS, in forked processes
    torchrun -m tests.distributed_worker grow FOLDER    one of several processes
    torchrun -m tests.distributed_worker elastic FOLDER    one of several processes; rank 1 dies once, in phase 1
    python -m tests.distributed_worker proposals FOLDER    new filters and removals, by one process and by two

First one process grows a network, in the folder "alone", and two processes, in "together". Then, in every case of
DEATHS, two processes grow a network until one of them dies, and some processes resume the run. A line for each tells
its stage and how the processes ended; the last line tells of two nodes with a folder each. All are forked from one, by
torchrun's agent, and have folders of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from s3d_fast import data, propose_filters, removal_losses, trace
from s3d_fast.base.world import World, joined
from s3d_fast.growth import split_step as growth
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.recipes import recipe
from s3d_fast.recipes.job import Job
from s3d_fast.recipes.running import run
from s3d_fast.records.record import Epoch, Phase
from s3d_fast.solvers.noise import COARSEST
from s3d_fast.splitting.new_filters import KINDS
from tests import grow_worker
from tests.forked import launch, launch_nodes

# The stage of phase 1 after which a process dies, its rank, and the number of processes that resume.
DEATHS = (("train", 1, 1), ("capture", 1, 3), ("solve", 0, 2), ("split", 1, 2), ("half-phase", 0, 2))

TINY = recipe("digits").with_settings(
    {
        "steps": 2,
        "epochs": 2,
        "widths": (3, 4, 5),
        "fraction": 0.5,
        "train_samples": 96,
        "test_samples": 50,
        "batch_size": 24,
        "split_samples": 48,
        "split_batch": 8,
        # Small enough that some layers are read from a scratch file.
        "memory_budget": "60KB",
    }
)


def arm(stage: str) -> None:
    """Make this process die in phase 1, after the given stage."""
    if stage in grow_worker.CALLS:
        name = grow_worker.CALLS[stage]
        original, calls = getattr(growth, name), []

        def counted(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            # Capture is also called for the loss after a split, and the solver for a finer tolerance.
            if options.get("units", True) != () and options.get("tol", COARSEST) == COARSEST:
                calls.append(name)
            # The first call of the solver only checks its options; every phase captures fresh batches too.
            if len(calls) == (3 if stage in ("solve", "capture") else 2):
                grow_worker.die()
            return result

        setattr(growth, name, counted)
    elif stage == "train":
        trained = EpochTrainer.__call__

        def dying(
            self: EpochTrainer, model: nn.Module, optimizer: torch.optim.Optimizer, phase: int, **rest: Any
        ) -> None:
            after = rest.pop("after_epoch")

            def after_epoch(epoch: Epoch) -> None:
                after(epoch)
                if phase == 1:
                    grow_worker.die()

            trained(self, model, optimizer, phase, **rest, after_epoch=after_epoch)

        EpochTrainer.__call__ = dying  # type: ignore[method-assign]
    elif stage != "none":
        how, _, file = stage.partition("-")
        grow_worker.arm_file(how, f"{file}-001")


def grow(folder: Path, world: World, resume: bool = True) -> list[Phase]:
    """Run the recipe; every process saves its weights at the end of every phase."""
    weights: dict[str, torch.Tensor] = {}
    trained = EpochTrainer.__call__

    def watched(self: EpochTrainer, model: nn.Module, *arguments: Any, **rest: Any) -> None:
        trained(self, model, *arguments, **rest)
        for name, value in model.state_dict().items():
            weights[f"{len(weights)}/{name}"] = value.clone()

    EpochTrainer.__call__ = watched  # type: ignore[method-assign]
    try:
        history = run(Job(TINY, data.digits(), out=folder, device="cpu", world=world), resume=resume)
    finally:
        EpochTrainer.__call__ = trained  # type: ignore[method-assign]
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / f"rank-{world.rank}.safetensors")
    return history


def grow_in_one_process(folder: Path, stage: str = "none", rank: int = -1) -> None:
    """Grow as one of the processes of a run; the one with the given rank dies after the given stage of phase 1."""
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as everyone:
        if everyone.rank == rank:
            arm(stage)
        grow(folder, everyone)


def die_and_resume(folder: Path) -> None:
    """Run every case of DEATHS, after a whole run in this process and one in two others."""
    grow_in_one_process(folder / "alone")
    print(json.dumps({"stage": "none", "together": asdict(launch(2, grow_in_one_process, folder / "together"))}))
    for stage, rank, ranks_after in DEATHS:
        died = launch(2, grow_in_one_process, folder / stage, stage, rank)
        phases = len(list((folder / stage).glob("phase-*.safetensors")))
        resumed = launch(ranks_after, grow_in_one_process, folder / stage)
        print(json.dumps({"stage": stage, "died": asdict(died), "phases": phases, "resumed": asdict(resumed)}))
    print(json.dumps({"stage": "nodes", **on_two_nodes(folder)}))


def grow_and_die_once(folder: Path) -> None:
    """Grow without being told to resume; the second process dies in phase 1, but not after a restart."""
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as everyone:
        if everyone.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            arm("capture")
        grow(folder, everyone, resume=False)


def on_two_nodes(folder: Path) -> dict[str, Any]:
    """Grow on two nodes with a folder each: at once, and with a death, after which the nodes change places."""
    a, b, c, d = (folder / name for name in "abcd")
    told: dict[str, Any] = {"whole": launch_nodes(grow_in_one_process, [(a,), (b,)])}
    told["died"] = launch_nodes(grow_in_one_process, [(c, "capture", 1), (d, "capture", 1)])
    # Which node is the first is torchrun's choice.
    first, second = (c, d) if c.exists() else (d, c)
    told["only one has files"] = not second.exists()
    shutil.move(first, second)
    told["resumed"] = launch_nodes(grow_in_one_process, [(c,), (d,)])
    return told


def propose_in_one_process(folder: Path) -> None:
    """Propose filters of every kind and estimate removals, on this process's part of four batches; save all of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)),
    ).double()
    batches = [(torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)) for _ in range(4)]
    for x, _ in batches:
        model(x)
    model.eval()
    graph = trace(model, batches[0][0][:2])
    found: dict[str, torch.Tensor] = {}
    with joined(torch.device("cpu")) as world:
        own = batches[world.rank :: world.size]
        for kind in KINDS:
            proposed = propose_filters(model, nn.functional.mse_loss, own, graph, kind=kind, number=3, world=world)
            for name, one in proposed.items():
                found |= {f"{kind}/{name}/theta": one.theta, f"{kind}/{name}/slope": one.slope}
                found |= {f"{kind}/{name}/{buffer}": values for buffer, values in one.statistics.items()}
        found |= removal_losses(model, nn.functional.mse_loss, own, graph, world=world)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in found.items()}
        save_file(tensors, folder / f"{world.rank}-of-{world.size}.safetensors")


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    if command == "grow":
        grow_in_one_process(place)
    elif command == "elastic":
        grow_and_die_once(place)
    elif command == "proposals":
        propose_in_one_process(place)
        print(launch(2, propose_in_one_process, place).report)
    else:
        die_and_resume(place)
