"""A run, read from the files in its folder; it may still be in progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3d_fast.records.record import EIGEN_STAGES, PhaseRecord
from s3d_fast.records.run_folder import RunFolder

# The methods whose networks are all trained from scratch.
FROM_SCRATCH = ("uniform", "full", "scratch")


@dataclass(frozen=True)
class Run:
    """A growth run, read from the files in its folder.

    Attributes:
        folder: the folder of the run.
        about: the content of run.json.
        phases: the phases in order; the last may be in progress. Numbers that the files do not tell are None.
        notes: sentences about problems with the files.
    """

    folder: Path
    about: dict[str, Any]
    phases: list[PhaseRecord]
    notes: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        return self.about["recipe"]

    @property
    def preset(self) -> str:
        return self.about["preset"]

    @property
    def method(self) -> str:
        return self.about["method"]

    @property
    def seed(self) -> int:
        return self.about["seed"]

    @property
    def settings(self) -> dict[str, Any]:
        return self.about["settings"]

    @property
    def is_grown(self) -> bool:
        """Whether every phase continues from the one before; some methods train every network from scratch."""
        return self.method not in FROM_SCRATCH

    @property
    def starts_trained(self) -> bool:
        """Whether the first phase has no training: the run started from a trained network."""
        return bool(self.about.get("start") or self.settings.get("trained"))

    @property
    def title(self) -> str:
        """The recipe and its preset, or the name of a network of one's own."""
        return f"{self.recipe} ({self.preset})" if self.preset else self.recipe

    def layer_name(self, unit: str) -> str:
        """Return the name of a unit; one that ends in a number, as in nn.Sequential, with the kind of its layer."""
        layer = self.about["layers"].get(unit)
        kind = layer.get("kind") if isinstance(layer, dict) else None
        return f"{unit} {kind}" if isinstance(kind, str) and unit.rpartition(".")[2].isdigit() else unit

    @property
    def choices(self) -> dict[str, Any]:
        """All choices except the seed: the settings, and other entries of run.json that change the results."""
        more = {name: self.about.get(name) for name in ("scratch", "precision", "sync_batchnorm")}
        # The paths in `start` and `like` differ from seed to seed: only whether they are set counts.
        more |= {name: True if self.about.get(name) else None for name in ("start", "like")}
        chosen = self.settings | {name: value for name, value in more.items() if value is not None}
        return {name: value for name, value in chosen.items() if name != "seed"}

    @property
    def variant(self) -> str:
        """The method and the numbers that belong to its name, such as "s3d c=1.3"."""
        # S2D always has c = 1, and the other methods have neither c nor m.
        names = {"s3d": ("c", "m"), "s2d": ("m",)}.get(self.method, ())
        shown = [
            name for name in names if self.settings.get(name) is not None and (name, self.settings[name]) != ("m", 2)
        ]
        return " ".join([self.method, *(f"{name}={self.settings[name]}" for name in shown)])

    @property
    def label(self) -> str:
        """The variant and the seed, such as "s3d c=1.3, seed 0"."""
        return f"{self.variant}, seed {self.seed}"


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not.

    Unknown fields are ignored. If a phase was recorded twice, as in a resumed run, the later record counts. A last line
    that was not written to its end is left out, and a note says so.

    Raises:
        FileNotFoundError: the folder, run.json or history.jsonl is missing.
        ValueError: a file has wrong content. The message says where, what was expected and what was found.
    """
    files = RunFolder(folder)
    if not files.path.is_dir():
        what = "is not a folder" if files.path.exists() else "does not exist"
        raise FileNotFoundError(f"{files.path} must be the folder of a run, and {what}")
    about = files.read_about()
    lines, notes = files.read_history()
    phases = {phase.index: phase for phase in lines}
    return Run(files.path, about, [phases[index] for index in sorted(phases)], notes)


def eigen_share(run: Run) -> float:
    """Return the share of splitting (`EIGEN_STAGES`) in all seconds of a run; NaN if no seconds are recorded."""
    return share_of_eigen_stages(run.phases)


def share_of_eigen_stages(phases: Sequence[PhaseRecord]) -> float:
    """Return the share of splitting (`EIGEN_STAGES`) in all seconds of some phases; NaN if none are recorded."""
    eigen = sum(phase.seconds.get(stage, 0.0) for phase in phases for stage in EIGEN_STAGES)
    total = sum(sum(phase.seconds.values()) for phase in phases)
    return eigen / total if total > 0 else math.nan


def main_metric(runs: Sequence[Run]) -> str | None:
    """Return the metric to show: accuracy if any run has it, else the first that was recorded, else None."""
    names = [name for run in runs for phase in run.phases for name in phase.metrics]
    return "accuracy" if "accuracy" in names else next(iter(names), None)


def training_compute(run: Run) -> list[float | None]:
    """Return what the network of every phase has cost to train: MACs of a forward pass times the samples trained on.

    For a grown network that is the sum over all phases so far; a network from scratch has its own phase alone. None if
    the record does not tell the samples.
    """
    found: list[float | None] = []
    before: float | None = 0.0
    for phase in run.phases:
        samples = samples_trained(run, phase)
        own = None if samples is None else float(phase.macs * samples)
        total = None if own is None or before is None else own + before
        found.append(total)
        before = total if run.is_grown else 0.0
    return found


def samples_trained(run: Run, phase: PhaseRecord) -> int | None:
    """Return the samples that a phase was trained on, each counted every time; None if the record does not tell."""
    if not phase.epochs:
        # A network that was already trained when the run started has no epochs in its first phase.
        return 0 if phase.index == 0 and run.starts_trained else None
    found = [epoch.samples for epoch in phase.epochs]
    return None if None in found else sum(count for count in found if count is not None)


def steps_trained(run: Run, phase: PhaseRecord) -> float | None:
    """Return the steps of training in a phase; None if the record does not tell samples or batch size."""
    size = run.settings.get("batch_size")
    samples = samples_trained(run, phase) if phase.epochs else None
    return samples / size if samples and isinstance(size, int) and size > 0 else None
