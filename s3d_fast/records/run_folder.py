"""The files of a growth run: for each, the function that writes it beside the function that reads it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from s3d_fast.base.files import write_whole
from s3d_fast.base.tensor_files import read_safetensors, serialized
from s3d_fast.base.world import launch_id, was_restarted
from s3d_fast.records.json_records import mapping, parse, shown, to_json
from s3d_fast.records.record import PhaseRecord, read_phase

# The entries of run.json: name -> (type, type in words, default).
ABOUT: dict[str, tuple[type, str, Any]] = {
    "recipe": (str, "a string", None),
    "preset": (str, "a string", ""),  # empty for a network of one's own
    "method": (str, "a string", None),
    "seed": (int, "an integer", None),
    "settings": (dict, "an object", {}),
    "layers": (dict, "an object", {}),
    "environment": (dict, "an object", {}),
    "command": (list, "a list", []),
}
# Of run.json and history.jsonl. A phase of a thousand epochs takes about 150 kB.
MOST_BYTES = 1 << 26


class RunFolder:
    """A folder with the files of one run.

    - `phase-000.safetensors`: the checkpoint from which the run continues after phase 0.
    - `epoch-001.safetensors`: while phase 1 trains, the checkpoint after its last finished epoch.
    - `network-000.safetensors`: the network after the training of phase 0.
    - `spectra-000.safetensors`: the extreme eigenvalues of that network's filters.
    - `times.json`: the measured forward times that splits were chosen by, if time is their cost.
    - `history.jsonl`: a line for every phase.
    - `run.json`: what is grown, the settings, the layers and the environment.
    - `launch.txt`: the launch of torchrun that runs this, if it may restart processes.
    """

    KINDS = ("phase", "epoch", "network", "spectra")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def prepare(self) -> None:
        """Make the folder, and remove files that a killed process has left incomplete or out of date."""
        self.path.mkdir(parents=True, exist_ok=True)
        for kind in self.KINDS:
            for path in self.path.glob(f".{kind}-*.safetensors.*.tmp"):
                path.unlink(missing_ok=True)
        for name in ("history.jsonl", "run.json", "times.json"):
            for path in self.path.glob(f".{name}.*.tmp"):
                path.unlink(missing_ok=True)
        self.forget_epochs()

    def note_launch(self) -> None:
        """Note which launch of torchrun runs this, so that processes that it restarts may continue."""
        launch = launch_id()
        if launch is not None:
            write_whole(self.path / "launch.txt", launch.encode())

    def was_begun_by_this_launch(self) -> bool:
        """Return whether torchrun has restarted this process, and this very launch has begun or resumed the run."""
        note, launch = self.path / "launch.txt", launch_id()
        return launch is not None and was_restarted() and note.is_file() and note.read_bytes() == launch.encode()

    def file(self, kind: str, phase: int) -> Path:
        """Return the path of a file of a phase; `kind` is one of `KINDS`."""
        assert kind in self.KINDS
        return self.path / f"{kind}-{phase:03d}.safetensors"

    def latest(self) -> Path | None:
        """Return the checkpoint to continue from: of the newest finished phase, or of an epoch after it."""
        epoch, finished = self._epoch(), self._finished()
        return epoch if epoch.exists() else finished[-1] if finished else None

    def networks(self) -> list[Path]:
        """Return the saved networks, in the order of the phases."""
        return sorted(self.path.glob("network-*.safetensors"))

    def forget_epochs(self) -> None:
        """Remove the checkpoints of epochs whose phase is finished."""
        for path in self.path.glob("epoch-*.safetensors"):
            if path != self._epoch():
                path.unlink(missing_ok=True)

    def _finished(self) -> list[Path]:
        return sorted(self.path.glob("phase-*.safetensors"))

    def _epoch(self) -> Path:
        """Return the path of the epoch checkpoint of the first unfinished phase."""
        finished = self._finished()
        # By its number: a process that resumed from another's checkpoint has no files of earlier phases.
        return self.file("epoch", int(finished[-1].stem.rpartition("-")[2]) + 1 if finished else 0)

    def write_spectra(self, phase: int, spectra: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Write lambda_min and lambda_max of the filters of every unit, as UNIT/lambda_min and UNIT/lambda_max."""
        tensors = {}
        for unit, (low, high) in spectra.items():
            for end, values in (("lambda_min", low), ("lambda_max", high)):
                tensors[f"{unit}/{end}"] = values.detach().float().cpu().contiguous().clone()
        write_whole(self.file("spectra", phase), serialized(tensors, {}))

    def read_spectra(self, phase: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return lambda_min and lambda_max, each (M,), of the filters of every unit before the split of a phase.

        Raises:
            FileNotFoundError: the phase has no spectra.
            ValueError: the file does not hold spectra.
        """
        path = self.file("spectra", phase)
        if not path.is_file():
            raise FileNotFoundError(f"{path.name} is missing")
        try:
            tensors = read_safetensors(path)[0]
        except ValueError as error:
            raise ValueError(f"{path.name} must be a safetensors file, but: {error}") from error
        spectra = {}
        for unit in dict.fromkeys(name.rpartition("/")[0] for name in sorted(tensors)):
            pair = [tensors.get(f"{unit}/{end}") for end in ("lambda_min", "lambda_max")]
            low, high = (None if one is None or not one.is_floating_point() else one.double().numpy() for one in pair)
            if low is None or high is None or low.ndim != 1 or low.shape != high.shape:
                raise ValueError(f"{path.name} must hold vectors lambda_min and lambda_max for {unit!r}")
            spectra[unit] = (low, high)
        return spectra

    def write_times(self, phase: int, record: Mapping[str, Any]) -> None:
        """Add the forward times that were measured before the split of a phase."""
        times = {str(phase): record} | {str(other): old for other, old in self.read_times().items() if other != phase}
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "times.json", (json.dumps(times, indent=1) + "\n").encode())

    def read_times(self) -> dict[int, dict[str, Any]]:
        """Return the measured forward times by phase; none if the run has not measured any.

        Raises:
            ValueError: the file holds something else.
        """
        path = self.path / "times.json"
        if not path.is_file():
            return {}
        found = mapping(str(path), parse(str(path), _bytes(path)))
        if not all(name.isdecimal() for name in found):
            raise ValueError(f"{path}: every name must be the number of a phase, got {shown(list(found))}")
        return {int(name): mapping(f"{path}: {name}", record) for name, record in found.items()}

    def write_history(self, phases: Sequence[PhaseRecord]) -> None:
        """Write a line of strict JSON for every phase; NaN and infinity become null."""
        write_whole(self.path / "history.jsonl", "".join(to_json(phase) + "\n" for phase in phases).encode())

    def read_history(self) -> tuple[list[PhaseRecord], tuple[str, ...]]:
        """Return the phases in the order of their lines, and sentences about problems with the file.

        Raises:
            FileNotFoundError, ValueError: see `read_run`.
        """
        path = self.path / "history.jsonl"
        *lines, rest = _bytes(path).split(b"\n")
        phases = [
            read_phase(where, parse(where, line))
            for where, line in ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1))
            if line.strip()
        ]
        if not rest.strip():
            return phases, ()
        # The text after the last newline may be a whole record or the beginning of one.
        where = f"{path}, line {len(lines) + 1}"
        try:
            record = parse(where, rest)
        except ValueError:
            return phases, (f"The last line of {path.name} was not written to its end, and is left out.",)
        return [*phases, read_phase(where, record)], ()

    def write_about(self, about: Mapping[str, Any]) -> None:
        """Write run.json, the description of the run."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "run.json", (json.dumps(about, indent=1) + "\n").encode())

    def is_described(self) -> bool:
        """Return whether there is a run.json."""
        return (self.path / "run.json").is_file()

    def read_about(self) -> dict[str, Any]:
        """Return the content of run.json, the description of the run.

        Raises:
            FileNotFoundError: there is no run.json.
            ValueError: an entry is missing or has a wrong type.
        """
        path = self.path / "run.json"
        record = mapping(str(path), parse(str(path), _bytes(path)))
        for name, (kind, words, default) in ABOUT.items():
            value = record.get(name, copy.copy(default))
            if not isinstance(value, kind) or isinstance(value, bool):
                given = shown(record[name]) if name in record else "nothing"
                raise ValueError(f"{path}: {name} must be {words}, got {given}")
            record[name] = value
        return record


def read_spectra(folder: str | os.PathLike[str], index: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return lambda_min and lambda_max, each (M,), of the filters of every unit before the split of a phase.

    Raises:
        FileNotFoundError: the phase has no spectra.
        ValueError: the file does not hold spectra.
    """
    return RunFolder(folder).read_spectra(index)


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} must be the folder of a run, but has no file {path.name}")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path} must have at most {MOST_BYTES} bytes, got {size}")
    return path.read_bytes()
