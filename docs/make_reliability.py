"""Write the tables of docs/reliability.md from docs/reliability.json: python docs/make_reliability.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS)]

from marked import filled  # noqa: E402

NOT_YET = "not yet measured"
# What other checks report; each is a row even before it has a figure.
OTHERS = {
    "sanitizers": "`make asan`: tests of the extension under AddressSanitizer and UndefinedBehaviorSanitizer",
}


def document() -> str:
    """Return the text of the page with up-to-date tables."""
    figures: dict[str, Any] = json.loads((DOCS / "reliability.json").read_text())
    parts = {
        "fuzz": fuzz(figures.get("fuzz", {})),
        "kills": kills(figures.get("kills", {})),
        "converged": converged(figures.get("converged", {})),
    }
    others = figures.get("others", {})
    rows = [[what, str(others.get(name, NOT_YET))] for name, what in OTHERS.items()]
    return filled(DOCS / "reliability.md", parts | {"others": table(["check", "outcome"], rows)})


def fuzz(figures: dict[str, dict[str, int]]) -> str:
    """Return a row for every reader."""
    rows = []
    for name, one in figures.items():
        peak = f"{one['peak'] / 2**20:.1f}" if "peak" in one else ""
        rows.append([name, f"{one['cases']:,}", f"{one.get('refused', 0):,}", f"{one.get('read', 0):,}", peak])
    total = sum(one["cases"] for one in figures.values())
    refused, read = (sum(one.get(name, 0) for one in figures.values()) for name in ("refused", "read"))
    rows.append(["all", f"{total:,}", f"{refused:,}", f"{read:,}", ""])
    return table(["file", "cases", "refused by name", "read", "peak memory, MiB"], rows)


def kills(figures: dict[str, dict[str, float]]) -> str:
    """Return a row for every number of processes."""
    names = ("kills", "kills before the first checkpoint", "most kills of a run", "runs", "identical")
    rows = [[name, *(f"{one[figure]:,}" for figure in names)] for name, one in figures.items()]
    return table(["run by", *names[:3], "runs that ended", "with the same bits"], rows)


def converged(figures: dict[str, dict[str, dict[str, int]]]) -> str:
    """Return a row for every family and solver; the products are means per filter, for each tolerance."""
    names = ("filters", "converged", "wrong eigenvalue", "wrong residual")
    tolerances = ("0.1", "0.01", "0.001")
    rows = []
    for name, one in figures.items():
        family, solver = name.split(", ", 1)
        sums = [sum(one[tol][figure] for tol in tolerances) for figure in names]
        products = [one[tol]["products"] / one[tol]["filters"] for tol in tolerances]
        rows.append([family, solver, *(f"{number:,}" for number in sums), *(f"{mean:.1f}" for mean in products)])
    head = ["filters of", "solver", "solved", "converged", "wrong eigenvalue", "wrong residual"]
    return table([*head, *(f"products, tol {tol}" for tol in tolerances)], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    (DOCS / "reliability.md").write_text(document())
