"""The file of an experiment, docs/results/KEY.json: what holds for all runs, the machine, and a line for every run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results.experiment import Experiment, Record, Run
from s3d_fast import env
from s3d_fast.base.files import write_whole

FOLDER = Path(__file__).parents[2] / "docs" / "results"


class Store:
    """The records of an experiment; every change is on disk at once, and whole.

    Raises:
        ValueError: the file holds runs under other conditions than the experiment's `about`.
    """

    def __init__(self, experiment: Experiment, folder: Path = FOLDER) -> None:
        self.path = folder / f"{experiment.key}.json"
        self.about = as_json(experiment.about)
        self.machine = ""
        self.records: dict[str, Record] = {}
        if not self.path.exists():
            return
        content = json.loads(self.path.read_text())
        if content["about"] != self.about and content["runs"]:
            raise ValueError(
                f"{self.path} holds runs with {content['about']}, but the experiment now has {self.about}; "
                "delete the file to run all of them again"
            )
        self.machine, self.records = content["machine"], content["runs"]

    def has(self, run: Run) -> bool:
        """Return whether the record of this run is there; one with other settings is not."""
        return run.name in self.records and self.records[run.name]["settings"] == as_json(run.settings)

    def add(self, run: Run, record: Record) -> None:
        """Add the record of a run, and write the file."""
        self.machine = machine()
        self.records[run.name] = {"settings": as_json(run.settings), **record}
        self.write()

    def keep(self, names: set[str]) -> None:
        """Forget the records of all other runs."""
        self.records = {name: record for name, record in self.records.items() if name in names}

    def write(self) -> None:
        """Write the file: one line for every run, so that changes can be read."""
        lines = [f"{_text(name)}: {_text(record)}" for name, record in self.records.items()]
        head = f'{{"about": {_text(self.about)},\n"machine": {_text(self.machine)},\n"runs": {{\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (head + ",\n".join(lines) + "\n}}\n").encode())


def machine() -> str:
    """Return the processor and the versions that a record was made with."""
    found = env.report()
    return f"{found['processor']}; torch {found['torch']}, Python {found['python']}, s3d_fast {found['s3d_fast']}"


def as_json(value: Mapping[str, Any]) -> Any:
    """Return what JSON makes of settings: lists for tuples, texts for keys."""
    return json.loads(_text(value))


def _text(value: Any) -> str:
    # NaN is no JSON: a record that holds one is a mistake of its experiment.
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
