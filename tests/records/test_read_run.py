"""What a user gets from a run: the history of a Grower, and the same phases read from their files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import s3d_fast as s3d
from s3d_fast import report

EPOCH_FIELDS = {"epoch", "loss", "learning_rate", "seconds", "samples", "loss_scale", "gradient"}


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[s3d.Phase], Path]:
    """The history and the folder of a run of two phases with two epochs each."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("grown")
    batches = [(torch.randn(20, 3), torch.randn(20, 2)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2))
    grower = s3d.Grower(
        model,
        torch.randn(2, 3),
        mse_loss,
        batches,
        s3d.EpochTrainer(batches, mse_loss, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        phases=2,
        eps=0.01,
        selection={"m": 2, "c": 2.0, "fraction": 0.5},
        out=folder,
    )
    return grower.run(), folder


def test_a_history_has_nan_where_nothing_was_split(grown: tuple[list[s3d.Phase], Path]) -> None:
    split, last = grown[0]
    assert math.isfinite(split.loss)
    assert math.isfinite(split.split_loss)
    assert split.predicted_change < 0
    assert math.isnan(last.loss)
    assert math.isnan(last.split_loss)
    assert last.predicted_change == 0


def test_epochs_of_a_history_are_dicts(grown: tuple[list[s3d.Phase], Path]) -> None:
    for phase in grown[0]:
        assert all(isinstance(epoch, dict) and set(epoch) == EPOCH_FIELDS for epoch in phase.epochs)
        assert json.loads(json.dumps(phase.epochs)) == phase.epochs == asdict(phase)["epochs"]
        assert [epoch["epoch"] for epoch in phase.epochs] == [0, 1]
        assert [epoch["samples"] for epoch in phase.epochs] == [40, 40]


def test_a_run_that_is_read_has_none_for_what_is_not_known(grown: tuple[list[s3d.Phase], Path]) -> None:
    history, folder = grown
    split, last = report.read_run(folder).phases
    assert (split.loss, split.split_loss) == (history[0].loss, history[0].split_loss)
    assert (last.loss, last.split_loss, last.predicted, last.measured) == (None, None, None, None)
    assert split.measured == history[0].split_loss - history[0].loss
    assert all(isinstance(phase, report.PhaseRecord) for phase in (split, last))


def test_epochs_of_a_run_that_is_read_have_attributes(grown: tuple[list[s3d.Phase], Path]) -> None:
    history, folder = grown
    for phase, past in zip(report.read_run(folder).phases, history, strict=True):
        assert [epoch.loss for epoch in phase.epochs] == [epoch["loss"] for epoch in past.epochs]
        assert [epoch.epoch for epoch in phase.epochs] == [0, 1]


def test_epochs_of_a_run_that_is_read_are_dicts_too(grown: tuple[list[s3d.Phase], Path]) -> None:
    history, folder = grown
    for phase, past in zip(report.read_run(folder).phases, history, strict=True):
        assert json.loads(json.dumps(phase.epochs)) == past.epochs


def test_null_and_missing_numbers_of_a_file_are_none(grown: tuple[list[s3d.Phase], Path], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text((grown[1] / "run.json").read_text())
    record = {"index": 0, "widths": {"0": 4}, "params": 26, "macs": 20, "loss": None, "epochs": [{"loss": None}, {}]}
    (tmp_path / "history.jsonl").write_text(json.dumps(record) + "\n")
    (phase,) = report.read_run(tmp_path).phases
    assert (phase.loss, phase.split_loss, phase.predicted_change) == (None, None, None)
    for epoch in phase.epochs:
        assert (epoch.loss, epoch.learning_rate, epoch.seconds, epoch.samples) == (None, None, None, None)


def test_a_record_made_by_hand_knows_nothing_more() -> None:
    record = report.PhaseRecord(index=0, widths={"a": 1}, params=2, macs=3)
    assert (record.loss, record.split_loss, record.predicted_change) == (None, None, None)
    assert (record.is_trained, record.is_split) == (False, False)
