"""Tables of the page, and values of records by row, learning rate and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.results.experiment import Record, Records

Values = dict[str, dict[float, dict[int, float]]]  # row -> learning rate -> seed -> value


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def by_rate_and_seed(records: Records, value: Callable[[Record], float]) -> Values:
    """Return a value of all records by the settings "row", "lr" and "seed"."""
    found: Values = {}
    for record in records.values():
        settings = record["settings"]
        own = found.setdefault(settings["row"], {}).setdefault(settings["lr"], {})
        own[settings["seed"]] = value(record)
    return found
