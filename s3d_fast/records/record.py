"""The record of a run: what happened in every phase, and in every epoch of its training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

from s3d_fast.records.json_records import READERS, count, mapping, read, shown

EIGEN_STAGES = ("capture", "solve", "select", "split", "measure")
"""The stages of a phase that belong to splitting; the others are training and evaluation."""


@dataclass(frozen=True, eq=False)
class Epoch(dict[str, Any]):
    """What happened in one epoch of training. It is also a dict, as in history.jsonl: `epoch["loss"]`.

    A trainer sets every field. What a file does not tell is None.

    Attributes:
        epoch: its number in the phase, from 0.
        loss: the mean training loss.
        learning_rate: the last learning rate of the epoch.
        seconds: how long it took.
        samples: how many samples all processes trained on.
        loss_scale: the factor on the loss in fp16; 1 in other precisions.
        gradient: the mean norm of the gradient, if a plateau of it may end the phase.
    """

    epoch: int
    loss: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    samples: int | None = None
    loss_scale: float = 1.0
    gradient: float | None = None

    def __post_init__(self) -> None:
        self.update(vars(self))


@dataclass
class PhaseRecord:
    """What is recorded of one phase of growth: training, and the split after it. What is not known is None.

    Attributes:
        index: the number of the phase, from 0.
        widths: the width of every unit during training.
        params: the number of all parameters of the model.
        macs: multiply-accumulates per sample of the layers that hold channels.
        metrics: what `evaluate` returned after training.
        loss: the loss on the batches for splitting, after training; not known in the last phase, which does not split.
        split_loss: the same loss after the split.
        predicted_change: eps^2 / 2 times the sum of the gains.
        gains: the sum of the gains of every unit's splits.
        new_filters: the number of new filters of every unit.
        splits: how many neurons were split.
        added: how many filters are new.
        removed: how many neurons were removed.
        slope: the sum of the slopes of the loss at the output weights of new filters.
        negative: how many of them got a copy with a negative weight; always 0 in S2D.
        unconverged: how many filters have eigenpairs that did not reach the tolerance.
        batches: how many batches all processes computed the split on.
        eps: the size of the split.
        relative: whether that is a share of the lengths of filters.
        kept: the share of the promised gain that splits have on other data.
        copies: where the copies of every split neuron stand after the split: [first, number], by unit.
        steps_to_part: after how many steps copies are as far apart as their filter is long, by the formula for gradient
            descent; the median.
        apart: how far apart copies of the split before this phase are when it ends, relative to their length; the
            median.
        tol: the tolerance of eigenpairs, relative to the spectral radius.
        sampling_error: the median standard error of eigenvalues over the batches, relative to the spectral radius.
        matvecs: how many products S v the slowest filter took.
        memory: bytes that the splitting operators held in memory, per process.
        scratch: bytes of their scratch file.
        seconds: the seconds of each stage.
        epochs: the epochs of training, if an `EpochTrainer` trained.
    """

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
    added: int = 0
    removed: int = 0
    slope: float = 0.0
    negative: int = 0
    unconverged: int = 0
    batches: int = 0
    eps: float | None = None
    relative: bool = False
    kept: float | None = None
    copies: dict[str, list[list[int]]] = field(default_factory=dict)
    steps_to_part: float | None = None
    apart: float | None = None
    tol: float | None = None
    sampling_error: float | None = None
    matvecs: int = 0
    memory: int = 0
    scratch: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A checkpoint holds epochs as plain data, perhaps with fields of another version.
        names = {one.name for one in fields(Epoch)}
        self.epochs = [
            epoch if isinstance(epoch, Epoch) else Epoch(**{name: epoch[name] for name in names & set(epoch)})
            for epoch in self.epochs
        ]

    @property
    def is_trained(self) -> bool:
        """Whether training is over; otherwise the phase is in progress."""
        return bool(self.metrics) or "evaluate" in self.seconds

    @property
    def was_selected(self) -> bool:
        """Whether the selection of splits has run, even if it found nothing to split."""
        return "select" in self.seconds

    @property
    def is_split(self) -> bool:
        """Whether the phase ended with a split."""
        return _is_known(self.split_loss) or any(self.new_filters.values())

    @property
    def predicted(self) -> float | None:
        """The predicted change of the loss; None without a split, or if the method predicts nothing."""
        promised = self.is_split and (self.predicted_change != 0 or any(self.gains.values()))
        return self.predicted_change if promised and _is_known(self.predicted_change) else None

    @property
    def measured(self) -> float | None:
        """The measured change of the loss; None if it is not known."""
        if not (_is_known(self.loss) and _is_known(self.split_loss)):
            return None
        return self.split_loss - self.loss


@dataclass
class Phase(PhaseRecord):
    """What happened in one phase of growth: training, and the split after it. A loss that is not known is NaN.

    `PhaseRecord` has the fields.
    """

    loss: float = math.nan
    split_loss: float = math.nan
    predicted_change: float = 0.0

    @classmethod
    def of(cls, past: Mapping[str, Any]) -> Phase:
        """Return the phase that a checkpoint holds as plain data, perhaps with fields of another version."""
        return cls(**{one.name: past[one.name] for one in fields(cls) if one.name in past})


def read_phase(where: str, value: Any) -> PhaseRecord:
    """Return a phase from a JSON object; an epoch without a number gets its place in the list.

    Raises:
        ValueError: a field has a wrong value. The message says where, what was expected and what was found.
    """
    return read(
        PhaseRecord,
        where,
        value,
        {**READERS, "list[Epoch]": _epochs, "bool": _truth, "dict[str, list[list[int]]]": _groups},
    )


def _truth(where: str, value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {name} must be true or false, got {shown(value)}")
    return value


def _groups(where: str, value: Any, name: str) -> dict[str, list[list[int]]]:
    place = f"{where}: {name}"
    found: dict[str, list[list[int]]] = {}
    for key, pairs in mapping(place, value).items():
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{place} must hold lists of pairs, got {shown(pairs)} for {key!r}")
        found[key] = [[count(place, part, key) for part in pair] for pair in pairs]
    return found


def _epochs(where: str, value: Any, name: str) -> list[Epoch]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {name} must be a list, got {shown(value)}")
    places = f"{where}, {name}"
    found = [{key: entry for key, entry in mapping(places, part).items() if entry is not None} for part in value]
    return [read(Epoch, places, {"epoch": place} | part) for place, part in enumerate(found)]


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
