"""Run the code of a tutorial and put what it prints below it: python docs/execute.py docs/tutorials/own_cnn.md.

The blocks of a page run in order, in a folder of their own that is removed afterwards:

- ```python is executed; all blocks of a page share their names.
- ```python title="train.py" is written to that file.
- ```bash is run by the shell; s3d-fast, torchrun and python are those of this Python.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```(python|bash)(?: title="([\w.]+)")?\n(.*?)^```\n', re.MULTILINE | re.DOTALL)


class TutorialError(Exception):
    """The code of a tutorial has failed."""


def executed(page: Path) -> str:
    """Return the text of a page with the output of every block below it.

    Raises:
        TutorialError: a block fails; the message names the page and the line of the block.
    """
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, _inside(folder):

        def with_output(found: re.Match[str]) -> str:
            language, title, code = found.groups()
            where = f"{page.name}, line {text[: found.start()].count(chr(10)) + 2}"
            if title:
                Path(title).write_text(code)
                return found[0]
            out = _shell(code, where) if language == "bash" else _python(code, names, where)
            return found[0] + (f"\n```text\n{out.rstrip()}\n```\n" if out.strip() else "")

        return BLOCK.sub(with_output, text)


def _python(code: str, names: dict[str, object], where: str) -> str:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, where, "exec"), names)
    except Exception as error:
        raise TutorialError(f"{where}: {type(error).__name__}: {error}") from error
    return out.getvalue()


def _shell(code: str, where: str) -> str:
    scripts = Path(tempfile.mkdtemp(dir="."))
    python = f'exec "{sys.executable}"'
    for name, call in {
        "python": f'{python} "$@"',
        "s3d-fast": f'{python} -m s3d_fast "$@"',
        "torchrun": f'{python} -m torch.distributed.run "$@"',
    }.items():
        (scripts / name).write_text(f"#!/bin/sh\n{call}\n")
        (scripts / name).chmod(0o755)
    path = os.pathsep.join([str(scripts.resolve()), os.environ.get("PATH", "")])
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PATH": path, "PYTHONPATH": search.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["sh", "-ec", code], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise TutorialError(f"{where}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Work in a folder (contextlib.chdir is new in Python 3.11)."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(executed(Path(argument)))
