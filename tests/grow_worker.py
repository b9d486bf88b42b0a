"""A small growth, and processes that die in the middle of it: python -m tests.grow_worker FOLDER.

Every scenario runs in forked processes, in a folder of its own. A line for each tells its name and the signals that
ended its processes.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import s3d_fast as s3d
from s3d_fast.growth import split_step as growth
from s3d_fast.models.mlp import MLP

PHASES = 3
EPOCHS = 3
CALLS = {"capture": "capture", "solve": "extremal_eigenpairs", "select": "select", "split": "apply_splits"}
WRITES = ("epoch", "network", "phase")
STAGES = [
    *((stage, phase) for phase in (0, 1) for stage in ("train", "evaluate", *CALLS)),
    *((f"{how}-{file}", phase) for phase in (0, 1, 2) for file in WRITES for how in ("half", "before", "after")),
    *((f"{how}-spectra", phase) for phase in (0, 1) for how in ("half", "before", "after")),
    ("train", 2),
    ("evaluate", 2),
]
# Where each run of a scenario dies: the first run, then the runs that resume it.
SCENARIOS = {f"{stage}-{phase}": [(stage, phase)] for stage, phase in STAGES} | {
    "again-and-again": [("half-phase", 0), ("train", 0), ("split", 1), ("half-network", 2), ("half-phase", 2)],
    "epoch-left": [("after-epoch", 1), ("half-epoch", 1)],
    # Each run gets one epoch further, except the runs that die while they write a file.
    "epoch-by-epoch": [("after-epoch", 0)] * EPOCHS
    + [("half-epoch", 1), ("after-epoch", 1), ("before-epoch", 1), ("half-epoch", 1), ("after-epoch", 1)]
    + [("half-phase", 1), ("after-epoch", 2), ("half-network", 2)],
}


def data(count: int = 48, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return points in the plane and their classes: three rings."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 2, generator=generator, dtype=dtype)
    return x, (x.norm(dim=1) / 0.9).long().clamp(max=2)


def accuracy(model: nn.Module) -> dict[str, float]:
    """Return the share of points that the model classifies correctly; the model stays in eval mode."""
    x, target = data()
    model.eval()
    with torch.no_grad():
        return {"accuracy": float((model(x).argmax(1) == target).double().mean())}


def grower(out: str | Path | None, **options: Any) -> s3d.Grower:
    """Return a Grower of a small network with BatchNorm, on shuffled data."""
    x, target = data()
    torch.manual_seed(1)
    model = MLP([2, 4, 4, 3], batchnorm=True)
    loader = DataLoader(TensorDataset(x, target), batch_size=16, shuffle=True)
    arguments: dict[str, Any] = {
        "train": s3d.EpochTrainer(loader, nn.functional.cross_entropy, epochs=EPOCHS),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        "phases": PHASES,
        "eps": 0.05,
        "evaluate": accuracy,
        "out": out,
        "seed": 3,
        **options,
    }
    # The example is as large as the batch: a capture of another size would export the model once more.
    return s3d.Grower(model, x[:24], nn.functional.cross_entropy, [(x[:24], target[:24])], **arguments)


def die() -> None:
    """Kill this process at once: nothing is flushed, nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(run: s3d.Grower, stage: str, phase: int) -> None:
    """Make this process die after a stage of a phase, or while it writes a file of that phase."""

    def then_die(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if len(run.history) == phase:
                die()
            return result

        return wrapped

    if stage in CALLS:
        setattr(growth, CALLS[stage], then_die(getattr(growth, CALLS[stage])))
    elif stage == "train":
        # Replace the method of the class: only an EpochTrainer, not a wrapper, is resumed after an epoch.
        s3d.EpochTrainer.__call__ = then_die(s3d.EpochTrainer.__call__)
    elif stage == "evaluate":
        run.evaluate = then_die(run.evaluate)
    else:
        how, _, file = stage.partition("-")
        arm_file(how, f"{file}-{phase:03d}")


def arm_file(how: str, name: str) -> None:
    """Make this process die halfway through writing a file, just before the file gets its name, or just after."""
    open_file, replace = builtins.open, os.replace

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = open_file(file, mode, *args, **kwargs)
        if name in str(file) and "w" in mode:
            return Half(stream)
        return stream

    def replaced(source: Any, target: Any) -> None:
        if name not in str(target):
            return replace(source, target)
        if how == "after":
            replace(source, target)
        return die()

    if how == "half":
        builtins.open = opened
    else:
        os.replace = replaced


class Half:
    """A file for writing that kills the process when half of the first write is on disk."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def write(self, content: bytes) -> int:
        """Write half of the content, then die."""
        self.stream.write(content[: len(content) // 2])
        self.stream.flush()
        die()
        return 0


def epochs_kept(deaths: list[tuple[str, int]]) -> int:
    """Return the number of epochs, over all phases, that are not trained again after the deaths of a scenario."""
    kept = 0
    for stage, phase in deaths:
        kept = max(kept, EPOCHS * phase)
        if not stage.endswith("-epoch"):
            kept = EPOCHS * (phase + 1)
        elif stage == "after-epoch":
            kept += 1
    return kept


def killed(folder: Path, stage: str, phase: int) -> None:
    """Run the growth until it dies."""
    run = grower(folder)
    arm(run, stage, phase)
    run.run(resume=True)


def kill_all(folder: Path) -> None:
    """Run every scenario in separate processes."""
    # PyTorch imports modules on first use: import them once here instead of once in every child.
    grower(None).run()
    for name, deaths in SCENARIOS.items():
        signals = [fork(folder / name, stage, phase) for stage, phase in deaths]
        print(name, *signals, flush=True)


def fork(folder: Path, stage: str, phase: int) -> int:
    """Run the growth in a child until it dies; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            killed(folder, stage, phase)
        finally:
            # Reached only if the growth did not die.
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_all(Path(sys.argv[1]))
