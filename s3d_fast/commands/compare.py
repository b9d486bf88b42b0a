"""s3d-fast compare: overlay runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from s3d_fast import report
from s3d_fast.base.tables import text_table
from s3d_fast.commands.parsing import Parser


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Print a table of runs and overlay them in one report. Runs that differ only in the seed are grouped."
    )
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    command.add_argument("--out", type=Path, default=Path("runs/compare"), help="default: %(default)s")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table and write the report."""
    folders = list(dict.fromkeys(folder.resolve() for folder in options.runs))
    print(text_table(report.comparison_table([report.read_run(folder) for folder in folders])))
    print(f"Written: {report.write_comparison(folders, options.out)}")
    return 0
