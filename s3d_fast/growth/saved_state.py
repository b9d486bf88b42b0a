"""The state of a run as a checkpoint holds it, checked in full before anything is changed by it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from s3d_fast.base.random_state import RandomState
from s3d_fast.growth import checkpoint
from s3d_fast.records.json_records import mapping, shown
from s3d_fast.records.record import Phase, read_phase


@dataclass(frozen=True)
class SavedState:
    """What a `Grower` continues from.

    Attributes:
        record: the record of the checkpoint; `checkpoint.restore` reads the sizes of layers from it.
        model, optimizer: tensors by name.
        groups: the optimizer's parameter groups.
        settings: of the run.
        history: the finished phases.
        unfinished: the phase in training and the random state to continue it with, if there is one.
        stopped: why growth has ended, or None.
    """

    record: Mapping[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    groups: Any
    settings: dict[str, Any]
    history: list[Phase]
    unfinished: tuple[Phase, RandomState] | None
    stopped: str | None

    def require_fit(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError unless the optimizer's state goes with the model's tensors in the same file."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.items()}
        checkpoint.require_optimizer_state(model, optimizer, self.optimizer, self.groups, shapes)


def state_of(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> SavedState:
    """Return the state in a checkpoint, from its tensors and its record; the path is for errors.

    Raises:
        ValueError: it is not the checkpoint of a run.
    """
    with checkpoint.naming(path):
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "random": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            if part not in parts:
                raise ValueError(f"it has a tensor {name!r}, which no checkpoint has")
            parts[part][rest] = tensor
        stopped, unfinished = record.get("stopped"), record.get("unfinished")
        if stopped is not None and not isinstance(stopped, str):
            raise ValueError(f"stopped must be a string or null, got {shown(stopped)}")
        history = record.get("history")
        if not isinstance(history, list):
            raise ValueError(f"history must be a list, got {shown(history)}")
        return SavedState(
            record=record,
            model=parts["model"],
            optimizer=parts["optimizer"],
            groups=record.get("groups"),
            settings=mapping("settings", record.get("settings")),
            history=[_phase("history", past) for past in history],
            unfinished=None
            if unfinished is None
            else (_phase("unfinished", unfinished), _random_state(parts["random"], record.get("random"))),
            stopped=stopped,
        )


def _phase(where: str, past: Any) -> Phase:
    record = read_phase(where, past)
    if any("epoch" not in epoch for epoch in past.get("epochs") or ()):
        raise ValueError(f"{where}: an epoch of phase {record.index} has no number")
    if any(epoch.seconds is None for epoch in record.epochs):
        raise ValueError(f"{where}: an epoch of phase {record.index} has no seconds")
    # What is null was left out or is not known, and an empty value of any kind is an empty collection.
    collections = {one.name for one in fields(Phase) if str(one.type).startswith(("dict", "list"))}
    empty = {name: getattr(record, name) for name in collections if not past.get(name)}
    return Phase.of({name: value for name, value in past.items() if value is not None} | empty)


def _random_state(tensors: dict[str, Tensor], plain: Any) -> RandomState:
    """Return the states of the generators if generators accept them."""
    try:
        torch.Generator().set_state(tensors["cpu"])
        version, internal, gauss = plain["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        name, keys, *rest = plain["numpy"]
        np.random.RandomState().set_state((name, np.array(keys, dtype=np.uint32), *rest))
    # What a generator raises depends on what it is given.
    except Exception as error:
        raise ValueError(f"random holds states that no generator accepts: {type(error).__name__}: {error}") from error
    return tensors, plain
