"""The examples run, and their results are as described."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    """Run an example and return its output."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_mlp_grows_and_gets_better() -> None:
    out = run("digits_mlp.py", "--phases", "3", "--epochs", "4")
    found = re.findall(r"phase \d: hidden (\d+)-(\d+), \d+ parameters, accuracy ([\d.]+)", out)
    assert len(found) == 3
    totals = [int(first) + int(second) for first, second, _ in found]
    assert totals[0] == 8
    assert totals[0] < totals[1] < totals[2]
    assert float(found[-1][2]) > float(found[0][2])


def test_a_grower_of_its_own_takes_our_eigenpairs() -> None:
    out = run("own_grower.py")
    found = re.findall(r"loss ([\d.]+); now (\d+) and (\d+) neurons", out)
    assert len(found) == 4
    assert [int(first) + int(second) for _, first, second in found] == [7, 8, 9, 10]
    assert float(found[-1][0]) < 0.7 * float(found[0][0])


def test_own_module_predicts_the_change_of_its_loss() -> None:
    out = run("own_module.py")
    assert re.search(r"narrow +conv +4 +yes", out)
    assert re.search(r"wide +conv +4 +yes", out)
    measured, predicted = re.search(r"changed by (\S+); predicted: (\S+)", out).groups()  # type: ignore[union-attr]
    assert abs(float(measured) - float(predicted)) < 0.05 * abs(float(predicted))
    assert float(predicted) < 0


def test_resume_ends_with_the_same_weights() -> None:
    out = run("resume.py")
    assert "same weights: True" in out
    assert "same outputs: True" in out
