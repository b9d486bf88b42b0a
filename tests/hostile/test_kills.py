"""Runs that are killed at random times and resumed end with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.recording import record

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("S3D_KILLS", "100"))


def killed(folder: Path, processes: int, kills: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.kill_worker", str(folder), str(processes), str(kills)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_runs_resume_to_the_same_bits(processes: int, tmp_path: Path) -> None:
    figures = killed(tmp_path, processes, KILLS)
    assert figures["kills"] >= KILLS
    assert figures["runs"] > 0
    assert figures["identical"] == figures["runs"]
    record("kills", f"{processes} process{'es' * (processes > 1)}", figures)
