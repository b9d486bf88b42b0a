"""s3d-fast env: which backends are available, and why the others are not."""

from __future__ import annotations

import argparse

from s3d_fast import env
from s3d_fast.commands.parsing import Parser


def add(command: Parser) -> None:
    """Describe the command."""
    command.description = (
        "Show versions, processor, instruction sets and backends: what is there, and why the rest is not."
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    print(env.table())
    return 0
