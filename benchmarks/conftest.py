"""Fixes and reports the threads and the device of the benchmarks, and records the machine in their JSON."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks import device
from s3d_fast import env

THREADS = int(os.environ.get("S3D_THREADS", min(2, os.cpu_count() or 1)))


@pytest.fixture(autouse=True, scope="session")
def _threads_and_device() -> None:
    torch.set_num_threads(THREADS)
    reason = device.why_not()
    if reason:
        pytest.skip(reason)


def pytest_report_header() -> str:
    """Return the header line: version, threads and device of the figures."""
    where = device.why_not() or device.name()
    return f"torch {torch.__version__}, {THREADS} threads, device {device.DEVICE}: {where}"


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Write the output of `python -m s3d_fast.env` into the JSON."""
    machine_info["s3d_fast"] = {**env.report(), "threads": str(THREADS), "device": device.DEVICE}
