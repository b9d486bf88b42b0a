"""Reports of runs whose names are HTML: they stay text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3d_fast.report import write_comparison, write_report
from tests.hostile.cases import MANY, QUIET
from tests.hostile.recording import record

ATTACKS = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onload='alert(1)", "</style><script>")
ATTACKS += ("</title><svg onload=alert(1)>", "javascript:alert(1)", "]]><script>", "<!--", "&lt;script&gt;", "\u202e")
NAMES = st.one_of(st.sampled_from(ATTACKS), st.text(min_size=1, max_size=12))


class Tags(HTMLParser):
    """Collects the tags of a page, its attributes that would execute something, and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.executed: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            points = name in ("href", "src", "xlink:href", "action", "formaction")
            if name.startswith("on") or (points and "javascript:" in (value or "").lower()):
                self.executed.append((name, value))


def tags_of(page: Path) -> Tags:
    parser = Tags()
    parser.feed(page.read_text())
    return parser


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the records of a run of two phases, with names from an enemy wherever a record has names or texts."""
    about = {name: draw(NAMES) for name in ("recipe", "preset", "method")}
    about |= {"seed": 0, "settings": {draw(NAMES): draw(NAMES), "c": draw(NAMES)}}
    about |= {"environment": {draw(NAMES): draw(NAMES)}, "command": [draw(NAMES)], "precision": draw(NAMES)}
    unit, metric, stage = draw(NAMES), draw(NAMES), draw(NAMES)
    phases = [
        {"index": index, "widths": {unit: 2 + index}, "params": 10 + index, "macs": 20 + index}
        | {"metrics": {metric: 0.5, "accuracy": 0.5 + index / 10}, "seconds": {stage: 1.0, "evaluate": 1.0}}
        | {"loss": 1.0, "split_loss": 0.9, "predicted_change": -0.1, "gains": {unit: -0.1}, "new_filters": {unit: 1}}
        | {"splits": 1, "epochs": [{"epoch": 0, "loss": 1.0, "learning_rate": 0.1, "seconds": 1.0, "samples": 8}]}
        for index in range(2)
    ]
    return about, phases


def written(folder: Path, run: tuple[dict[str, Any], list[dict[str, Any]]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run[0]))
    (folder / "history.jsonl").write_text("".join(json.dumps(phase) + "\n" for phase in run[1]))
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The tags of the reports of a harmless run."""
    folder = tmp_path_factory.mktemp("harmless")
    phases = [
        {"index": 0, "widths": {"a": 2}, "params": 10, "macs": 20, "metrics": {"accuracy": 0.5}, "loss": 1.0}
        | {"split_loss": 0.9, "predicted_change": -0.1, "gains": {"a": -0.1}, "new_filters": {"a": 1}, "splits": 1}
        | {"seconds": {"train": 1.0, "evaluate": 1.0}, "epochs": [{"epoch": 0, "loss": 1.0, "seconds": 1.0}]},
        {
            "index": 1,
            "widths": {"a": 3},
            "params": 11,
            "macs": 21,
            "metrics": {"accuracy": 0.6},
            "seconds": {"train": 1.0},
        },
    ]
    about = {
        "recipe": "a",
        "preset": "b",
        "method": "s3d",
        "seed": 0,
        "settings": {"c": 1.3},
        "environment": {"a": "b"},
    }
    run = written(folder / "run", (about, phases))
    return tags_of(write_report(run)).tags | tags_of(write_comparison([run], folder / "compared")).tags


def check(folder: Path, run: tuple[dict[str, Any], list[dict[str, Any]]], known: set[str]) -> None:
    place = written(folder / "run", run)
    for page in (write_report(place), write_comparison([place], folder / "compared")):
        found = tags_of(page)
        assert found.tags <= known
        assert found.executed == []


@pytest.mark.filterwarnings("ignore")
def test_names_in_reports_stay_text(tmp_path: Path, known: set[str]) -> None:
    @settings(QUIET, max_examples=2, derandomize=True)
    @given(runs())
    def every(run: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        check(tmp_path, run, known)

    every()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_many_names_in_reports_stay_text(tmp_path: Path, known: set[str]) -> None:
    count = [0]

    @settings(QUIET, max_examples=MANY)
    @given(runs())
    def every(run: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        check(tmp_path, run, known)
        count[0] += 1

    every()
    record("fuzz", "reports, names", {"cases": count[0], "read": count[0]})
