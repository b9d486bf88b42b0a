"""The code in the README runs unchanged, and the generated documents are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

import s3d_fast

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(text: str) -> str:
    """Return the first block of code that contains the text."""
    return next(one for one in BLOCKS if text in one)


TEN_LINES = block("import s3d_fast as s3d")


def test_splitting_matvec_is_its_plain_equivalent() -> None:
    X, C, V = torch.randn(7, 3).double(), torch.randn(7, 2).double(), torch.randn(2, 3).double()
    call, plain = re.match(r"(\S.*\))\s+# is (.*)\n", block("# is")).groups()  # type: ignore[union-attr]
    names = {"X": X, "C": C, "V": V, "splitting_matvec": s3d_fast.splitting_matvec}
    torch.testing.assert_close(eval(call, names), eval(plain, names), rtol=1e-13, atol=1e-13)


def test_the_fast_calls_agree_with_the_plain_one() -> None:
    X, C, V = torch.randn(50, 4), torch.randn(50, 3), torch.randn(3, 4)
    names = {"s3d": s3d_fast, "X": X, "C": C, "V": V}
    exec(block("splitting_matvec_grouped"), names)
    torch.testing.assert_close(names["SV"][0], s3d_fast.splitting_matvec(X, C, V))  # type: ignore[index]
    assert bool(names["spectrum"].converged.all())  # type: ignore[attr-defined]


def test_ten_lines_grow_a_model() -> None:
    names: dict[str, object] = {}
    exec(TEN_LINES, names)
    model, plan = names["model"], names["plan"]
    assert isinstance(plan, s3d_fast.SplitPlan)
    assert isinstance(model, torch.nn.Module)
    assert len(plan) == 6
    assert {name: model.get_submodule(name).out_features for name in plan.widths()} == plan.widths()


def test_a_grower_grows_and_draws_its_report(tmp_path: Path) -> None:
    names: dict[str, object] = {"folder": tmp_path}
    exec(TEN_LINES, names)
    exec(block("s3d.Grower("), names)
    assert names["page"] == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert len(names["grower"].history) == 3  # type: ignore[attr-defined]


def test_the_eigen_backend_works_alone() -> None:
    names = {"s3d": s3d_fast, "X": torch.randn(50, 4), "C": torch.randn(50, 3)}
    exec(block("optimal_split"), names)
    assert names["split"].weights.shape == (3, 2)  # type: ignore[attr-defined]


def test_the_eigen_backend_works_by_names_of_layers() -> None:
    names: dict[str, object] = {}
    exec(TEN_LINES, names)
    exec(block("capture_layers"), names)
    assert names["weight"].shape == names["model"].layers[0].weight.shape  # type: ignore[attr-defined]
    assert names["bias"].shape == names["model"].layers[0].bias.shape  # type: ignore[attr-defined]


def test_the_list_of_public_names_is_up_to_date() -> None:
    folder = Path(__file__).parent.parent / "docs"
    names: dict[str, object] = {"__name__": "make_api", "__file__": str(folder / "make_api.py")}
    exec((folder / "make_api.py").read_text(), names)
    text = names["api"]()  # type: ignore[operator]
    assert (folder / "api.md").read_text() == text
    assert "|  |" not in text, "a public name has no docstring"


def test_a_capture_stays_within_a_budget() -> None:
    names: dict[str, object] = {}
    exec(TEN_LINES, names)
    exec(block("memory_budget"), names)
    operators = names["operators"]
    assert isinstance(operators, s3d_fast.Captured)
    assert operators.nbytes < 10_000_000


def test_the_page_of_reliability_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs" / "reliability.md"
    made = runpy.run_path(str(page.with_name("make_reliability.py")))["document"]()
    assert made == page.read_text(), "run python docs/make_reliability.py"
