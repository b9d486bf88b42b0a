"""Reports of runs whose names are HTML: they stay text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
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


# Elements that load, execute or change something; a page may have some of its own.
RISKY = (
    "script",
    "iframe",
    "object",
    "embed",
    "img",
    "image",
    "foreignobject",
    "base",
    "form",
    "link",
    "meta",
    "style",
)
RISKY += ("title", "a", "use", "animate", "set", "body", "html", "head")


class Tags(HTMLParser):
    """Counts the risky elements of a page, and collects its attributes that would execute something."""

    def __init__(self) -> None:
        super().__init__()
        self.risky: Counter[str] = Counter()
        self.executed: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.risky[tag] += tag in RISKY
        for name, value in attrs:
            points = name in ("href", "src", "xlink:href", "action", "formaction")
            if name.startswith("on") or (points and "javascript:" in (value or "").lower()):
                self.executed.append((name, value))


def tags_of(page: Path) -> Tags:
    parser = Tags()
    parser.feed(page.read_text())
    return parser


Run = tuple[dict[str, Any], list[dict[str, Any]]]


def run_of(names: Sequence[str]) -> Run:
    """Return the records of a run of two phases, with these names wherever a record has names or texts."""
    name = iter(names)
    about = {entry: next(name) for entry in ("recipe", "preset", "method", "precision")}
    about |= {"seed": 0, "settings": {next(name): next(name), "c": next(name)}}
    about |= {"environment": {next(name): next(name)}, "command": [next(name)]}
    unit, metric, stage = next(name), next(name), next(name)
    phases = [
        {"index": index, "widths": {unit: 2 + index}, "params": 10 + index, "macs": 20 + index}
        | {"metrics": {metric: 0.5, "accuracy": 0.5 + index / 10}, "seconds": {stage: 1.0, "evaluate": 1.0}}
        | {"loss": 1.0, "split_loss": 0.9, "predicted_change": -0.1, "gains": {unit: -0.1}, "new_filters": {unit: 1}}
        | {"splits": 1, "epochs": [{"epoch": 0, "loss": 1.0, "learning_rate": 0.1, "seconds": 1.0, "samples": 8}]}
        for index in range(2)
    ]
    return about, phases


RUNS = st.lists(NAMES, min_size=13, max_size=13).map(run_of)


def pages(folder: Path, run: Run) -> list[Path]:
    place = folder / "run"
    place.mkdir(exist_ok=True)
    (place / "run.json").write_text(json.dumps(run[0]))
    (place / "history.jsonl").write_text("".join(json.dumps(phase) + "\n" for phase in run[1]))
    return [write_report(place), write_comparison([place], folder / "compared")]


def check(folder: Path, run: Run, harmless: list[Tags]) -> None:
    for page, usual in zip(pages(folder, run), harmless, strict=True):
        found = tags_of(page)
        assert found.risky <= usual.risky
        assert found.executed == usual.executed


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> list[Tags]:
    """What the pages of a run with plain names have."""
    names = [f"name{number}" for number in range(13)]
    return [tags_of(page) for page in pages(tmp_path_factory.mktemp("harmless"), run_of(names))]


@pytest.mark.filterwarnings("ignore")
def test_names_in_reports_stay_text(tmp_path: Path, harmless: list[Tags]) -> None:
    for attack in ATTACKS[:2]:
        check(tmp_path, run_of([attack] * 13), harmless)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_many_names_in_reports_stay_text(tmp_path: Path, harmless: list[Tags]) -> None:
    count = [0]

    @settings(QUIET, max_examples=MANY)
    @given(RUNS)
    def every(run: Run) -> None:
        check(tmp_path, run, harmless)
        count[0] += 1

    every()
    record("fuzz", "reports, names", {"cases": count[0], "read": count[0]})
