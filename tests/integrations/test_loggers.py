"""Loggers of a run: what they get, and what TensorBoard, W&B and MLflow keep of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from s3d_fast.integrations.loggers import MLflowLogger, TensorBoardLogger, WandbLogger
from s3d_fast.records.record import Phase
from tests import grow_worker

TAGS = {"train/loss", "test/accuracy", "size/params", "size/filters", "split/predicted", "width/layers.0"}


class Notes:
    """A logger of one's own."""

    def __init__(self) -> None:
        self.notes: list[tuple[dict[str, float], int, str]] = []

    def log(self, values: Mapping[str, float], step: int, axis: str) -> None:
        self.notes.append((dict(values), step, axis))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for values, step, _ in self.notes if name in values]


@pytest.fixture(scope="module")
def followed() -> tuple[Notes, list[Phase]]:
    notes = Notes()
    return notes, grow_worker.grower(None, loggers=[notes]).run()


def test_a_logger_follows_every_epoch_and_phase(followed: tuple[Notes, list[Phase]]) -> None:
    notes, history = followed
    losses = [epoch.loss for phase in history for epoch in phase.epochs]
    assert notes.of("train/loss") == list(enumerate(losses))
    assert notes.of("test/accuracy") == [(phase.index, phase.metrics["accuracy"]) for phase in history]
    assert notes.of("size/params") == [(phase.index, phase.params) for phase in history]
    # The last phase is not split.
    assert notes.of("split/predicted") == [(phase.index, phase.predicted_change) for phase in history[:-1]]
    assert {axis for values, _, axis in notes.notes if "train/loss" in values} == {"epoch"}
    assert {axis for values, _, axis in notes.notes if "size/macs" in values} == {"phase"}


def test_a_resumed_run_logs_what_is_new(tmp_path: Path) -> None:
    first, second = Notes(), Notes()
    grow_worker.grower(tmp_path, phases=2, loggers=[first]).run()
    history = grow_worker.grower(tmp_path, phases=3, loggers=[second]).run(resume=True)
    epochs = grow_worker.EPOCHS
    assert [step for step, _ in first.of("train/loss")] == list(range(2 * epochs))
    assert [step for step, _ in second.of("train/loss")] == list(range(2 * epochs, 3 * epochs))
    assert second.of("size/params") == [(2, history[2].params)]


def replay(notes: Notes, *loggers: object) -> None:
    for values, step, axis in notes.notes:
        for logger in loggers:
            logger.log(values, step, axis)  # type: ignore[attr-defined]


def test_tensorboard(followed: tuple[Notes, list[Phase]], tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    replay(followed[0], TensorBoardLogger(tmp_path / "events"))
    events = event_accumulator.EventAccumulator(str(tmp_path / "events")).Reload()
    assert set(events.Tags()["scalars"]) >= TAGS
    found = {one.step: one.value for one in events.Scalars("train/loss")}
    assert found == pytest.approx(dict(followed[0].of("train/loss")))


@pytest.mark.filterwarnings("default")
def test_wandb(followed: tuple[Notes, list[Phase]], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test")
    logged, defined = [], {}
    original_log, original_define = run.log, run.define_metric
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "log", lambda values: (logged.append(values), original_log(values)))
        patch.setattr(
            run, "define_metric", lambda name, **kind: (defined.update({name: kind}), original_define(name, **kind))
        )
        replay(followed[0], WandbLogger(run))
    run.finish()
    losses = [(one["epoch"], one["train/loss"]) for one in logged if "train/loss" in one]
    assert losses == followed[0].of("train/loss")
    assert defined["train/loss"] == {"step_metric": "epoch"}
    assert defined["size/params"] == {"step_metric": "phase"}
    assert dict(run.summary)["train/loss"] == pytest.approx(losses[-1][1])
    with pytest.raises(ValueError, match="not both; got project"):
        WandbLogger(run, project="other")


@pytest.mark.filterwarnings("default")
def test_mlflow(followed: tuple[Notes, list[Phase]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}")
    run = client.create_run(client.create_experiment("growth"))
    replay(followed[0], MLflowLogger(run.info.run_id, client))
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {one.step: one.value for one in history} == pytest.approx(dict(followed[0].of("train/loss")))
    assert set(client.get_run(run.info.run_id).data.metrics) >= TAGS


@pytest.mark.parametrize(("make", "library"), [(WandbLogger, "wandb"), (MLflowLogger, "mlflow")])
def test_a_missing_library_is_named(make: type, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeError, match=rf"needs {library}, which is not installed: pip install {library}"):
        make()
