"""Makes the tables of docs/results.md and README.md, and the figures, from docs/results/*.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.results.experiments import EXPERIMENTS
from benchmarks.results.store import FOLDER, Store

ROOT = Path(__file__).parents[2]


def files(folder: Path = FOLDER) -> dict[Path, str]:
    """Return every file that shows the results, with the text that it should have."""
    found: dict[Path, str] = {}
    parts: dict[str, str] = {}
    front: dict[str, str] = {}
    for experiment in EXPERIMENTS.values():
        store = Store(experiment, folder)
        if not store.records:
            continue
        parts[f"{experiment.key}: machine"] = machine(experiment.key, store)
        parts |= experiment.parts(store.records)
        front |= experiment.front(store.records)
        for name, drawn in experiment.figures(store.records).items():
            found[ROOT / "docs" / "figures" / name] = drawn
    found[ROOT / "docs" / "results.md"] = filled(ROOT / "docs" / "results.md", parts)
    found[ROOT / "README.md"] = filled(ROOT / "README.md", front)
    return found


def machine(key: str, store: Store) -> str:
    """Return how many runs there are, what they took, on which machine, and the command that performs them."""
    seconds = sum(record["seconds"] for record in store.records.values())
    data = f" --{EXPERIMENTS[key].data} FILE" if EXPERIMENTS[key].data else ""
    command = f"python -m benchmarks.results run --only {key}{data}"
    return f"{len(store.records)} runs, {seconds / 60:.0f} CPU minutes ({store.machine}): `{command}`\n"


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """Return the text of a page whose computed parts, between <!-- name --> and <!-- end -->, are as they should be.

    Raises:
        ValueError: the page has no place for a part.
    """
    text = page.read_text()
    for name, part in parts.items():
        marked = f"(<!-- {re.escape(name)} -->\\n).*?(<!-- end -->)"
        if not re.search(marked, text, flags=re.S):
            raise ValueError(f"{page.name} has no place for {name!r}: add <!-- {name} --> and <!-- end -->")
        text = re.sub(marked, lambda found, part=part: found[1] + part + found[2], text, flags=re.S)
    return text


def write() -> None:
    """Write the page, the front page and the figures."""
    for path, text in files().items():
        path.write_text(text)
