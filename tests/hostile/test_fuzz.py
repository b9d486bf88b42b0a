"""Damaged and hostile files: a reader refuses them by name, executes and writes nothing, and takes little memory."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.hostile.cases import FEW, MANY, QUIET
from tests.hostile.readers import READERS, Case
from tests.hostile.recording import record
from tests.hostile.watch import Memory, files_below, watched

SECONDS = 30


class TooLong(BaseException):
    """A reader has not come to an end; no `except Exception` of its own may catch this."""


@contextmanager
def bounded_time() -> Iterator[None]:
    def expired(*_: object) -> None:
        raise TooLong(f"a file was not read or refused within {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(case: Case, content: bytes, outcomes: Counter[str]) -> None:
    """Let a reader read a file with this content, and check everything that it may not do."""
    case.file.write_bytes(content)
    files, state = files_below(case.file.parent), case.state()
    memory, error = Memory(), None
    with watched() as events, bounded_time():
        try:
            case.read()
        except (ValueError, FileNotFoundError) as caught:
            error = caught
    assert not events, events
    outcomes["refused" if error else "read"] += 1
    growth = memory.growth()
    outcomes["peak"] = max(outcomes["peak"], growth)
    assert growth < case.most, f"{growth} bytes for a file of {len(content)}"
    if error is not None:
        folder_is_named = case.folder is not None and str(case.folder) in str(error)
        assert case.file.name in str(error) or folder_is_named, str(error)
        assert files_below(case.file.parent) == files
        assert case.state() == state


def fuzz(name: str, folder: Path, options: settings) -> Counter[str]:
    """Let a reader read damaged files; return how many it refused and read."""
    case, outcomes = READERS[name](folder), Counter[str]()
    case.read()

    @options
    @given(case.contents)
    def every(content: bytes) -> None:
        check(case, content, outcomes)

    every()
    return outcomes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    outcomes = fuzz(name, tmp_path, settings(QUIET, max_examples=FEW, derandomize=True))
    assert outcomes["refused"] > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    outcomes: Any = fuzz(name, tmp_path, settings(QUIET, max_examples=MANY))
    record("fuzz", name, {"cases": outcomes["refused"] + outcomes["read"], **outcomes})
