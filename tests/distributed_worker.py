"""One of several processes that grow a network together: torchrun -m tests.distributed_worker FOLDER STAGE RANK.

The process with the given rank dies in phase 1 after the given stage; with the stage "none" all processes finish.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from s3d_fast import data
from s3d_fast.base.world import World, joined
from s3d_fast.growth import split_step as growth
from s3d_fast.growth.record import Epoch, Phase
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.recipes import recipe
from s3d_fast.recipes.running import Job, run
from tests import grow_worker

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
            # Capture is also called for the loss after a split.
            if options.get("units", True) != ():
                calls.append(name)
            # The first call of the solver only checks its options.
            if len(calls) == (3 if stage == "solve" else 2):
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


def grow(folder: Path, world: World) -> list[Phase]:
    """Run the recipe; every process saves its weights at the end of every phase."""
    weights: dict[str, torch.Tensor] = {}
    trained = EpochTrainer.__call__

    def watched(self: EpochTrainer, model: nn.Module, *arguments: Any, **rest: Any) -> None:
        trained(self, model, *arguments, **rest)
        for name, value in model.state_dict().items():
            weights[f"{len(weights)}/{name}"] = value.clone()

    EpochTrainer.__call__ = watched  # type: ignore[method-assign]
    history = run(Job(TINY, data.digits(), out=folder, device="cpu", world=world), resume=True)
    save_file(weights, folder / f"rank-{world.rank}.safetensors")
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as everyone:
        if everyone.rank == int(sys.argv[3]):
            arm(sys.argv[2])
        grow(Path(sys.argv[1]), everyone)
