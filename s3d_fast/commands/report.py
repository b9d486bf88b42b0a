"""s3d-fast report: draw the report of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from s3d_fast import report
from s3d_fast.commands.parsing import Parser


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = "Write report.html and figures/*.svg into the folder of a run, finished or not."
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, of recipes or of a Grower")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the reports."""
    for folder in options.runs:
        print(f"Written: {report.write_report(folder)}")
    return 0
