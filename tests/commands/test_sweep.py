"""s3d-fast grow --sweep: one trunk, a branch for every value; a branch with the trunk's value is the plain run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from s3d_fast.base.tensor_files import read_safetensors
from s3d_fast.commands.main import main
from s3d_fast.recipes.branching import branch
from s3d_fast.records.run import read_run
from s3d_fast.records.run_folder import RunFolder

GROW = ["grow", "digits", "--preset", "cpu", "--quiet", "--no-report", "--epochs", "1", "--train-samples", "256"]
GROW += ["--test-samples", "128", "--split-samples", "128", "--split-batch", "64", "--threads", "1"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "run"
    assert main([*GROW, "--out", str(folder), "--sweep", "c=1,1.3,3", "--step", "2"]) == 0
    return folder


def network(folder: Path, phase: int) -> dict[str, torch.Tensor]:
    return read_safetensors(RunFolder(folder).file("network", phase))[0]


def test_a_branch_with_the_same_value_is_the_plain_run(swept: Path, tmp_path: Path) -> None:
    assert main([*GROW, "--out", str(tmp_path), "--steps", "2"]) == 0
    for phase in range(3):
        one, other = network(swept / "c-1.3", phase), network(tmp_path, phase)
        assert all(torch.equal(one[name], other[name]) for name in one)
    plain, same = read_run(tmp_path).phases, read_run(swept / "c-1.3").phases
    assert [phase.gains for phase in plain] == [phase.gains for phase in same]


def test_every_branch_has_its_setting_and_the_same_beginning(swept: Path) -> None:
    assert sorted(path.name for path in swept.iterdir()) == ["c-1.0", "c-1.3", "c-3.0", "trunk"]
    assert len(read_run(swept / "trunk").phases) == 2
    runs = {value: read_run(swept / f"c-{value}") for value in (1.0, 1.3, 3.0)}
    for value, run in runs.items():
        assert (run.settings["c"], run.settings["steps"], len(run.phases)) == (value, 2, 3)
        assert run.phases[0].gains == runs[1.3].phases[0].gains
    assert runs[1.0].phases[1].negative == 0
    gains = [sum(runs[value].phases[1].gains.values()) for value in (1.0, 1.3, 3.0)]
    assert gains[2] <= gains[0] < 0


def test_a_sweep_resumes_and_takes_further_values(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (swept / "c-3.0" / "history.jsonl").read_bytes()
    arguments = [*GROW, "--out", str(swept), "--sweep", "c=3,2", "--step", "2"]
    assert main(arguments) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in table[-2:]] == ["3.0", "2.0"]
    assert (swept / "c-3.0" / "history.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "1"], "without --sweep"),
        (["--sweep", "c=1,2", "--step", "0"], "step"),
        (["--sweep", "c=1,2", "--method", "l1"], "methods that grow"),
        (["--sweep", "c=1,2", "--method", "s2d"], "no effect"),
        (["--sweep", "c=1,2", "--c", "1.5"], "contradict"),
        (["--sweep", "c=0.5,2"], "c must"),
    ],
)
def test_bad_sweeps(options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GROW, "--out", str(tmp_path / "run"), *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["c", "widths=1,2", "c=1,1", "c=a", "c="])
def test_bad_texts(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*GROW, "--sweep", text])
    assert "--sweep" in capsys.readouterr().err


def test_a_branch_needs_a_trunk_that_has_ended(swept: Path, tmp_path: Path) -> None:
    # The last phase of this run is split already by the time of its first checkpoint.
    for path in (swept / "c-1.3").iterdir():
        if path.name not in ("phase-002.safetensors", "history.jsonl"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    lines = (swept / "c-1.3" / "history.jsonl").read_text().splitlines()
    (tmp_path / "history.jsonl").write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(ValueError, match="has not come to its last phase"):
        branch(tmp_path, tmp_path / "out", {})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(ValueError, match="something else"):
        branch(swept / "trunk", tmp_path / "full", {})
