"""The Triton kernels: whether they can work on given tensors, why not, and their import at the first use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor

HOW_TO_INSTALL = "pip install triton"
HOW_TO_INTERPRET = "set TRITON_INTERPRET=1 in the environment before Python starts, for tests"
# What Triton compiles for.
LEAST_CAPABILITY = (8, 0)


def kernels() -> ModuleType:
    """Return the module whose functions have the names and arguments of those in `s3d_fast.reference`."""
    return importlib.import_module("s3d_fast.kernels.backend")


def is_interpreted() -> bool:
    """Return whether kernels are interpreted on the CPU; this is settled when they are first used."""
    device = sys.modules.get("s3d_fast.kernels.device")
    if device is not None:
        return device.INTERPRETED
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def why_not(tensors: Iterable[Tensor]) -> str:
    """Return why the kernels cannot work on these tensors; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; {HOW_TO_INSTALL}"
    wanted = "cpu" if is_interpreted() else "cuda"
    devices = {tensor.device for tensor in tensors}
    for device in devices:
        if device.type != wanted:
            return _wrong_device(device, wanted)
    if wanted == "cuda":
        if not torch.cuda.is_available():
            return f"PyTorch sees no GPU, and on a CPU the kernels are interpreted only: {HOW_TO_INTERPRET}"
        if torch.version.hip is None:
            for device in devices:
                capability = torch.cuda.get_device_capability(device)
                if capability < LEAST_CAPABILITY:
                    return f"{device} has compute capability {capability}, and Triton needs {LEAST_CAPABILITY}"
    return ""


def _wrong_device(device: torch.device, wanted: str) -> str:
    if wanted == "cpu":
        return f"a tensor is on {device}, and TRITON_INTERPRET is set: the interpreter works on CPU tensors only"
    if device.type == "cpu":
        return f"a tensor is on the CPU, where the kernels are interpreted only: {HOW_TO_INTERPRET}"
    return f"a tensor is on {device}"
