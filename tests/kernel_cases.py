"""What the tests of the Triton kernels share: GPUs that are not there, launches, and checked products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from s3d_fast.backends import operations
from s3d_fast.kernels import device, launch
from s3d_fast.kernels.compiled import TARGETS
from s3d_fast.kernels.device import Device
from s3d_fast.maths import reference
from tests.cases import DTYPE_NAMES, DTYPES, TOLERANCE, doubles, relative_error

Matvec = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)

# With few processors, so that programs have several tiles.
GPUS = {target.device.family: replace(target.device, processors=2) for target in TARGETS.values()}
every_vendor = pytest.mark.parametrize("vendor", GPUS)

# The dtypes and precisions that a table of configurations is for, by its arithmetic.
ARITHMETIC = {
    "fp64": [(torch.float64, "highest")],
    "fp32": [(torch.float32, "highest")],
    "bf16": [(torch.bfloat16, "highest")],
    "bf16x6": [(torch.float32, "high")],
    "bf16x3": [(torch.float16, "highest")],
}


def pretend(monkeypatch: pytest.MonkeyPatch, vendor: str) -> Device:
    """Let the interpreter choose configurations as on a GPU, and return that."""
    monkeypatch.setattr(device, "INTERPRETER", GPUS[vendor])
    monkeypatch.setattr(launch, "_TUNED", {})
    return GPUS[vendor]


def with_strides(X: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of X with these strides, however far apart: only the pages that are written take memory."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(X.shape, strides, strict=True))
    memory = mmap(-1, size * X.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=X.dtype).as_strided(X.shape, strides).copy_(X)


class Launch(NamedTuple):
    """One launch of a kernel."""

    grid: tuple[int, ...]
    arguments: dict[str, Any]


class Recorder:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, list[Launch]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            self.launches.append(Launch(grid, arguments))
            self.kernel[grid](**arguments)

        return run


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[Launch]:
    """Return the list that launches of a kernel will be added to."""
    recorder = Recorder(getattr(module, name))
    monkeypatch.setattr(module, name, recorder)
    return recorder.launches


def matvec(X: Tensor, C: Tensor, V: Tensor, bias: bool = False) -> Tensor:
    """Return S v by the Triton backend."""
    return operations.splitting_matvec(X, C, V, bias=bias, backend="triton")


def assert_matvec(
    X: Tensor, C: Tensor, V: Tensor, bias: bool = False, label: object = "", call: Matvec = matvec
) -> Tensor:
    """Check S v against the reference in float64, and that the arguments stay as they were; return it."""
    before = [tensor.clone() for tensor in (X, C, V)]
    SV = call(X, C, V, bias)
    assert (SV.shape, SV.dtype) == (V.shape, V.dtype), label
    error = relative_error(SV, reference.splitting_matvec(*doubles(X, C, V), bias))
    assert error < TOLERANCE[X.dtype], f"{label}: error {error}"
    for tensor, old in zip((X, C, V), before, strict=True):
        assert torch.equal(tensor, old), f"{label}: an argument was changed"
    return SV


def rounding_bound(X: Tensor, C: Tensor, V: Tensor, bias: bool, unit: float) -> Tensor:
    """Return how far S v may be off where V and the product are each rounded by a fraction `unit` of an entry."""
    X, C, V = (tensor.double().abs() for tensor in (X, C, V))
    # Below the smallest normal number rounding is absolute.
    smallest = 2.0**-24
    V = V + smallest
    return (2.1 * unit) * reference.splitting_matvec(X, C, V, bias) + smallest * reference.with_ones(X).sum()
