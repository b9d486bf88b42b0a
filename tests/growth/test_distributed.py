"""Growth in several processes: they agree, all end if one dies, and any number of processes can resume the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from s3d_fast.base.world import ALONE

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, folder: Path, stage: str = "none", rank: int = 0) -> tuple[int, str, float, str]:
    """Run the worker in several processes; return exit code, stderr, seconds, and a mark in their environment."""
    mark = uuid.uuid4().hex
    scratch = folder.parent / f"{folder.name}-scratch"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "-m", "tests.distributed_worker", str(folder), stage, str(rank)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "S3D_MARK": mark, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # The run leaves no files there; torchrun leaves its logs.
    assert [path for path in scratch.rglob("*") if path.is_file() and path.suffix != ".log"] == []
    return done.returncode, done.stderr, time.monotonic() - began, mark


def processes_with(mark: str) -> list[str]:
    """Return the processes that have the mark in their environment."""

    def has_mark(entry: Path) -> bool:
        try:
            return mark.encode() in entry.read_bytes()
        except OSError:
            return False

    return [entry.parent.name for entry in Path("/proc").glob("[0-9]*/environ") if has_mark(entry)]


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed_worker", str(folder), "none", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_ranks_agree_bit_for_bit(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    code, said, _, _ = torchrun(2, folder)
    assert code == 0, said[-2000:]
    first, second = (load_file(folder / f"rank-{rank}.safetensors") for rank in (0, 1))
    assert set(first) == set(second)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    # One process takes the same samples in the same order. Only BatchNorm statistics differ, so results are similar.
    for mine, theirs in zip(history(folder), history(alone), strict=True):
        assert mine["macs"] >= theirs["macs"] // 2
        assert sum(mine["widths"].values()) == sum(theirs["widths"].values())
        assert [epoch["samples"] for epoch in mine["epochs"]] == [epoch["samples"] for epoch in theirs["epochs"]]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.3) if mine["loss"] else theirs["loss"] is None


@pytest.mark.parametrize(
    ("stage", "rank", "ranks_after"),
    [("train", 1, 1), ("capture", 1, 3), ("solve", 0, 2), ("split", 1, 2), ("half-phase", 0, 2)],
)
def test_a_rank_that_dies_ends_all_and_the_run_resumes(stage: str, rank: int, ranks_after: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, said, seconds, mark = torchrun(2, folder, stage, rank)
    assert code != 0
    # torchrun reports which process died, and of which signal.
    assert re.search(rf"rank +: {rank} \(local_rank: {rank}\)\n +exitcode +: -9 .*SIGKILL", said), said[-2000:]
    assert seconds < 60
    assert processes_with(mark) == []
    finished = len(list(folder.glob("phase-*.safetensors")))
    assert finished == 1
    code, said, _, mark = torchrun(ranks_after, folder)
    assert code == 0, said[-2000:]
    assert processes_with(mark) == []
    assert [phase["index"] for phase in history(folder)] == [0, 1, 2]
    assert len(list(folder.glob("network-*.safetensors"))) == 3
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_single_process_agrees_with_itself() -> None:
    assert ALONE.is_first
    assert ALONE.shard == (0, 1)
    assert ALONE.sum(1.5, 2) == [1.5, 2]
    assert ALONE.same("value") == "value"
    assert ALONE.agree(3)
    model = torch.nn.Linear(2, 2)
    assert ALONE.wrap(model) is model
