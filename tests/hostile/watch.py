"""What a reader does while it reads: the programs it starts, the files it opens and writes, the memory it takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Events of Python's audit that no reader may cause.
FORBIDDEN = (
    *("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn"),
    *("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.", "ctypes.dlopen", "code.__new__", "exec"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "shutil."),
    *("pickle.find_class", "os.putenv", "os.unsetenv", "signal.pthread_kill", "os.kill"),
)
_active: list[list[str]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    # Libraries import modules of their own on first use.
    if event == "exec" and (_is_installed(arguments[0].co_filename) or _is_importing()):
        return
    if event.startswith(FORBIDDEN):
        _active[-1].append(f"{event} {arguments!r:.200}")
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _active[-1].append(f"opened {arguments[0]!r} for writing")


def _is_installed(file: str) -> bool:
    return file.startswith((sys.prefix, sys.base_prefix, "<frozen"))


def _is_importing() -> bool:
    """Return whether a module is being imported: dataclasses and named tuples are made by executing text."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list that receives every forbidden event, while it lasts."""
    _active.append([])
    try:
        yield _active[-1]
    finally:
        _active.pop()


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of change of every file below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found


class Memory:
    """The peak of this process's memory since a moment. Linux alone tells it; elsewhere the growth is 0."""

    def __init__(self) -> None:
        self.start = 0
        try:
            # "5" sets the peak back to what is in use now.
            Path("/proc/self/clear_refs").write_text("5")
            self.start = self._peak()
        except OSError:
            pass

    def growth(self) -> int:
        """Return the bytes by which the peak exceeds what was in use at the start."""
        return self._peak() - self.start if self.start else 0

    @staticmethod
    def _peak() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
