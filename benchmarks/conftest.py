"""Threads for the benchmarks: fixed, and reported."""

from __future__ import annotations

import os

import pytest
import torch

THREADS = int(os.environ.get("S3D_THREADS", min(2, os.cpu_count() or 1)))


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    torch.set_num_threads(THREADS)


def pytest_report_header() -> str:
    """Say how many threads the figures belong to."""
    return f"torch {torch.__version__}, {THREADS} threads"
