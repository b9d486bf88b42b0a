"""The demo: its tables show its losses, its figure its typical networks, and README what its record holds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from s3d_fast import report
from s3d_fast.commands.main import main
from s3d_fast.experiments import demo, layer_growth

ROOT = Path(__file__).parents[2]
SMALL = demo.DemoSettings(seeds=3, steps=20, side=8)


@pytest.fixture(scope="module")
def found() -> demo.Demo:
    return demo.run(SMALL)


def test_the_pictures_are_those_of_one_seed(found: demo.Demo, tmp_path: Path) -> None:
    for task in found.tasks:
        histories = {one.method: one for one in found.histories[task.name]}
        for fit in task.fits:
            losses = histories[demo.SHOWN[fit.method]].losses[-1]
            assert fit.error in losses.tolist()
            assert fit.fitted.shape == task.target.shape
            # The loss of what is drawn is the loss that is written below it.
            assert float((fit.fitted - task.target).square().mean()) == pytest.approx(fit.error, rel=1e-3)
    report.demo_figure(found.tasks, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_pixels_stand_where_they_belong(found: demo.Demo) -> None:
    x, y = demo.regression("photograph", SMALL.side)
    target = found.tasks[0].target.flatten().double()
    torch.testing.assert_close(target, (y - y.mean()) / y.std(unbiased=False), atol=1e-5, rtol=1e-5)
    assert layer_growth.fold(x, y, 1).x.shape[1] == SMALL.side**2


def test_tables_show_the_medians(found: demo.Demo) -> None:
    text = demo.words(found, SMALL)
    for histories in found.histories.values():
        assert f"{statistics.median(histories[0].losses[-1].tolist()):.3g}" in text
    assert "Seeds of 3 whose last loss is below S2D's" in text


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo"
    assert main(["demo", "--seeds", "2", "--steps", "10", "--out", str(out)]) == 0
    assert (out / "demo.txt").read_text().strip() in capsys.readouterr().out
    assert (out / "demo.png").exists()
    assert set(json.loads((out / "demo.json").read_text())["a curve to fit"]) == {one.name for one in demo.METHODS}
    assert main(["demo", "--seeds", "0", "--out", str(out)]) == 2
    assert "seeds must" in capsys.readouterr().err


def test_readme_shows_the_record() -> None:
    record = json.loads((ROOT / "docs" / "demo.json").read_text())["a photograph to fit"]
    stuck, free = (statistics.median(record[name]["9"]) for name in ("S2D", "S3D m=3 c=3"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"S2D is stuck at a median loss of {stuck:.2f} where S3D reaches {free:.2f}" in readme
