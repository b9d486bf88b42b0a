"""Branches of a run: copies of it that go on with another value of one setting."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from s3d_fast.records.run import read_run
from s3d_fast.records.run_folder import RunFolder

# What decides a single step alone; other settings are fixed by the phases before it.
SWEPT = ("c", "m", "theorem", "fraction", "top_k", "growth", "threshold", "split_samples", "split_share")


def branch(trunk: Path, out: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder of a run that has the phases of another, and goes on with other settings.

    The trunk must have ended with its last phase, which is not split. The branch continues from its checkpoint, with
    the state of its optimizer: with the trunk's own settings, it becomes the run that the trunk would have become.
    Nothing happens if the branch exists.

    Args:
        trunk: the folder of a finished run.
        out: the folder of the branch.
        settings: for run.json, those of the branch.

    Raises:
        ValueError: the trunk is not finished, or `out` holds something else.
    """
    if RunFolder(out).is_described():
        return
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds something else than a run; give another folder")
    run = read_run(trunk)
    last = run.phases[-1].index if run.phases else -1
    checkpoint = RunFolder(trunk).file("phase", max(last, 0))
    if not run.phases or not checkpoint.exists() or run.phases[-1].was_selected:
        raise ValueError(f"{trunk} has not come to its last phase; resume it first")
    begun = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)
    earlier = [path for kind in ("network", "spectra") for path in sorted(trunk.glob(f"{kind}-*.safetensors"))]
    for path in (checkpoint, *earlier, trunk / "history.jsonl", trunk / "times.json"):
        if path.exists():
            shutil.copy(path, begun)
    RunFolder(begun).write_about(run.about | {"settings": dict(settings)})
    if out.exists():
        out.rmdir()
    # From here on the branch exists, as a whole.
    begun.rename(out)
