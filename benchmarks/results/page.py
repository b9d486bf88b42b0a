"""Makes the tables of docs/results.md and README.md, and the figures, from docs/results/*.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.results.comparison import Incomplete
from benchmarks.results.experiments import EXPERIMENTS
from benchmarks.results.store import FOLDER, Store

ROOT = Path(__file__).parents[2]


def files(folder: Path = FOLDER) -> dict[Path, str]:
    """Return every file that shows the results, with the text that it should have."""
    found: dict[Path, str] = {}
    loading = (FOLDER / "loading.txt").read_text()
    parts = {"loading": f"```\n{loading}```\n"}
    values: dict[str, str] = {}
    front: dict[str, str] = {}
    left: set[str] = set()
    for experiment in EXPERIMENTS.values():
        store = Store(experiment, folder)
        if not store.records:
            left.add(experiment.key)
            continue
        try:
            shown, own_values, own_front, drawn = (
                make(store.records)
                for make in (experiment.parts, experiment.values, experiment.front, experiment.figures)
            )
        except Incomplete as error:
            print(f"{experiment.key} is left as it is on the page: {error}")
            left.add(experiment.key)
            continue
        parts |= {f"{experiment.key}: machine": machine(experiment.key, store), **shown}
        values |= own_values
        front |= own_front
        found |= {ROOT / "docs" / "figures" / name: text for name, text in drawn.items()}
    found[ROOT / "docs" / "results.md"] = filled(ROOT / "docs" / "results.md", parts, values, left)
    found[ROOT / "README.md"] = filled(ROOT / "README.md", front, values, left)
    return found


def machine(key: str, store: Store) -> str:
    """Return how many runs there are, what they took, on which machine, and the command that performs them."""
    seconds = sum(record["seconds"] for record in store.records.values())
    data = f" --{EXPERIMENTS[key].data} FILE" if EXPERIMENTS[key].data else ""
    command = f"python -m benchmarks.results run --only {key}{data}"
    return f"{len(store.records)} runs, {seconds / 60:.0f} CPU minutes ({store.machine}): `{command}`\n"


def filled(page: Path, parts: Mapping[str, str], values: Mapping[str, str], left: Collection[str] = ()) -> str:
    """Return the text of a page whose computed parts and values are as they should be.

    A part stands on lines of its own between <!-- name --> and <!-- end -->, a value within a line. Values of the
    experiments in `left`, by key, stay as they are.

    Raises:
        ValueError: the page has no place for a part, or asks for a value that no experiment has.
    """
    text = page.read_text()
    for name, part in parts.items():
        marked = f"(<!-- {re.escape(name)} -->\\n).*?(<!-- end -->)"
        if not re.search(marked, text, flags=re.S):
            raise ValueError(f"{page.name} has no place for {name!r}: add <!-- {name} --> and <!-- end -->")
        text = re.sub(marked, lambda found, part=part: found[1] + part + found[2], text, flags=re.S)

    def value(found: re.Match[str]) -> str:
        if found[1].partition(":")[0] in left:
            return found[0]
        if found[1] not in values:
            raise ValueError(f"{page.name} asks for {found[1]!r}, which no experiment has")
        return f"<!-- {found[1]} -->{values[found[1]]}<!-- end -->"

    return re.sub(r"<!-- ([^\n]*?) -->(?!\n)[^\n]*?<!-- end -->", value, text)


def write() -> None:
    """Write the page, the front page and the figures."""
    for path, text in files().items():
        path.write_text(text)
