"""The files of a growth run: checkpoints to go on from, the network of every phase, its spectra, the history."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from s3d_fast import checkpoint
from s3d_fast.files import write_whole
from s3d_fast.solvers import Spectrum


class RunFolder:
    """A folder with the files of one run.

    `phase-000.safetensors` is all that the run needs to go on after phase 0, `epoch-001.safetensors` after the last
    epoch of phase 1 that is finished, while that phase trains; `network-000.safetensors` is the network as phase 0 has
    trained it, `spectra-000.safetensors` its extreme eigenvalues, and `history.jsonl` has a line for every phase.
    """

    KINDS = ("phase", "epoch", "network", "spectra")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def prepare(self) -> None:
        """Make the folder, and remove what a process that was killed while it wrote has left behind."""
        self.path.mkdir(parents=True, exist_ok=True)
        for kind in self.KINDS:
            for path in self.path.glob(f".{kind}-*.safetensors.*.tmp"):
                path.unlink(missing_ok=True)
        for path in self.path.glob(".history.jsonl.*.tmp"):
            path.unlink(missing_ok=True)
        self.forget_epochs()

    def file(self, kind: str, phase: int) -> Path:
        """Return the path of a file of a phase; `kind` is one of `KINDS`."""
        assert kind in self.KINDS
        return self.path / f"{kind}-{phase:03d}.safetensors"

    def latest(self) -> Path | None:
        """Return the checkpoint to go on from: the newest finished phase's, or that of an epoch after it."""
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
        """Return where the epochs of the first phase that is not finished are kept."""
        return self.file("epoch", len(self._finished()))

    def write_spectra(self, phase: int, spectra: Mapping[str, Spectrum]) -> None:
        """Write the extreme eigenvalues of every filter, as UNIT/lambda_min and UNIT/lambda_max."""
        tensors = {}
        for unit, spectrum in spectra.items():
            tensors[f"{unit}/lambda_min"] = spectrum.lambda_min.float()
            tensors[f"{unit}/lambda_max"] = spectrum.lambda_max.float()
        checkpoint.write(self.file("spectra", phase), tensors, {"phase": phase})

    def write_history(self, phases: Sequence[Mapping[str, Any]]) -> None:
        """Write a line of strict JSON for every phase: what is not a number is null."""
        lines = [json.dumps(_strict(phase), allow_nan=False) + "\n" for phase in phases]
        write_whole(self.path / "history.jsonl", "".join(lines).encode())


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
