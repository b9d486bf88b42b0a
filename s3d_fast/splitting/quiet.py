"""Keeps output that C code prints to the standard streams out of the user's output."""

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
    """Discard everything that is written to file descriptors 1 and 2 inside the `with` block.

    HiGHS has `printf` calls that no option turns off. Descriptors belong to the process, so the output of other threads
    and of newly started processes is lost too while the block runs. If the descriptors cannot be redirected, the block
    runs without redirection.
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
    """A redirection of descriptors 1 and 2 to the null device, until `undo`."""

    def __init__(self, sinks: list[int], saved: dict[int, int]) -> None:
        self.sinks, self.saved = sinks, saved
        for stream in saved:
            os.dup2(sinks[-1], stream)

    def undo(self) -> None:
        # Otherwise C's buffered output would appear after the streams are restored.
        _flush()
        for stream, copy in self.saved.items():
            os.dup2(copy, stream)
        for descriptor in (*self.saved.values(), *self.sinks):
            os.close(descriptor)


def _redirect() -> _Redirection | None:
    """Redirect the open streams and return the redirection; None if no descriptor is available."""
    _flush()
    sinks: list[int] = []
    saved: dict[int, int] = {}
    try:
        # The number of a closed stream is free, and a copy of another stream would get it: occupy it first.
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
    """Flush the buffers of Python and C for the streams."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be None, closed, or a broken pipe.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    # Not every system gives access to its C library in this way.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)
