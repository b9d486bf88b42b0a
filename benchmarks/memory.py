"""The memory of S v beyond its inputs and its result; on a CPU, each measurement runs in its own process.

python -m benchmarks.memory 2 cpu 65536 64 64 float32

The first number is that of the threads. Five words for each further measurement may follow.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.device import DEVICE, ON_CPU
from s3d_fast.backends import operations
from tests.cases import RowsCase, random_vectors

Result = TypeVar("Result")


def extra_memory(backend: str, case: RowsCase) -> int:
    """Return the peak bytes of one product beyond its inputs and result; on a CPU, measured in a fresh process."""
    return extra_memories([(backend, case)])[0]


def extra_memories(measurements: Sequence[tuple[str, RowsCase]]) -> list[int]:
    """Return the same for several backends and cases, on a CPU each in a process that is forked from a fresh one."""
    if not ON_CPU:
        return [_measure_gpu(backend, case) for backend, case in measurements]
    words = [str(torch.get_num_threads())]
    for backend, case in measurements:
        words += [backend, str(case.N), str(case.D), str(case.M), str(case.dtype).removeprefix("torch.")]
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", *words],
        cwd=Path(__file__).parent.parent,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [int(line) for line in output.splitlines()]


def peak_memory(call: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of a call, and the peak memory of this process during the call."""
    # Reset the peak to the current use.
    Path("/proc/self/clear_refs").write_text("5")
    result = call()
    return result, _status("VmHWM")


def resident_memory() -> int:
    """Return the memory that this process uses now."""
    # Give freed memory back to the system first.
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _measure(backend: str, case: RowsCase) -> int:
    X, C = case.tensors()
    V = random_vectors(case.M, case.D, dtype=case.dtype)
    # Threads and libraries allocate memory when they are first used.
    small = RowsCase(64, 8, 8, case.dtype)
    operations.splitting_matvec(
        *small.tensors(), random_vectors(8, 8, dtype=case.dtype), backend=backend, check_finite=False
    )
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    before = resident_memory()
    result, peak = peak_memory(lambda: operations.splitting_matvec(X, C, V, backend=backend, check_finite=False))
    return peak - before - result.nbytes


def _measure_gpu(backend: str, case: RowsCase) -> int:
    X, C = (tensor.to(DEVICE) for tensor in case.tensors())
    V = random_vectors(case.M, case.D, dtype=case.dtype).to(DEVICE)
    operations.splitting_matvec(X, C, V, backend=backend, check_finite=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = operations.splitting_matvec(X, C, V, backend=backend, check_finite=False)
    return torch.cuda.max_memory_allocated() - before - result.nbytes


if __name__ == "__main__":
    threads, *rest = sys.argv[1:]
    for start in range(0, len(rest), 5):
        name, rows, width, filters, stored = rest[start : start + 5]
        child = os.fork()
        if child == 0:
            torch.set_num_threads(int(threads))
            case = RowsCase(int(rows), int(width), int(filters), getattr(torch, stored))
            print(_measure(name, case), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit("a measurement failed")
