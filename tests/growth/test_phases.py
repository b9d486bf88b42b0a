"""Phases that end when they should: unequal lengths, one schedule over the run, and plateaus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import s3d_fast as s3d
from s3d_fast import recipes
from s3d_fast.growth.plateau import Plateau
from s3d_fast.records.record import Epoch
from tests import grow_worker


def trainer(epochs: int | list[int], **options: Any) -> s3d.EpochTrainer:
    loader = DataLoader(TensorDataset(*grow_worker.data()), batch_size=16, shuffle=True)
    return s3d.EpochTrainer(loader, cross_entropy, epochs, **options)


def falling(*losses: float, gradient: float | None = None) -> list[Epoch]:
    return [Epoch(place, loss, gradient=gradient) for place, loss in enumerate(losses)]


def test_every_phase_has_its_own_epochs() -> None:
    history = grow_worker.grower(None, train=trainer([1, 3]), phases=4).run()
    assert [len(phase.epochs) for phase in history] == [1, 3, 3, 3]


def test_one_schedule_over_the_run(tmp_path: Path) -> None:
    schedule = s3d.schedules.cosine(6)
    whole = grow_worker.grower(None, train=trainer([1, 2, 3], schedule=schedule, over_run=True))
    rates = [epoch.learning_rate for phase in whole.run() for epoch in phase.epochs]
    # The rate of the last of three batches of every epoch.
    assert rates == pytest.approx([0.02 * schedule(epoch + 2 / 3) for epoch in range(6)])
    options = {"train": trainer([1, 2, 3], schedule=schedule, over_run=True)}
    grow_worker.grower(tmp_path, phases=2, **options).run()
    resumed = grow_worker.grower(tmp_path, **options)
    resumed.run(resume=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_plateau_of_the_loss() -> None:
    plateau = Plateau(0.1, patience=2)
    assert not plateau.is_reached(falling(1.0, 0.99))
    assert not plateau.is_reached(falling(1.0, 0.95, 0.85))
    assert plateau.is_reached(falling(1.0, 0.99, 0.95))
    assert plateau.is_reached(falling(0.5, 0.2, 0.3, 0.19))
    assert not plateau.is_reached(falling(-1.0, -1.0, -1.2))


def test_a_plateau_of_the_gradient() -> None:
    plateau = Plateau(None, gradient=0.5)
    assert not plateau.is_reached([])
    assert not plateau.is_reached(falling(1.0, 1.0, 1.0, 1.0, 1.0, gradient=0.6))
    assert plateau.is_reached(falling(1.0, gradient=0.5))


def test_phases_end_at_a_plateau_and_resume_there(tmp_path: Path) -> None:
    plateau = Plateau(0.2, patience=2)
    whole = grow_worker.grower(None, train=trainer(30, plateau=plateau))
    history = whole.run()
    counts = [len(phase.epochs) for phase in history]
    assert all(3 <= count < 30 for count in counts)
    for phase in history:
        assert plateau.is_reached(phase.epochs)
        assert not plateau.is_reached(phase.epochs[:-1])
    grow_worker.grower(tmp_path, phases=2, train=trainer(30, plateau=plateau)).run()
    resumed = grow_worker.grower(tmp_path, train=trainer(30, plateau=plateau))
    assert [len(phase.epochs) for phase in resumed.run(resume=True)] == counts


def test_gradients_are_recorded_where_they_end_a_phase() -> None:
    history = grow_worker.grower(None, train=trainer(3, plateau=Plateau(None, 1e-9)), phases=1).run()
    assert all(epoch.gradient is not None and epoch.gradient > 0 for epoch in history[0].epochs)
    history = grow_worker.grower(None, train=trainer(5, plateau=Plateau(None, 1e9)), phases=1).run()
    assert len(history[0].epochs) == 1


@pytest.mark.parametrize("make", [lambda: Plateau(None), lambda: Plateau(-1.0), lambda: Plateau(0.1, patience=0)])
def test_bad_plateaus(make: Any) -> None:
    with pytest.raises(ValueError, match=r"improvement|patience"):
        make()


def test_bad_epochs() -> None:
    for epochs in ([], [1, 0], 0):
        with pytest.raises(ValueError, match="epochs"):
            trainer(epochs)


def test_recipes_have_these_settings() -> None:
    digits = recipes.recipe("digits", "cpu")
    changed = digits.with_settings({"epochs": (1, 1, 4), "steps": 2, "schedule_over": "run"})
    assert changed.all_epochs == 6
    assert [changed.epochs_of(phase) for phase in range(4)] == [1, 1, 4, 4]
    assert changed.with_settings(changed.as_settings()) == changed
    assert changed.with_settings({"plateau": 0.02}).plateaus() == Plateau(0.02)
    with pytest.raises(ValueError, match="schedule_over"):
        digits.with_settings({"epochs": (1, 1, 4), "steps": 2, "schedule": "cosine"})
    for name, value in (("eps", "relative:x"), ("new_filters", "best"), ("epochs", (1, 0))):
        with pytest.raises(ValueError, match=f"{name}|{value}"):
            digits.with_settings({name: value})
    assert digits.with_settings({"eps": "relative:0.3", "new_filters": "firefly"}).eps == "relative:0.3"
