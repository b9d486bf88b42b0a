"""The choice of a backend: the one requested by name, or the fastest available; and why others cannot be used."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends import extension
from s3d_fast.backends.cpu import CPU
from s3d_fast.backends.cuda import CUDA
from s3d_fast.backends.interface import Backend
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.base import require

NAMES = ("auto", "reference", "cpu", "triton")

HOW_TO_INSTALL = "pip install triton"
HOW_TO_INTERPRET = "set TRITON_INTERPRET=1 in the environment before Python starts, for tests"
# The lowest compute capability that Triton supports on NVIDIA GPUs.
LEAST_CAPABILITY = (8, 0)


def choose(name: str, *tensors: Tensor | None, differentiable: Sequence[Tensor | None] = ()) -> Backend:
    """Return the backend for these tensors: the named one, or with "auto" the fastest that supports them.

    `differentiable` are further tensors, which may require a gradient: the operators have that derivative. Inside
    `torch.compile` and `torch.export`, where no GPU need be there, "auto" always takes the operators of CUDA tensors.

    Raises:
        ValueError: the name is not one of NAMES.
        RuntimeError: the backend was requested by name and is not available, or does not support these tensors. There
            is no silent fallback.
    """
    if name not in NAMES:
        require.choice("backend", name, NAMES)
    if name == "reference":
        return REFERENCE
    given = [tensor for tensor in tensors if tensor is not None]
    further = [tensor for tensor in differentiable if tensor is not None]
    if name == "auto":
        # Triton's interpreter is for tests: CPU tensors go to the C++ extension even if the interpreter is on.
        fastest = "triton" if any(tensor.is_cuda for tensor in (*given, *further)) else "cpu"
        return REFERENCE if why_not(fastest, given, further) else _load(fastest)
    reason = why_not(name, given, further)
    if reason:
        raise unusable(name, reason)
    return _load(name)


def why_not(name: str, tensors: Sequence[Tensor] = (), differentiable: Sequence[Tensor] = ()) -> str:
    """Return why "cpu" or "triton" cannot be used on these tensors; empty if it can."""
    every = (*tensors, *differentiable)
    reason = _why_not_cpu(every) if name == "cpu" else _why_not_triton(every)
    if not reason and torch.is_grad_enabled():
        # Kernels in the interpreter are no operators.
        is_operator = name == "cpu" or all(tensor.is_cuda for tensor in every)
        without = tensors if is_operator else every
        if any(tensor.requires_grad for tensor in without):
            reason = "it has no derivative in a tensor that requires a gradient; use backend='reference'"
    return reason


def why_not_on(device: torch.device | None) -> str:
    """Return why the Triton kernels cannot run on this device, or on any; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; {HOW_TO_INSTALL}"
    wanted = "cpu" if is_interpreted() else "cuda"
    if device is not None and device.type != wanted:
        return _wrong_device(device, wanted)
    if wanted == "cuda":
        if not torch.cuda.is_available():
            return f"PyTorch finds no GPU, and on a CPU the kernels are interpreted only: {HOW_TO_INTERPRET}"
        if torch.version.hip is None and device is not None:
            capability = torch.cuda.get_device_capability(device)
            if capability < LEAST_CAPABILITY:
                return f"{device} has compute capability {capability}, but Triton needs at least {LEAST_CAPABILITY}"
    return ""


def unusable(name: str, reason: str) -> RuntimeError:
    """Return the error for a backend that was requested by name and cannot be used."""
    return RuntimeError(f"backend {name!r} cannot be used: {reason}")


def is_interpreted() -> bool:
    """Return whether Triton's kernels are interpreted on the CPU; their first use fixes this."""
    device = sys.modules.get("s3d_fast.kernels.device")
    if device is not None:
        return device.INTERPRETED
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def _load(name: str) -> Backend:
    if name == "cpu":
        return CPU
    if torch.compiler.is_compiling() or not is_interpreted():
        return CUDA
    # Triton takes long to import, and many machines do not have it.
    from s3d_fast.backends.triton import TRITON

    return TRITON


def _why_not_cpu(tensors: Sequence[Tensor]) -> str:
    if extension.module is None:
        return f"{extension.why_not}; {extension.HOW_TO_BUILD}"
    for tensor in tensors:
        if not tensor.is_cpu:
            return f"a tensor is on {tensor.device}"
    return ""


def _why_not_triton(tensors: Sequence[Tensor]) -> str:
    if torch.compiler.is_compiling():
        # A graph holds operators, which choose their kernels when it runs.
        return next((f"a tensor is on {tensor.device}" for tensor in tensors if not tensor.is_cuda), "")
    devices: set[torch.device | None] = {tensor.device for tensor in tensors}
    return next((reason for reason in map(why_not_on, devices or {None}) if reason), "")


def _wrong_device(device: torch.device, wanted: str) -> str:
    if wanted == "cpu":
        return f"a tensor is on {device}, but TRITON_INTERPRET is set: the interpreter supports CPU tensors only"
    if device.type == "cpu":
        return f"a tensor is on the CPU, where the kernels are interpreted only: {HOW_TO_INTERPRET}"
    return f"a tensor is on {device}"
