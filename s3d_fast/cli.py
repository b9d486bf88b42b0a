"""The command line: s3d-fast COMMAND."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from s3d_fast import __version__
from s3d_fast.commands import compare, grow, inspect, rbf, recipes, report, visualize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, which is 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="s3d-fast", description="Grow neural networks by signed splitting steepest descent."
    )
    parser.add_argument("--version", action="version", version=f"s3d_fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (grow, recipes, report, compare, inspect, visualize, rbf):
        command.add(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"s3d-fast: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
