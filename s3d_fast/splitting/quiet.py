"""Keeps the lines that HiGHS prints by itself out of the user's output."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator

STDOUT = 1
# HiGHS has `printf` calls that no option turns off; each names the C++ function it stands in.
HIGHS_LINE = re.compile(rb"^Highs\w*::[^\n]*\n?", re.MULTILINE)

_lock = threading.Lock()
_users = 0
_redirection: _Redirection | None = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop the lines of HiGHS that reach file descriptor 1 inside the `with` block.

    Everything else that is printed meanwhile, also by other threads, appears when the block ends. If the descriptor
    cannot be redirected, the block runs without redirection.
    """
    global _users, _redirection
    with _lock:
        # Blocks in several threads may overlap: the first one redirects, the last one restores.
        if _users == 0:
            _redirection = _redirect()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _redirection is not None:
                _redirection.undo()
                _redirection = None


class _Redirection:
    """A redirection of descriptor 1 to a file without a name, until `undo`."""

    def __init__(self, file: int, saved: int) -> None:
        self.file, self.saved = file, saved
        os.dup2(file, STDOUT)

    def undo(self) -> None:
        # Otherwise C's buffered output would appear after the descriptor is restored.
        _flush()
        os.dup2(self.saved, STDOUT)
        os.lseek(self.file, 0, os.SEEK_SET)
        with open(self.file, "rb") as file:
            printed = HIGHS_LINE.sub(b"", file.read())
        with open(self.saved, "wb") as out, contextlib.suppress(OSError):
            out.write(printed)


def _redirect() -> _Redirection | None:
    """Redirect descriptor 1 and return the redirection; None if it is closed or no descriptor is free."""
    _flush()
    try:
        saved = os.dup(STDOUT)
    except OSError:
        return None
    try:
        with tempfile.TemporaryFile() as file:
            return _Redirection(os.dup(file.fileno()), saved)
    except OSError:
        os.close(saved)
        return None


def _flush() -> None:
    """Flush the buffers of Python and C for standard output."""
    # The stream may be None, closed, or a broken pipe.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    # Not every system gives access to its C library in this way.
    with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
        library = ctypes.CDLL(None)
        library.fflush(ctypes.c_void_p.in_dll(library, "stdout"))
