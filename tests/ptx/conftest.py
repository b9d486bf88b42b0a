"""A process in which Triton's kernels are compiled: in that of the tests they are interpreted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

Call = Callable[..., Any]


def prepare() -> None:
    """Let memory that is not initialised hold NaN, and use one thread."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def compiled() -> Iterator[Call]:
    """Return a function that calls another one, of a module of the tests, in the other process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare)
        # The process starts, and takes its environment, with the first call.
        executor.submit(os.getpid).result()
    with executor:
        yield lambda function, *arguments: executor.submit(function, *arguments).result()
