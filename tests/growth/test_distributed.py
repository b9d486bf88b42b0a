"""Growth in several processes: they agree, all end if one dies, and any number of processes can resume the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from s3d_fast.base.world import ALONE
from tests.distributed_worker import DEATHS
from tests.forked import MARK, processes_with

ROOT = Path(__file__).parents[2]


def work(folder: Path) -> str:
    """Run the worker and return what it prints; it leaves no process, and no file but those of torchrun."""
    mark, scratch = uuid.uuid4().hex, folder / "scratch"
    scratch.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed_worker", str(folder / "runs")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert processes_with(mark) == []
    left = [path for path in scratch.rglob("*") if path.is_file() and path.suffix != ".log"]
    assert [path for path in left if not path.name.startswith(("pytorch-errorfile-", "error.json"))] == []
    return done.stdout


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder of all cases, and how each case went, by the stage at which a process dies."""
    folder = tmp_path_factory.mktemp("deaths")
    cases = [json.loads(line) for line in work(folder).splitlines()]
    return folder / "runs", {case["stage"]: case for case in cases}


def test_ranks_agree_bit_for_bit(deaths: tuple[Path, dict[str, Any]]) -> None:
    folder, alone = deaths[0] / "together", deaths[0] / "alone"
    ended = deaths[1]["none"]["together"]
    assert (ended["report"], ended["left"]) == ("", [])
    first, second = (load_file(folder / f"rank-{rank}.safetensors") for rank in (0, 1))
    assert set(first) == set(second)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    # One process takes the same samples in the same order. Only BatchNorm statistics differ, so results are similar.
    for mine, theirs in zip(history(folder), history(alone), strict=True):
        assert mine["macs"] >= theirs["macs"] // 2
        assert sum(mine["widths"].values()) == sum(theirs["widths"].values())
        assert [epoch["samples"] for epoch in mine["epochs"]] == [epoch["samples"] for epoch in theirs["epochs"]]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.3) if mine["loss"] else theirs["loss"] is None


@pytest.mark.parametrize(("stage", "rank"), [(stage, rank) for stage, rank, _ in DEATHS])
def test_a_rank_that_dies_ends_all_and_the_run_resumes(
    stage: str, rank: int, deaths: tuple[Path, dict[str, Any]]
) -> None:
    folder, case = deaths[0] / stage, deaths[1][stage]
    # torchrun reports which process died, and of which signal.
    said = case["died"]["report"]
    assert re.search(rf"rank +: {rank} \(local_rank: {rank}\)\n +exitcode +: -9 .*SIGKILL", said), said
    assert case["died"]["seconds"] < 60
    assert case["died"]["left"] == []
    assert case["phases"] == 1
    assert case["resumed"]["report"] == ""
    assert case["resumed"]["left"] == []
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
