"""Reading the folder of a growth run: run.json, history.jsonl and the spectra of its splits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

EIGEN_STAGES = ("capture", "solve", "select", "split", "measure")
"""The stages of a phase that splitting costs; the others are training and evaluation."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of training; what was not recorded, or was not finite, is None."""

    epoch: int
    loss: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    samples: int | None = None


@dataclass(frozen=True)
class PhaseRecord:
    """One line of history.jsonl: a `growth.Phase` and its epochs. What was not recorded, or was not finite, is None."""

    index: int
    widths: dict[str, int]
    params: int
    macs: int
    metrics: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    split_loss: float | None = None
    predicted_change: float | None = None
    gains: dict[str, float] = field(default_factory=dict)
    new_filters: dict[str, int] = field(default_factory=dict)
    splits: int = 0
    negative: int = 0
    unconverged: int = 0
    batches: int = 0
    matvecs: int = 0
    memory: int = 0
    scratch: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    epochs: tuple[Epoch, ...] = ()

    @property
    def is_trained(self) -> bool:
        """Whether training was over when the line was written; otherwise the phase was in progress."""
        return bool(self.metrics) or "evaluate" in self.seconds

    @property
    def is_split(self) -> bool:
        """Whether the phase ended with a split."""
        return self.split_loss is not None or any(self.new_filters.values())

    @property
    def predicted(self) -> float | None:
        """The change of the loss that the split promised; None without a split, or if its method promises nothing."""
        return self.predicted_change if self.is_split and (self.predicted_change or any(self.gains.values())) else None

    @property
    def measured(self) -> float | None:
        """The change of the loss that the split brought."""
        return None if self.loss is None or self.split_loss is None else self.split_loss - self.loss


@dataclass(frozen=True)
class Run:
    """A growth run as its folder tells it.

    Attributes:
        folder: of the run.
        about: run.json.
        phases: in order; the last may have been in progress.
        notes: what was amiss with the files, in sentences.
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
        """Whether every phase goes on from the one before; the networks of "uniform" are trained from scratch."""
        return self.method != "uniform"

    @property
    def choices(self) -> dict[str, Any]:
        """All that was chosen but the seed: the settings, and what else of run.json changes the results."""
        more = {name: self.about.get(name) for name in ("scratch", "precision")}
        # Where a run began, and what it imitates, differ from seed to seed by their paths.
        more |= {name: True if self.about.get(name) else None for name in ("start", "like")}
        chosen = self.settings | {name: value for name, value in more.items() if value is not None}
        return {name: value for name, value in chosen.items() if name != "seed"}

    @property
    def variant(self) -> str:
        """The method and the numbers that belong to its name, such as "s3d c=1.3"."""
        # c = 1 is what S2D means, and the other methods have neither.
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

    Fields that are not known are ignored. If a phase was recorded twice, as by a run that was resumed, the later record
    counts. A last line that was not written to its end is left out, and a note says so.

    Raises:
        FileNotFoundError: the folder, run.json or history.jsonl is missing.
        ValueError: a file does not hold what it should; says where, what was expected and what was found.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be the folder of a run, and is not a folder")
    about = read_about(folder)
    lines, notes = _history(folder / "history.jsonl")
    phases = {phase.index: phase for phase in lines}
    return Run(folder, about, [phases[index] for index in sorted(phases)], notes)


def read_spectra(folder: Path, index: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return lambda_min and lambda_max, each (M,), of the filters of every unit before the split of a phase.

    Raises:
        FileNotFoundError: the phase has no spectra.
        ValueError: the file does not hold spectra.
    """
    path = folder / f"spectra-{index:03d}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} must be a safetensors file, but: {error}") from error
    spectra = {}
    for unit in dict.fromkeys(name.rpartition("/")[0] for name in sorted(tensors)):
        pair = [tensors.get(f"{unit}/{end}") for end in ("lambda_min", "lambda_max")]
        if any(values is None or values.ndim != 1 or values.dtype.kind != "f" for values in pair):
            raise ValueError(f"{path.name} must hold vectors lambda_min and lambda_max for {unit!r}")
        spectra[unit] = (np.asarray(pair[0], dtype=np.float64), np.asarray(pair[1], dtype=np.float64))
    return spectra


def eigen_share(run: Run) -> float:
    """Return the share of all seconds that splitting took, `EIGEN_STAGES`; NaN if none are recorded."""
    return share_of_eigen_stages(run.phases)


def share_of_eigen_stages(phases: Sequence[PhaseRecord]) -> float:
    """Return `eigen_share` of some phases."""
    eigen = sum(phase.seconds.get(stage, 0.0) for phase in phases for stage in EIGEN_STAGES)
    total = sum(sum(phase.seconds.values()) for phase in phases)
    return eigen / total if total > 0 else math.nan


def main_metric(runs: Sequence[Run]) -> str | None:
    """Return the metric to show: accuracy if any run has it, else the first that was recorded, else None."""
    names = [name for run in runs for phase in run.phases for name in phase.metrics]
    return "accuracy" if "accuracy" in names else next(iter(names), None)


def read_about(folder: Path) -> dict[str, Any]:
    """Return run.json: what the run is.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it does not hold what it should.
    """
    path = folder / "run.json"
    record = _mapping(path.name, _parse(path.name, _text(path.name, _bytes(path))))
    wanted: dict[str, tuple[type, Any]] = {
        "recipe": (str, None),
        "preset": (str, None),
        "method": (str, None),
        "seed": (int, None),
        "settings": (dict, {}),
        "environment": (dict, {}),
        "command": (list, []),
    }
    for name, (kind, default) in wanted.items():
        value = record.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            words = {str: "a string", int: "an integer", dict: "an object", list: "a list"}
            raise ValueError(f"{path.name}: {name} must be {words[kind]}, got {_shown(record, name)}")
        record[name] = value
    return record


def _history(path: Path) -> tuple[list[PhaseRecord], tuple[str, ...]]:
    *lines, rest = _bytes(path).split(b"\n")
    phases = [
        _phase(where, _mapping(where, _parse(where, _text(where, line))))
        for where, line in ((f"{path.name}, line {number}", line) for number, line in enumerate(lines, 1))
        if line.strip()
    ]
    if not rest.strip():
        return phases, ()
    # Whatever follows the last end of a line may be a whole record or the beginning of one.
    where = f"{path.name}, line {len(lines) + 1}"
    try:
        record = _parse(where, _text(where, rest))
    except ValueError:
        return phases, (f"The last line of {path.name} was not written to its end, and is left out.",)
    return [*phases, _phase(where, _mapping(where, record))], ()


def _phase(where: str, record: dict[str, Any]) -> PhaseRecord:
    epochs = record.get("epochs") or []
    if not isinstance(epochs, list):
        raise ValueError(f"{where}: epochs must be a list, got {_shown(record, 'epochs')}")
    return PhaseRecord(
        index=_count(where, record, "index"),
        widths=_counts(where, record, "widths"),
        params=_count(where, record, "params"),
        macs=_count(where, record, "macs"),
        metrics=_numbers(where, record, "metrics"),
        loss=_number(where, record, "loss"),
        split_loss=_number(where, record, "split_loss"),
        predicted_change=_number(where, record, "predicted_change"),
        gains=_numbers(where, record, "gains"),
        new_filters=_counts(where, record, "new_filters", {}),
        splits=_count(where, record, "splits", 0),
        negative=_count(where, record, "negative", 0),
        unconverged=_count(where, record, "unconverged", 0),
        batches=_count(where, record, "batches", 0),
        matvecs=_count(where, record, "matvecs", 0),
        memory=_count(where, record, "memory", 0),
        scratch=_count(where, record, "scratch", 0),
        seconds=_numbers(where, record, "seconds"),
        epochs=tuple(_epoch(f"{where}, epochs", number, epoch) for number, epoch in enumerate(epochs)),
    )


def _epoch(where: str, number: int, value: Any) -> Epoch:
    record = _mapping(where, value)
    return Epoch(
        epoch=_count(where, record, "epoch", number),
        loss=_number(where, record, "loss"),
        learning_rate=_number(where, record, "learning_rate"),
        seconds=_number(where, record, "seconds"),
        samples=None if record.get("samples") is None else _count(where, record, "samples"),
    )


def _number(where: str, record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}: {name} must be a number or null, got {_shown(record, name)}")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _count(where: str, record: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = record.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {name} must be an integer >= 0, got {_shown(record, name)}")
    return value


def _numbers(where: str, record: Mapping[str, Any], name: str) -> dict[str, float]:
    mapping = _mapping(f"{where}: {name}", record.get(name) or {})
    numbers = {key: _number(f"{where}, {name}", mapping, key) for key in mapping}
    return {key: number for key, number in numbers.items() if number is not None}


def _counts(where: str, record: Mapping[str, Any], name: str, default: Any = None) -> dict[str, int]:
    mapping = _mapping(f"{where}: {name}", default if record.get(name) is None else record[name])
    return {key: _count(f"{where}, {name}", mapping, key) for key in mapping}


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {'nothing' if value is None else repr(value)[:80]}")
    return value


def _parse(where: str, text: str) -> Any:
    try:
        # NaN and Infinity are not JSON, but Python writes them unless told otherwise.
        return json.loads(text, parse_constant=lambda constant: None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, but: {error}; got {text[:80]!r}") from error


def _text(where: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} must be UTF-8 text, but: {error}") from error


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} must be the folder of a run, and has no file {path.name}")
    return path.read_bytes()


def _shown(record: Mapping[str, Any], name: str) -> str:
    return repr(record[name])[:80] if name in record else "nothing"
