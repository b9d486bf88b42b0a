"""Settings that hold for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

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


def patch_the_language_once() -> None:
    """Let Triton's interpreter patch its language once for a launch, not at every call of a function in the kernel."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang

    @cache
    def modules(function: Any) -> list[Any]:
        seen = {id(value) for value in function.__globals__.values()}
        return [module for module in (language, language.core) if id(module) in seen]

    def once(function: Any) -> Any:
        is_patched = not any(language.core.is_builtin(module.load) for module in modules(function))
        return interpreter._LangPatchScope() if is_patched else patch(function)

    # Older versions undo nothing, and so have no list of changes.
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = once


patch_the_language_once()

ISAS: list[str] = extension.module.available_isas() if extension.module else []

# Files that take longest, longest first. They start first, so that all workers finish at about the same time.
SLOW = (
    "kernels/test_aot.py",
    "ptx/test_families.py",
    "ptx/test_mutation.py",
    "growth/test_growth.py",
    "network/test_random_maps.py",
    "network/test_random_sequences.py",
    "network/test_random_vectors.py",
    "growth/test_distributed.py",
    "capture/test_memory_budget.py",
    "backends/test_agreement.py",
    "recipes/test_recipes.py",
    "capture/test_capture.py",
    "commands/test_cli.py",
    "splitting/test_surgery.py",
    "splitting/test_selection.py",
    "capture/test_sharding.py",
    "backends/test_agreement_entries.py",
    "backends/test_backends.py",
    "capture/test_exact_curvature.py",
    "kernels/test_kernels.py",
    "backends/test_extension.py",
    "visualize/test_visualize.py",
    "kernels/test_triton.py",
    "kernels/test_kernels_edgeconv.py",
    "growth/test_checkpoint.py",
    "growth/test_parallel.py",
    "test_examples.py",
    "backends/test_agreement_lanczos.py",
    "kernels/test_kernels_grouped.py",
    "network/test_followed.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let slow files come first."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(item.path, len(SLOW)))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what stays: torch and thousands of tests, at every pass."""
    gc.collect()
    gc.freeze()


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
