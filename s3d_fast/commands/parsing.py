"""The parser of a command, and options from files."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# Bytes of a file of options.
MOST_BYTES = 1 << 20


class Parser(argparse.ArgumentParser):
    """A parser that knows no abbreviations; errors about options from a file name the file."""

    where: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with a message, or raise ValueError if a file is to blame."""
        if self.where is not None:
            raise ValueError(f"{self.where}: {message}")
        super().error(message)

    def parse_values(self, where: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return options that a file gives by name, parsed and checked like those of the command line.

        Args:
            where: the file, for errors.
            values: names as on the command line, with - or _; True is a flag, a list is separated by commas, and null
                leaves the option as it is.

        Raises:
            ValueError: there is no such option, or its value is bad.
        """
        known = {action.dest: action for action in self._actions if action.option_strings}
        known = {dest: action for dest, action in known.items() if dest not in ("help", "config")}
        arguments, dests = [], []
        for name, value in values.items():
            dest = name.replace("-", "_")
            if dest not in known:
                raise ValueError(f"{where}: {name!r} is not an option; use one of {', '.join(known)}")
            if value is None or value is False:
                continue
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flag = known[dest].option_strings[-1]
            arguments.append(flag if value is True else f"{flag}={text}")
            dests.append(dest)
        self.where = where
        try:
            parsed = vars(self.parse_args(arguments))
        finally:
            self.where = None
        return {dest: parsed[dest] for dest in dests}


def read_options(path: Path) -> dict[str, Any]:
    """Return the content of a JSON or TOML file.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is damaged, or it is not a mapping.
        RuntimeError: it is TOML, and this Python cannot read that.
    """
    from s3d_fast.records.json_records import mapping, parse

    if not path.is_file():
        raise FileNotFoundError(f"--config: {path} is not a file")
    if os.stat(path).st_size > MOST_BYTES:
        raise ValueError(f"--config: {path} must have at most {MOST_BYTES} bytes")
    content = path.read_bytes()
    if path.suffix != ".toml":
        return mapping(str(path), parse(str(path), content, constant=float))
    reader = toml_reader()
    try:
        return dict(reader.loads(content.decode()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be TOML, but: {error}") from error


def toml_reader() -> ModuleType:
    """Return Python's reader of TOML; before Python 3.11, the same one as the library tomli.

    Raises:
        RuntimeError: there is none.
    """
    if sys.version_info >= (3, 11):
        return importlib.import_module("tomllib")
    try:
        return importlib.import_module("tomli")
    except ImportError as error:
        raise RuntimeError(
            "TOML needs Python 3.11 or newer, or tomli: pip install tomli; or write the file as JSON"
        ) from error
