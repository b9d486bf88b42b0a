"""s3d-fast table: what it would run, and what it prints beside the paper's figures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from s3d_fast.commands.main import main
from s3d_fast.recipes.methods import METHODS
from s3d_fast.recipes.paper_tables import TABLES, folder_of, recipe_of

PARTS = {"train": 320, "test": 40}


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "cifar100.npz"
    np.savez(
        path,
        x_train=random.integers(0, 256, (1500, 32, 32, 3), dtype=np.uint8),
        y_train=np.arange(1500) % 100,
        x_test=random.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8),
        y_test=np.arange(200) % 100,
    )
    return path


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_a_run(name: str) -> None:
    table = TABLES[name]
    for row in table.rows:
        assert row.method in METHODS
        for preset in ("paper", "cpu"):
            made = recipe_of(table, row, preset)
            assert row.step is None or row.step <= made.steps or preset == "cpu"
        assert set(row.figures) <= set(table.columns)
    runs = {folder_of(row): (row.recipe, row.method, dict(row.settings)) for row in table.rows}
    assert all(runs[folder_of(row)] == (row.recipe, row.method, dict(row.settings)) for row in table.rows)


def test_a_dry_run_says_what_it_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["table", "cifar100", "--preset", "cpu", "--dry-run", "--out", str(tmp_path / "none")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row in TABLES["cifar100"].rows:
        (line,) = [line for line in lines if line.startswith(f"{row.name} ")]
        assert re.search(r"\d\.\d\de\+\d+", line)
    # S2D and S3D are expected to grow alike.
    assert len({re.findall(r"\d\.\d\de\+\d+", line)[0] for line in lines if re.match(r"S[23]D", line)}) == 1
    assert not (tmp_path / "none").exists()


def test_rows_run_resume_and_stand_beside_the_paper(
    cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["table", "cifar100", "--preset", "cpu", "--data", str(cifar), "--out", str(tmp_path), "--quiet"]
    arguments += ["--rows", "S3D-5,L1", "--epochs", "1", "--train-samples", "1280", "--test-samples", "100"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert re.search(r"S3D-5 .*\(70.19\).*\(0.3\).*\(73.69\)", first)
    assert re.search(r"L1 .*\(69.41\)", first)
    assert main(arguments) == 0
    # Finished runs are only read again.
    assert capsys.readouterr().out == first


def test_the_table_of_point_clouds_has_forward_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    clouds = {f"x_{part}": random.normal(size=(count, 128, 3)).astype(np.float32) for part, count in PARTS.items()}
    np.savez(tmp_path / "clouds.npz", **clouds, **{f"y_{part}": np.arange(count) % 40 for part, count in PARTS.items()})
    arguments = ["table", "modelnet40", "--preset", "cpu", "--data", str(tmp_path / "clouds.npz"), "--quiet"]
    arguments += ["--rows", "PointNet,DGCNN (0.5x)", "--epochs", "1", "--out", str(tmp_path / "runs")]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, paper in (("PointNet", "32.19"), ("DGCNN (0.5x)", "38.9")):
        (line,) = [line for line in lines if line.startswith(f"{name} ") and paper in line]
        (ours,) = re.findall(rf"(\S+) \({re.escape(paper)}\)", line)
        assert 0 < float(ours) < 1e5


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "cifar100", "--rows", "S4D", "--dry-run"]) == 2
    assert "its rows are" in capsys.readouterr().err
    assert main(["table", "cifar100"]) == 2
    assert "--data" in capsys.readouterr().err
