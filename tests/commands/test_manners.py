"""Small manners of the command line: how it starts, stops, reads its options and names what differs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from s3d_fast import data
from s3d_fast.commands import grow as grow_command
from s3d_fast.commands import main as cli
from s3d_fast.commands.main import COMMANDS, main
from s3d_fast.commands.parsing import toml_reader
from s3d_fast.recipes import recipe
from tests.commands.test_cli import QUICK, listing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["nonsense"], ["--hel"]], ids=" ".join)
def test_the_command_line_starts_without_torch(arguments: list[str]) -> None:
    code = f"""
import sys, time
sys.argv = ["s3d-fast"]
start = time.perf_counter()
from s3d_fast.commands.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
print(time.perf_counter() - start, [name for name in ("torch", "numpy", "scipy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, _, libraries = done.stdout.splitlines()[-1].partition(" ")
    assert libraries == "[]"
    assert float(seconds) < 1


def test_public_names_are_those_of_the_core_in_any_order_of_imports() -> None:
    code = """
import s3d_fast
from s3d_fast.schedules import cosine
from s3d_fast.capture.all_batches import capture
assert s3d_fast.capture is capture and s3d_fast.schedules.cosine is cosine
assert set(s3d_fast.__all__) <= set(dir(s3d_fast)) and all(hasattr(s3d_fast, name) for name in s3d_fast.__all__)
assert not hasattr(s3d_fast, "nothing")
from s3d_fast import *
assert trace is s3d_fast.trace
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_command_is_described() -> None:
    modules = {path.stem for path in (ROOT / "s3d_fast" / "commands").glob("*.py")}
    assert set(COMMANDS) == modules - {"__init__", "datasets", "main", "parsing", "sweep"}


@pytest.mark.parametrize(
    "arguments",
    [["grow", "--epo=2"], ["grow", "--res"], ["inspect", "a", "--dry"], ["rbf", "--step=5"]],
    ids=" ".join,
)
def test_options_have_no_abbreviations(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"unrecognized arguments: {arguments[-1]}" in capsys.readouterr().err


def test_the_environment_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"torch              {torch.__version__}" in out
    assert "backend reference  available" in out


def test_an_interrupted_run_says_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(grow_command, "run", interrupted)
    arguments = ["grow", "digits", "--out", str(tmp_path / "a run"), *QUICK]
    assert main(arguments) == 130
    quoted = " ".join(arguments).replace(str(tmp_path / "a run"), f"'{tmp_path / 'a run'}'")
    assert capsys.readouterr().err == f"s3d-fast: interrupted; to continue: s3d-fast {quoted} --resume\n"
    assert main([*arguments, "--resume"]) == 130
    assert capsys.readouterr().err.count("--resume") == 1
    # Only the first of several processes speaks, and says nothing about torchrun's own options.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli._way_on(arguments).startswith("; to continue: torchrun as before, with -m s3d_fast grow digits")
    assert cli._way_on(["env"]) == ""


def test_ctrl_c_ends_a_run_with_one_line_and_it_resumes(tmp_path: Path) -> None:
    small = ["grow", "digits", *QUICK, "--epochs", "2000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "s3d_fast", *small], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "epoch-000.safetensors").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    (line,) = err.splitlines()
    assert line == f"s3d-fast: interrupted; to continue: s3d-fast {' '.join(small)} --resume"


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_options_come_from_a_file_and_the_command_line_has_priority(tmp_path: Path) -> None:
    toml, plain = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('recipe = "digits"\nmethod = "s2d"\nquiet = true\nno-report = true\n[settings]\neps = 0.02\n')
    plain.write_text(json.dumps({"steps": 0, "epochs": 1, "widths": [2, 3, 4], "train_samples": 32, "batch-size": 32}))
    with plain.open("r+") as file:
        options = json.load(file) | {"split_samples": 16, "split_batch": 16, "no_report": True, "quiet": True}
        file.seek(0)
        json.dump(options | {"seed": None, "compile": False}, file)
    if sys.version_info >= (3, 11):
        assert main(["grow", "--config", str(toml), *QUICK[:-2], "--out", str(tmp_path / "0"), "--steps", "0"]) == 0
        found = about(tmp_path / "0")
        assert (found["method"], found["settings"]["eps"], found["settings"]["steps"]) == ("s2d", 0.02, 0)
    assert main(["grow", "digits", "--config", str(plain), "--out", str(tmp_path / "1"), "--seed", "3"]) == 0
    found = about(tmp_path / "1")
    assert (found["seed"], found["settings"]["widths"], found["settings"]["epochs"]) == (3, [2, 3, 4], 1)


def test_an_earlier_run_is_repeated_from_its_own_description(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["grow", "digits", *QUICK, "--method", "s2d", "--seed", "2", "--out", str(first)]) == 0
    flags = ["--quiet", "--no-report", "--out", str(again)]
    assert main(["grow", "--config", str(first), *flags]) == 0
    changing = ("environment", "command", "started")
    assert {k: v for k, v in about(again).items() if k not in changing} == {
        k: v for k, v in about(first).items() if k not in changing
    }
    for name in ("network-000.safetensors", "network-001.safetensors"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"epochs": "many"}', "argument --epochs: invalid int value: 'many'"),
        ('{"epoch": 3}', "'epoch' is not an option; use one of"),
        ('{"method": "pruning"}', "argument --method: invalid choice: 'pruning'"),
        ('{"recipe": "mnist"}', "recipe must be one of digits, "),
        ('{"recipe": "cifar100-mobilenet"}', "is for the recipe cifar100-mobilenet, not digits"),
        ('{"settings": 3}', "settings must be a JSON object, got 3"),
        ('{"config": "a.json"}', "'config' is not an option"),
        ('{"quiet": "yes"}', "argument --quiet: ignored explicit argument 'yes'"),
        ("[]", "must be a JSON object"),
        ("{", "must be JSON"),
        ('{"epochs": -1}', "epochs must be an integer >= 1, got -1"),
        ('{"environment": {}}', "must say its recipe and preset to be repeated"),
        ('{"environment": {}, "recipe": "digits", "preset": "huge"}', "preset of digits must be one of"),
    ],
)
def test_a_bad_file_of_options_is_named(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert main(["grow", "digits", "--config", str(path), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert message in err
    assert list(listing(tmp_path)) == ["a.json"]


def test_toml_before_python_3_11_needs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(RuntimeError, match=r"TOML needs Python 3\.11 or newer, or tomli: pip install tomli"):
        toml_reader()


def test_seeds_make_a_run_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["grow", *QUICK, "--steps", "0", "--seeds", "0,3"]
    assert main(arguments) == 0
    folders = [tmp_path / "runs" / f"digits-s3d-{seed}" for seed in (0, 3)]
    assert [about(folder)["seed"] for folder in folders] == [0, 3]
    # A table of every run, and one of both.
    out = capsys.readouterr().out
    assert out.count("predicted change") == 2
    assert "seeds" in out
    before = (folders[1] / "network-000.safetensors").read_bytes()
    assert main([*arguments, "--resume"]) == 0
    assert (folders[1] / "network-000.safetensors").read_bytes() == before
    assert main([*arguments, "--seed", "1"]) == 2
    assert "give one of them" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["grow", "--seeds", "1,1"])
    assert "seeds must differ" in capsys.readouterr().err


def test_without_a_gpu_the_preset_is_small_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    monkeypatch.setattr(grow_command, "run", lambda job, resume: chosen.append((job.preset, job.recipe)) or [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(grow_command.report, "write_report", lambda out: out)
    assert main(["grow", "digits", "--out", str(tmp_path)]) == 0
    assert chosen.pop() == ("cpu", recipe("digits", "cpu"))
    line = "No GPU: growing with the preset cpu, 5 phases of 8 epochs. --preset full has 7 of 30.\n"
    assert capsys.readouterr().err == line
    assert main(["grow", "digits", "--out", str(tmp_path), "--preset", "full"]) == 0
    assert chosen.pop() == ("full", recipe("digits", "full"))
    assert capsys.readouterr().err == ""


def test_a_resumed_run_keeps_its_method_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = ["--epochs", "1", "--train-samples", "256", "--quiet", "--no-report", "--preset", "cpu"]
    assert main(["grow", *kept, "--steps", "1", "--method", "s2d", "--growth", "1.5", "--out", "own"]) == 0
    before = about(tmp_path / "own")
    # What the command line does not say is as the run has it, whatever the preset says today.
    assert main(["grow", "--resume", "--quiet", "--no-report", "--out", "own"]) == 0
    assert about(tmp_path / "own")["settings"] == before["settings"]
    assert before["settings"]["fraction"] is None
    # A setting that an earlier version did not have is what it was then.
    assert before["settings"].pop("rows_per_sample") == 64
    (tmp_path / "own" / "run.json").write_text(json.dumps(before))
    chosen = []
    monkeypatch.setattr(grow_command, "run", lambda job, resume: chosen.append(job) or [])
    assert main(["grow", "--resume", "--quiet", "--no-report", "--out", "own"]) == 0
    (job,) = chosen
    assert (job.method, job.recipe.growth, job.recipe.rows_per_sample) == ("s2d", 1.5, 0)


def test_a_run_of_an_earlier_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grow_command, "load_dataset", lambda recipe, options: data.digits())
    chosen = []
    monkeypatch.setattr(grow_command, "run", lambda job, resume: chosen.append(job) or [])
    small = ["grow", "cifar100-mobilenet", "--preset", "cpu", "--quiet", "--no-report", "--resume"]
    assert main(small) == 0
    assert (chosen[-1].method, chosen[-1].out) == ("new", Path("runs/cifar100-mobilenet-new-0"))
    # Every preset once grew by s3d.
    old = {"recipe": "cifar100-mobilenet", "preset": "cpu", "method": "s3d", "seed": 0, "layers": {}, "environment": {}}
    settings = recipe("cifar100-mobilenet", "cpu").as_settings() | {"fraction": 0.35, "growth": None, "eps": 0.01}
    folder = tmp_path / "runs" / "cifar100-mobilenet-s3d-0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(old | {"settings": settings, "command": [], "started": ""}))
    assert main(small) == 0
    job = chosen[-1]
    assert (job.method, job.out) == ("s3d", Path("runs/cifar100-mobilenet-s3d-0"))
    assert (job.recipe.fraction, job.recipe.growth, job.recipe.eps) == (0.35, None, 0.01)


def test_a_resumed_run_keeps_its_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["grow", *QUICK, "--steps", "0", "--preset", "full", "--out", str(tmp_path)]) == 0
    # As an earlier version has written it.
    (tmp_path / "run.json").write_text(json.dumps(about(tmp_path) | {"preset": "paper"}))
    assert main(["grow", *QUICK, "--steps", "0", "--resume", "--out", str(tmp_path)]) == 0
