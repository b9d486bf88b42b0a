"""Growth in several processes: they agree, all end if one dies, and any number of processes can resume the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from s3d_fast.base.world import ALONE
from tests import grow_worker
from tests.distributed_worker import DEATHS
from tests.forked import MARK, processes_with

ROOT = Path(__file__).parents[2]


def work(folder: Path, command: str = "deaths", launcher: Sequence[str] = ()) -> str:
    """Run the worker and return what it prints; it leaves no process, and no file but those of torchrun."""
    mark, scratch = uuid.uuid4().hex, folder / "scratch"
    scratch.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.distributed_worker", command, str(folder / "runs")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
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


def networks(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "network-002.safetensors")


def test_two_nodes_need_no_shared_folder(deaths: tuple[Path, dict[str, Any]]) -> None:
    folder, told = deaths[0], deaths[1]["nodes"]
    assert told["whole"] == ["", ""]
    first, second = (
        (folder / "a", folder / "b") if (folder / "a" / "run.json").exists() else (folder / "b", folder / "a")
    )
    assert [path.name for path in second.iterdir()] == ["rank-1.safetensors"]
    mine, theirs = load_file(first / "rank-0.safetensors"), load_file(second / "rank-1.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert len(mine) == len(theirs) > 0


def test_nodes_resume_from_the_newest_checkpoint_wherever_it_is(deaths: tuple[Path, dict[str, Any]]) -> None:
    folder, told = deaths[0], deaths[1]["nodes"]
    # The other node ends by an error of its connection, whose words depend on what it was doing.
    assert any("SIGKILL" in report for report in told["died"])
    assert all(told["died"])
    assert told["only one has files"]
    # The checkpoint has moved to the other node, and the run has ended as it would have without a death.
    assert told["resumed"] == ["", ""]
    (whole,) = (folder / name for name in "ab" if (folder / name / "run.json").exists())
    (resumed,) = (folder / name for name in "cd" if (folder / name / "network-002.safetensors").exists())
    assert [phase["index"] for phase in history(resumed)] == [0, 1, 2]
    expected = networks(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in networks(resumed).items())


def under_torchrun(monkeypatch: pytest.MonkeyPatch, restart: int, run_id: str = "job") -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)


def fails(model: torch.nn.Module) -> dict[str, float]:
    raise ZeroDivisionError


def test_processes_that_torchrun_restarts_resume_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, 0)
    with pytest.raises(ZeroDivisionError):
        grow_worker.grower(tmp_path / "run", evaluate=fails).run()
    under_torchrun(monkeypatch, 1)
    resumed = grow_worker.grower(tmp_path / "run")
    resumed.run()
    assert [len(phase.epochs) for phase in resumed.history] == [grow_worker.EPOCHS] * grow_worker.PHASES
    whole = grow_worker.grower(tmp_path / "whole")
    whole.run()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_a_restart_does_not_resume_the_run_of_another_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, 0, "yesterday")
    with pytest.raises(ZeroDivisionError):
        grow_worker.grower(tmp_path, evaluate=fails).run()
    for restart in (0, 1):
        under_torchrun(monkeypatch, restart, "today")
        with pytest.raises(ValueError, match="holds a run already; resume it"):
            grow_worker.grower(tmp_path).run()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.long
def test_torchrun_on_two_nodes_and_the_command_line(tmp_path: Path) -> None:
    small = ["--steps", "1", "--epochs", "1", "--widths", "2,3,4", "--no-report", "--quiet", "--device", "cpu"]

    def run(*options: str) -> None:
        nodes = [
            subprocess.Popen(
                [
                    *(*TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--master-addr=localhost", "--master-port=29611"),
                    *("-m", "s3d_fast", "grow", "digits", *small, "--out", str(tmp_path / f"node-{node}"), *options),
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in (0, 1)
        ]
        for node in nodes:
            _, said = node.communicate(timeout=200)
            assert node.returncode == 0, said[-2000:]

    run()
    run("--resume", "--steps", "2")
    assert [phase["index"] for phase in history(tmp_path / "node-0")] == [0, 1, 2]
    assert not (tmp_path / "node-1").exists()


@pytest.mark.long
def test_torchrun_restarts_processes_that_continue(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    work(tmp_path / "elastic", "elastic", launcher)
    work(tmp_path / "whole", "grow", launcher)
    assert [phase["index"] for phase in history(tmp_path / "elastic" / "runs")] == [0, 1, 2]
    expected = networks(tmp_path / "whole" / "runs")
    found = networks(tmp_path / "elastic" / "runs")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_single_process_agrees_with_itself() -> None:
    assert ALONE.is_first
    assert ALONE.shard == (0, 1)
    assert ALONE.sum(1.5, 2) == [1.5, 2]
    assert ALONE.same("value") == "value"
    assert ALONE.agree(3)
    model = torch.nn.Linear(2, 2)
    assert ALONE.wrap(model) is model


def test_proposals_and_removals_are_those_of_all_batches(tmp_path: Path) -> None:
    assert work(tmp_path, "proposals").strip() == ""
    alone, *both = (load_file(tmp_path / "runs" / f"{name}.safetensors") for name in ("0-of-1", "0-of-2", "1-of-2"))
    assert {name.split("/")[0] for name in alone} == {"random", "firefly", "gradmax", "0", "3"}
    assert any(name.endswith("running_var") for name in alone)
    for one in both:
        assert set(one) == set(alone)
        for name, tensor in one.items():
            # The signs of singular vectors follow from the random start, which is the same.
            assert torch.allclose(tensor, alone[name], rtol=1e-7, atol=1e-10), name
            assert torch.equal(tensor, both[0][name]), name
