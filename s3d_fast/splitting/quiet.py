"""A solver that prints: what C code writes to the standard streams of the process, kept from the user's output."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

# Standard output and standard error.
STREAMS = (1, 2)

_lock = threading.Lock()
_users = 0
_redirection: _Redirection | None = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let nothing that is written to file descriptors 1 and 2 inside the `with` block reach anybody.

    HiGHS has `printf` calls that none of its options turns off. Descriptors belong to the process: what other threads
    print meanwhile is lost too, and so is the output of a process that is started meanwhile. Where the descriptors
    cannot be redirected the block runs all the same.
    """
    global _users, _redirection
    with _lock:
        # Blocks of several threads overlap: the first redirects, and the last restores.
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
    """Descriptors 1 and 2 lead to the null device, until `undo`."""

    def __init__(self, sinks: list[int], saved: dict[int, int]) -> None:
        self.sinks, self.saved = sinks, saved
        for stream in saved:
            os.dup2(sinks[-1], stream)

    def undo(self) -> None:
        # What C still holds back would come out later.
        _flush()
        for stream, copy in self.saved.items():
            os.dup2(copy, stream)
        for descriptor in (*self.saved.values(), *self.sinks):
            os.close(descriptor)


def _redirect() -> _Redirection | None:
    """Redirect the streams that are open; None where there are no descriptors to be had."""
    _flush()
    sinks: list[int] = []
    saved: dict[int, int] = {}
    try:
        # A stream that is closed is a free number, which a copy of another stream would get: fill it first.
        while not sinks or sinks[-1] <= max(STREAMS):
            sinks.append(os.open(os.devnull, os.O_WRONLY))
        for stream in STREAMS:
            if stream not in sinks:
                saved[stream] = os.dup(stream)
        return _Redirection(sinks, saved)
    except OSError:
        for stream, copy in saved.items():
            os.dup2(copy, stream)
        for descriptor in (*saved.values(), *sinks):
            os.close(descriptor)
        return None


def _flush() -> None:
    """Write out what Python and C hold back for the streams."""
    for stream in (sys.stdout, sys.stderr):
        # There may be no stream, a closed one, or a broken pipe behind it.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    # Not every system has its C library under this name.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)
