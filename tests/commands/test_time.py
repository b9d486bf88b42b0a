"""s3d-fast time: its table, the networks that it opens, and its messages for bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.commands import time as time_command
from s3d_fast.commands.main import main
from s3d_fast.network.forward_time import ForwardTime
from s3d_fast.recipes import recipe
from tests.commands.test_cli import QUICK

FEW = ["--repeats", "2", "--warmup", "0"]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the digits."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["grow", "digits", *QUICK, "--fraction", "0.5", "--out", str(folder)]) == 0
    return folder


def rows_of(out: str) -> list[list[str]]:
    return [re.split(r"  +", line) for line in out.splitlines()[3:]]


def cost_of(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
    cost = s3d.count(s3d.trace(model.eval(), torch.zeros(1, *shape)))
    return [str(cost.params), str(cost.macs)]


def test_the_table_has_sizes_times_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["digits", "digits@0.5", "digits@seed"]
    assert main(["time", *names, *FEW, "--threads", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Forward passes of 16 samples on cpu, 1 thread: median and quartiles of 2 rounds, after 0 ")
    rows = rows_of(out)
    assert [row[0] for row in rows] == names
    entry = recipe("digits")
    half = tuple(round(0.5 * width) for width in entry.full_widths)
    for row, widths in zip(rows, (entry.full_widths, half, entry.widths), strict=True):
        assert row[1] == "1x8x8"
        assert row[2:4] == cost_of(entry.network(widths, 10), (1, 8, 8))
        low, high = map(float, row[5].split(" to "))
        assert 0 < low <= float(row[4]) <= high
        assert float(row[6]) > 0
    assert rows[0][6] == "1.000"


def test_point_networks_are_timed_at_the_points_of_their_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Sequence[tuple[nn.Module, Tensor]]] = []

    def noted(networks: Sequence[tuple[nn.Module, Tensor]], repeats: int, warmup: int) -> list[ForwardTime]:
        timed.append(networks)
        assert (repeats, warmup) == (15, 3)
        return [ForwardTime((0.25, 0.5, 0.75), (2.0, 3.0, 4.0)) for _ in networks]

    monkeypatch.setattr(time_command, "time_in_turns", noted)
    names = ["modelnet40-dgcnn@0.5", "modelnet40-pointnet", "modelnet40-pointnet2"]
    assert main(["time", *names, "--preset", "cpu"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [[name, "128x3"] for name in names]
    assert [row[4:] for row in rows] == [["500", "375 to 625", "3.000"]] * 3
    assert [tuple(x.shape) for _, x in timed[0]] == [(16, 128, 3)] * 3
    # Networks that differ in their inputs' values could differ in time.
    assert all(float(x.std()) == pytest.approx(1, abs=0.1) for _, x in timed[0])
    half = recipe("modelnet40-dgcnn", "cpu").network((32, 32, 64, 128), 40)
    assert rows[0][2:4] == cost_of(half, (128, 3))


def test_networks_of_a_run_are_opened(grown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["time", f"{grown}@0", str(grown), "digits", "--batch", "3", *FEW]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Forward passes of 3 samples on ")
    phases = [json.loads(line) for line in (grown / "history.jsonl").read_text().splitlines()]
    assert [row[2:4] for row in rows_of(out)[:2]] == [[str(phase["params"]), str(phase["macs"])] for phase in phases]
    assert phases[1]["params"] > phases[0]["params"]


def test_the_folder_of_a_run_may_have_an_at_in_its_name(
    grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run@1").symlink_to(grown)
    assert main(["time", str(tmp_path / "run@1"), f"{tmp_path / 'run@1'}@0", *FEW]) == 0
    last, first = rows_of(capsys.readouterr().out)
    assert int(last[2]) > int(first[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing: 'missing' is neither a recipe nor the folder of a run; recipes are digits, "),
        (
            ["digits@big"],
            "digits@big: after @ comes 'seed', or a positive factor of the recipe's full widths; got 'big'",
        ),
        (["digits@-1"], "got '-1'"),
        (["digits@nan"], "got 'nan'"),
        (["digits@"], "got ''"),
        (["RUN@last"], "after @ comes a phase of the run, an integer >= 0; got 'last'"),
        (["RUN@7"], "has no network of phase 7"),
        (["."], "must be the folder of a run"),
        (["OWN"], "is the run of a network of your own, which cannot be built here"),
        (["RUN", "--preset", "cpu"], "--preset has no effect on runs"),
        (["modelnet40-pointnet", "--preset", "paper"], "preset of modelnet40-pointnet must be"),
        (["digits", "--batch", "0"], "batch must be an integer >= 1, got 0"),
        (["digits", "--repeats", "0"], "repeats must be an integer >= 1, got 0"),
        (["digits", "--warmup", "-1"], "warmup must be an integer >= 0, got -1"),
        (["digits", "--threads", "0"], "threads must be an integer >= 1, got 0"),
        (["digits", "--device", "abacus"], "device 'abacus' cannot be used"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_named(
    arguments: list[str],
    message: str,
    grown: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about: dict[str, Any] = json.loads((grown / "run.json").read_text())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "run.json").write_text(json.dumps(about | {"preset": ""}))
    monkeypatch.chdir(tmp_path)
    given = [one.replace("RUN", str(grown)).replace("OWN", "own") for one in arguments]
    assert main(["time", *given]) == 2
    assert message in capsys.readouterr().err
