"""The record of a run: phases and epochs as JSON and back, also from files that are old, unfinished or damaged."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from s3d_fast.records.json_records import to_json
from s3d_fast.records.record import Epoch, Phase, PhaseRecord, read_phase
from s3d_fast.records.run_folder import RunFolder

NEEDED = {"index": 1, "widths": {"a": 3}, "params": 10, "macs": 20}


def full() -> PhaseRecord:
    return PhaseRecord(
        index=1,
        widths={"a": 3},
        params=10,
        macs=20,
        metrics={"accuracy": 0.5},
        loss=1.5,
        split_loss=1.25,
        predicted_change=-0.2,
        gains={"a": -0.1},
        new_filters={"a": 1},
        splits=1,
        added=2,
        removed=3,
        slope=0.75,
        negative=1,
        unconverged=2,
        batches=3,
        eps=0.3,
        relative=True,
        kept=0.5,
        copies={"a": [[0, 2], [4, 3]]},
        steps_to_part=120.0,
        apart=0.125,
        tol=0.05,
        sampling_error=0.25,
        matvecs=4,
        memory=5,
        scratch=6,
        seconds={"train": 1.0},
        epochs=[Epoch(0, 2.0, 0.1, 3.0, 64, 8.0)],
    )


def test_a_phase_survives_the_way_through_json() -> None:
    assert read_phase("here", json.loads(to_json(full()))) == full()


def test_every_field_is_written_and_read() -> None:
    written = json.loads(to_json(full()))
    assert set(written) == set(asdict(full()))
    for name in set(written) - set(NEEDED):
        without = read_phase("here", {key: value for key, value in written.items() if key != name})
        assert getattr(without, name) != getattr(full(), name), name


def test_numbers_that_are_missing_null_or_not_finite_are_none() -> None:
    for given in (
        {},
        *({"loss": bad, "split_loss": bad, "predicted_change": bad} for bad in (None, math.inf, 10**400)),
    ):
        phase = read_phase("here", NEEDED | {"metrics": None} | given)
        assert (phase.loss, phase.split_loss, phase.predicted_change) == (None, None, None)
        assert (phase.predicted, phase.measured, phase.is_split) == (None, None, False)
        assert phase.metrics == {}


def test_a_phase_under_way_has_numbers() -> None:
    phase = Phase(0, {"a": 3}, 10, 20)
    assert math.isnan(phase.loss)
    assert math.isnan(phase.split_loss)
    assert phase.predicted_change == 0
    assert (phase.predicted, phase.measured, phase.is_split) == (None, None, False)
    written = json.loads(to_json(phase))
    assert (written["loss"], written["predicted_change"]) == (None, 0)


def test_numbers_that_are_not_finite_are_written_as_null() -> None:
    phase = full()
    phase.loss, phase.gains = math.inf, {"a": math.nan}
    written = json.loads(to_json(phase), parse_constant=pytest.fail)
    assert written["loss"] is None
    assert written["gains"] == {"a": None}
    assert read_phase("here", written).gains == {}


@pytest.mark.parametrize("empty", [[], {}, None, "", 0, False], ids=repr)
def test_an_empty_value_stands_for_an_empty_collection(empty: Any) -> None:
    phase = read_phase("here", NEEDED | {"metrics": empty, "gains": empty, "seconds": empty, "epochs": empty})
    assert (phase.metrics, phase.gains, phase.seconds, phase.epochs) == ({}, {}, {}, [])


def test_an_epoch_without_a_number_gets_its_place() -> None:
    phase = read_phase("here", NEEDED | {"epochs": [{"loss": 1.0}, {"epoch": None}, {"epoch": 7, "unknown": 1}]})
    assert [epoch.epoch for epoch in phase.epochs] == [0, 1, 7]
    assert phase.epochs[0].loss == 1.0
    assert (phase.epochs[1].loss, phase.epochs[1].samples, phase.epochs[1].loss_scale) == (None, None, 1.0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (3, "here must be a JSON object, got 3"),
        ({}, "here: index must be an integer >= 0, got nothing"),
        (NEEDED | {"params": -1}, "here: params must be an integer >= 0, got -1"),
        (NEEDED | {"params": True}, "here: params must be an integer >= 0, got True"),
        (NEEDED | {"loss": "low"}, "here: loss must be a number or null, got 'low'"),
        (NEEDED | {"widths": {"a": 1.5}}, "here, widths: a must be an integer >= 0, got 1.5"),
        (NEEDED | {"epochs": 3}, "here: epochs must be a list, got 3"),
        (NEEDED | {"epochs": [3]}, "here, epochs must be a JSON object, got 3"),
    ],
)
def test_a_field_that_holds_something_else_is_named(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read_phase("here", record)


def test_an_epoch_is_a_dict_of_its_fields() -> None:
    epoch = Epoch(3, 1.0, 0.1, 2.0, 64)
    fields = {"epoch": 3, "loss": 1.0, "learning_rate": 0.1, "seconds": 2.0, "samples": 64, "loss_scale": 1.0}
    fields["gradient"] = None
    assert epoch == fields
    assert list(epoch) == list(fields)
    assert {name: getattr(epoch, name) for name in fields} == asdict(epoch) == fields
    assert json.loads(json.dumps(epoch)) == fields
    for same in (pickle.loads(pickle.dumps(epoch)), copy.deepcopy(epoch)):
        assert (same, same.loss) == (epoch, 1.0)


def test_a_checkpoint_of_another_version_is_restored() -> None:
    past = asdict(full()) | {"unknown": 1}
    past["epochs"][0]["unknown"] = 2
    del past["scratch"], past["epochs"][0]["loss_scale"]
    phase = Phase.of(past)
    assert (phase.scratch, phase.epochs[0].loss_scale) == (0, 1.0)
    assert phase.gains == full().gains


def test_defaults_of_run_json_are_not_shared(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_about({"recipe": "digits", "preset": "cpu", "method": "s3d", "seed": 0})
    folder.read_about()["settings"]["c"] = 3
    assert folder.read_about()["settings"] == {}
