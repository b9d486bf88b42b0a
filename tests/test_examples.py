"""The examples run, and their results are as described."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = (("digits_mlp.py", "--phases", "3", "--epochs", "4"), ("own_grower.py",), ("own_module.py",), ("resume.py",))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every example prints."""
    folder = tmp_path_factory.mktemp("examples")
    scripts = [(str(ROOT / "examples" / name), *arguments) for name, *arguments in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.script_worker", str(folder), json.dumps(scripts)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for number, code in enumerate(done.stdout.split()):
        assert code == "0", (folder / f"{number}.err").read_text()
    return {name: (folder / f"{number}.out").read_text() for number, (name, *_) in enumerate(COMMANDS)}


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted(name for name, *_ in COMMANDS)


def test_digits_mlp_grows_and_gets_better(outputs: dict[str, str]) -> None:
    out = outputs["digits_mlp.py"]
    found = re.findall(r"phase \d: hidden (\d+)-(\d+), \d+ parameters, accuracy ([\d.]+)", out)
    assert len(found) == 3
    totals = [int(first) + int(second) for first, second, _ in found]
    assert totals[0] == 8
    assert totals[0] < totals[1] < totals[2]
    assert float(found[-1][2]) > float(found[0][2])


def test_a_grower_of_its_own_takes_our_eigenpairs(outputs: dict[str, str]) -> None:
    out = outputs["own_grower.py"]
    found = re.findall(r"loss ([\d.]+); now (\d+) and (\d+) neurons", out)
    assert len(found) == 4
    assert [int(first) + int(second) for _, first, second in found] == [7, 8, 9, 10]
    assert float(found[-1][0]) < 0.7 * float(found[0][0])


def test_own_module_predicts_the_change_of_its_loss(outputs: dict[str, str]) -> None:
    out = outputs["own_module.py"]
    assert re.search(r"narrow +conv +4 +yes", out)
    assert re.search(r"wide +conv +4 +yes", out)
    measured, predicted = re.search(r"changed by (\S+); predicted: (\S+)", out).groups()  # type: ignore[union-attr]
    assert abs(float(measured) - float(predicted)) < 0.05 * abs(float(predicted))
    assert float(predicted) < 0


def test_resume_ends_with_the_same_weights(outputs: dict[str, str]) -> None:
    out = outputs["resume.py"]
    assert "same weights: True" in out
    assert "same outputs: True" in out
