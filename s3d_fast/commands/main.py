"""The command line: s3d-fast COMMAND."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from s3d_fast.base.version import VERSION
from s3d_fast.commands.parsing import Parser

# The commands, each a module of `commands`. It is imported when it is asked for: most of them take seconds to import.
COMMANDS = {
    "demo": "what signed splits can do that positive ones cannot, on a photograph and on curves",
    "grow": "grow a network by a recipe",
    "recipes": "list the recipes",
    "report": "draw the report of a run",
    "inspect": "show which layers of a saved network can be split, and their spectra",
    "time": "time forward passes of networks, side by side",
    "compare": "overlay runs in one report",
    "table": "run the rows of one of the paper's tables, beside its figures",
    "visualize": "draw filters before and after splitting, by guided backpropagation",
    "rbf": "the paper's toy experiment: RBF networks grown by S2D and S3D",
    "theorems": "Theorems 4 and 5 of the paper: what they guarantee, and what happens",
    "env": "show which backends are available here, and why the others are not",
}
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for bad input, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parser(given).parse_args(given, argparse.Namespace(arguments=given[1:]))
        return int(options.run(options))
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"s3d-fast: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"s3d-fast: interrupted{_way_on(given)}", file=sys.stderr)
        return INTERRUPTED


def _parser(given: Sequence[str]) -> Parser:
    """Return the parser; only the command that was given knows its options."""
    parser = Parser(prog="s3d-fast", description="Grow neural networks by signed splitting steepest descent.")
    parser.add_argument("--version", action="version", version=f"s3d_fast {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        if name in given[:1]:
            importlib.import_module(f"s3d_fast.commands.{name}").add(command)
    return parser


def _way_on(given: Sequence[str]) -> str:
    """Return how to continue what was interrupted; empty for commands that have nothing to continue."""
    if "grow" not in given[:1]:
        return ""
    resumed = shlex.join([*given, *([] if "--resume" in given else ["--resume"])])
    if "WORLD_SIZE" in os.environ:
        return f"; to continue: torchrun as before, with -m s3d_fast {resumed}"
    return f"; to continue: s3d-fast {resumed}"


if __name__ == "__main__":
    sys.exit(main())
