"""The command line: what it prints, what it writes, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s3d_fast import __version__, report
from s3d_fast.cli import main
from s3d_fast.tables import text_table


def test_rbf_prints_a_table_and_draws_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["rbf", "--steps", "15", "--seeds", "3", "--neurons", "6", "--out", str(tmp_path / "new" / "rbf")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "median [quartiles]" in out
    assert "At 5 neurons, by the median over 3 seeds, S2D ends at" in out
    folder = tmp_path / "new" / "rbf"
    assert (folder / "rbf.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "rbf.txt").read_text().strip() in out
    records = json.loads((folder / "rbf.json").read_text())
    assert {(record["m"], record["c"]) for record in records} == {
        (2, 1.0), (2, 1.5), (2, 2.0), (2, 3.0), (2, 5.0), (3, 3.0), (4, 3.0),
    }  # fmt: skip
    assert all(len(stage["loss"]) == 3 for record in records for stage in record["stages"])


def test_bad_settings_end_with_a_message_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rbf"
    assert main(["rbf", "--neurons", "3", "--out", str(out)]) == 2
    assert "neurons must be an integer >= 5, got 3" in capsys.readouterr().err
    assert not out.exists()


def test_missing_matplotlib_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("figures need matplotlib, which is not installed: pip install 's3d_fast[plots]'")

    monkeypatch.setattr(report, "require_matplotlib", missing)
    assert main(["rbf", "--out", str(tmp_path)]) == 2
    assert "s3d_fast[plots]" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert __version__ in capsys.readouterr().out


def test_text_table_aligns_its_columns() -> None:
    assert text_table([["a", "bb"], ["ccc", "d"]]) == "a    bb\n---  --\nccc  d"
