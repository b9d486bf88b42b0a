"""The device that the benchmarks run on, and its clock: S3D_DEVICE, which `make bench DEVICE=cuda` sets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

DEVICE = os.environ.get("S3D_DEVICE", "cpu")
ON_CPU = DEVICE == "cpu"
# The fast backend of the device, by name: "auto" could fall back to a slower one.
BACKEND = "cpu" if ON_CPU else "triton"


def why_not() -> str:
    """Return why the device cannot be used; empty if it can."""
    if DEVICE not in ("cpu", "cuda"):
        return f"S3D_DEVICE must be cpu or cuda, got {DEVICE!r}"
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return "S3D_DEVICE is cuda, but PyTorch sees no GPU"
    return ""


def name() -> str:
    """Return the name of the device."""
    return "CPU" if ON_CPU else torch.cuda.get_device_name()


def seconds(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes; on a GPU, by events, from its first to its last kernel."""
    if ON_CPU:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3
