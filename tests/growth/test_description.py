"""A Grower describes its run: reports, comparisons and inspections work for a network of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import s3d_fast as s3d
from s3d_fast import report
from s3d_fast.commands.main import main


def grower(out: Path | None, seed: int = 0, phases: int = 2, **options: Any) -> s3d.Grower:
    torch.manual_seed(0)
    batches = [(torch.randn(20, 3), torch.randn(20, 2)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2))
    return s3d.Grower(
        model,
        torch.randn(2, 3),
        mse_loss,
        batches,
        **{
            "train": s3d.EpochTrainer(batches, mse_loss, 2),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            "phases": phases,
            "evaluate": lambda model: {"error": float(mse_loss(model(batches[0][0]), batches[0][1]).detach())},
            "selection": {"m": 2, "c": 1.3, "fraction": 0.5},
            "out": out,
            "seed": seed,
        }
        | options,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of one network: S3D with two seeds, and S2D."""
    root = tmp_path_factory.mktemp("own")
    for seed in (0, 1):
        grower(root / f"s3d-{seed}", seed, name="tiny").run()
    grower(root / "s2d", name="tiny", selection={"c": 1.0, "fraction": 0.5}).run()
    return [root / "s3d-0", root / "s3d-1", root / "s2d"]


def test_a_grower_writes_what_it_grows(folders: list[Path]) -> None:
    about = json.loads((folders[0] / "run.json").read_text())
    assert (about["recipe"], about["method"], about["seed"]) == ("tiny", "s3d", 0)
    assert {name: about["settings"][name] for name in ("c", "m", "fraction", "eps", "epochs", "steps")} == {
        "c": 1.3, "m": 2, "fraction": 0.5, "eps": "relative:0.3", "epochs": 2, "steps": 1,
    }  # fmt: skip
    assert about["layers"]["0"] == {"kind": "linear", "splittable": True, "because": "silu, consumed by 2"}
    assert about["layers"]["2"]["splittable"] is False
    assert about["environment"]["torch"] == torch.__version__
    assert json.loads((folders[2] / "run.json").read_text())["method"] == "s2d"


def test_a_grower_draws_its_report(folders: list[Path], tmp_path: Path) -> None:
    one = grower(tmp_path / "run", phases=1)
    one.run()
    assert one.report() == tmp_path / "run" / "report.html"
    # Without a name it is the model's class.
    assert "<h1>Sequential: s3d c=1.3, seed 0</h1>" in (tmp_path / "run" / "report.html").read_text()
    page = report.write_report(folders[0]).read_text()
    assert "<h1>tiny: s3d c=1.3, seed 0</h1>" in page
    assert "0 linear" in page


def test_a_report_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="give `out` to the Grower"):
        grower(None).report()


def test_the_method_of_other_plans_is_their_name(tmp_path: Path) -> None:
    def by_hand(phase: int, graph: s3d.Graph) -> s3d.SplitPlan:
        return s3d.SplitPlan(graph, [])

    grower(tmp_path, plan=by_hand).run()
    assert report.read_run(tmp_path).method == "by_hand"


def test_a_resumed_run_keeps_how_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["first.py"])
    grower(tmp_path).run()
    monkeypatch.setattr("sys.argv", ["second.py"])
    grower(tmp_path, phases=3).run(resume=True)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["command"] == ["first.py"]
    assert about["settings"]["steps"] == 2
    # Folders of earlier versions have no run.json.
    (tmp_path / "run.json").unlink()
    grower(tmp_path, phases=3).run(resume=True)
    assert json.loads((tmp_path / "run.json").read_text())["command"] == ["second.py"]


def test_the_command_line_takes_the_folders_of_growers(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folders[0]), str(folders[1])]) == 0
    assert (folders[1] / "report.html").exists()
    assert str(folders[1] / "report.html") in capsys.readouterr().out
    assert main(["compare", *map(str, folders), "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    # Two seeds of S3D are one group; two epochs of 40 samples with 4 * 3 + 2 * 4 MACs.
    assert "s3d c=1.3  0      2      26      20    2       1,600" in table
    assert "<h1>tiny: 3 runs</h1>" in (tmp_path / "compare.html").read_text()
    assert main(["inspect", str(folders[0])]) == 0
    shown = capsys.readouterr().out
    assert "tiny, s3d c=1.3, seed 0, phase 0: 26 parameters, 20 MACs per sample" in shown
    assert "the model's output" in shown
    assert "G: the gains for m = 2, c = 1.3" in shown
    assert main(["inspect", str(folders[0]), "--phase", "1"]) == 0
    assert "has not computed the spectra" in capsys.readouterr().out
    assert main(["inspect", str(folders[0]), "--phase", "7"]) == 2
    assert "has no phase 7; it has 0, 1" in capsys.readouterr().err
    assert main(["inspect", str(folders[0]), "--data", "x"]) == 2
    assert "a network of your own" in capsys.readouterr().err
