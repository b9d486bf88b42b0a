"""Documents: links lead somewhere, pictures show their records, and the code of tutorials runs."""

from __future__ import annotations

import json
import re
import runpy
import warnings
from pathlib import Path

import pytest

from benchmarks.kept_table import section
from s3d_fast.experiments.theorem_records import TheoremRecord, theorem_table

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Pages of the site that are made from other files: docs/pages.py.
MADE = {"docs/examples.md", "docs/contributing.md"}


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[ ]+", "-", word) for word in words}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^()\s]+)\)", without_code(page.read_text())):
        if re.match(r"\w+:", target):
            if not target.startswith("https://"):
                broken.append(target)
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if path and str(file.relative_to(ROOT)) in MADE:
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One part\n[a](gone.md) [b](#one-part) [c](#other) [d](page.md) `[e](code.md)` ![f](no.svg)\n")
    assert broken_links(page) == ["gone.md", "#other", "no.svg"]


def test_the_pictures_are_up_to_date() -> None:
    folder = ROOT / "docs"
    for name, drawn in runpy.run_path(str(folder / "make_figures.py"))["figures"]().items():
        assert (folder / "figures" / name).read_text() == drawn, "run python docs/make_figures.py"
    runs = json.loads((folder / "growth.json").read_text())["runs"]
    drawn = runpy.run_path(str(folder / "make_growth.py"))["picture"](runs)
    assert (folder / "figures" / "growth.svg").read_text() == drawn, "run python docs/make_growth.py"
    first, last = (runs["s3d-0"]["phases"][place]["params"] for place in (0, -1))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"a network of {first} parameters grows to {last}" in readme


def test_the_tables_of_what_is_kept_show_their_record() -> None:
    record = json.loads((ROOT / "docs" / "kept.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page.endswith(section(record)), "append the output of python -m benchmarks.kept_table docs/kept.json"


def test_the_table_of_the_theorems_shows_its_record() -> None:
    records = [TheoremRecord(**one) for one in json.loads((ROOT / "docs" / "theorems.json").read_text())]
    page = (ROOT / "docs" / "math.md").read_text()
    for row in theorem_table(records):
        assert f"| {' | '.join(row)} |\n" in page, "copy docs/theorems.json and its table from s3d-fast theorems"


def test_the_picture_of_growth_comes_from_the_commands_that_it_names() -> None:
    make = runpy.run_path(str(ROOT / "docs" / "make_growth.py"))
    runs = json.loads((ROOT / "docs" / "growth.json").read_text())["runs"]
    assert {name: run["command"].split() for name, run in runs.items()} == make["commands"]()


LONG = ("lightning", "many_gpus", "own_cnn", "transformer")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(page.stem, marks=[pytest.mark.long] if page.stem in LONG else [])
        for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    ],
)
def test_the_code_of_a_tutorial_runs(name: str) -> None:
    if name == "lightning":
        pytest.importorskip("lightning")
    execute = runpy.run_path(str(ROOT / "docs" / "execute.py"))["executed"]
    with warnings.catch_warnings():
        # Other libraries warn of what they like.
        warnings.simplefilter("default")
        page = execute(ROOT / "docs" / "tutorials" / f"{name}.md")
    assert "```text" in page


def test_the_code_of_the_page_on_the_eigensolver_runs() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "execute.py"))["executed"](ROOT / "docs" / "eigensolver.md")
    assert page.count("```text") == 2
    assert "stopped because: {'converged': 64}" in page


def test_a_tutorial_that_fails_is_named(tmp_path: Path) -> None:
    make = runpy.run_path(str(ROOT / "docs" / "execute.py"))
    page = tmp_path / "bad.md"
    page.write_text("# Bad\n\n```python\nx = 1\n```\n\n```python\nprint(x)\nx / 0\n```\n")
    with pytest.raises(make["TutorialError"], match=r"bad.md, line 8: ZeroDivisionError"):
        make["executed"](page)
    page.write_text("```bash\nexit 3\n```\n")
    with pytest.raises(make["TutorialError"], match=r"bad.md, line 2: exit code 3"):
        make["executed"](page)
    page.write_text('```python title="a.py"\nprint(6 * 7)\n```\n\n```bash\npython a.py\n```\n')
    assert make["executed"](page).endswith("```text\n42\n```\n")
