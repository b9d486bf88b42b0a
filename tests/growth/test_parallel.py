"""Growth inside DistributedDataParallel, fully_shard and torch.distributed.checkpoint, in several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel_worker import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in every case: nothing, or torchrun's report."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel_worker", str(tmp_path_factory.mktemp("parallel"))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("case", CASES)
def test_networks_grow_inside_tools_for_several_processes(case: str, reports: dict[str, str]) -> None:
    assert reports[case] == "", reports[case]
