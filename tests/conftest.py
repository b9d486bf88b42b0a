"""Settings that hold for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Triton's kernels run in its interpreter, which has to be settled before they are imported.
os.environ["TRITON_INTERPRET"] = "1"
# It computes with numpy, whose threads would wait for each other.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch

from s3d_fast.backends import extension
from s3d_fast.backends.choice import choose
from s3d_fast.backends.interface import Backend

# The shapes here are small: handing work to a second thread costs more than it saves, and varies from run to run.
torch.set_num_threads(1)

ISAS: list[str] = extension.module.available_isas() if extension.module else []


@pytest.fixture(params=ISAS, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use one instruction set; memory that is not initialised holds NaN."""
    with _instruction_set(request.param), _poisoned_memory():
        yield request.param


@pytest.fixture(params=["reference", *(f"cpu-{isa}" for isa in ISAS), "triton"], scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend, "cpu" once for every instruction set; memory that is not initialised holds NaN."""
    name, _, isa = request.param.partition("-")
    if name == "triton":
        pytest.importorskip("triton")
    with _instruction_set(isa), _poisoned_memory():
        yield choose(name)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Let memory that is not initialised hold NaN, so that an entry left out is noticed."""
    with _poisoned_memory():
        yield


@contextmanager
def _instruction_set(name: str) -> Iterator[None]:
    """Let the C++ extension use the named instruction set, where one is named."""
    if not name:
        yield
        return
    assert extension.module is not None
    best = extension.module.isa()
    extension.module.use_isa(name)
    yield
    extension.module.use_isa(best)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
