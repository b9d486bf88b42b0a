"""Options of the Triton kernels; importing this module does not import Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from s3d_fast.base import require
from s3d_fast.maths.activations import Activation

T = TypeVar("T")
PRECISIONS = ("highest", "high", "medium")
# The kinks of an activation that the kernel of its curvature has room for.
MOST_KINKS = 2


@dataclass(frozen=True)
class TritonOptions:
    """The options that `triton_options` sets."""

    precision: str | None = None
    atomic: bool = False
    tune: bool = False
    scratch_bytes: int = 64 << 20
    cuda_graph: bool = False

    @property
    def arithmetic(self) -> str:
        """`precision` if it is set, otherwise PyTorch's own setting for float32 products."""
        return self.precision or pytorch_precision()


_DEFAULTS = TritonOptions()
_CURRENT = ContextVar("s3d_fast_triton_options", default=_DEFAULTS)


def current() -> TritonOptions:
    """Return the options in force."""
    return _CURRENT.get()


def why_not_activation(activation: Activation) -> str:
    """Return why the kernel of `curvature_coefficients` cannot take this activation; empty if it can."""
    known = activation.formula is not None and len(activation.kinks) <= MOST_KINKS
    return "" if known else f"it has no formula for {activation.name!r}"


def pytorch_precision() -> str:
    """Return PyTorch's setting for float32 products on a GPU, by either of the two ways to set it."""
    known = _old_setting(torch.get_float32_matmul_precision)
    return known or ("high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest")


def _old_setting(read: Callable[[], T]) -> T | None:
    """Return a setting by its old name; None where the new ones contradict it, and PyTorch refuses to tell."""
    try:
        return read()
    except RuntimeError:
        return None


@contextmanager
def exact_products() -> Iterator[None]:
    """Let PyTorch's own float32 products on a GPU multiply float32 numbers, unless the precision in force is "medium".

    PyTorch multiplies TF32 numbers, of 11 bits, in convolutions by default, and in matrix products if its precision is
    "high". The precision of our kernels stays what it is. The settings are those of the process: other threads see
    them, too.
    """
    precision = current().arithmetic
    if precision == "medium":
        yield
        return
    # PyTorch's types do not know these settings.
    backends: Any = torch.backends
    settings = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    matmul, convolutions = _old_setting(torch.get_float32_matmul_precision), _old_setting(_convolutions_allow_tf32)
    token = _CURRENT.set(replace(current(), precision=precision))
    try:
        _set_old(matmul and "highest", convolutions and False)
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        _set_old(matmul, convolutions)
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
        _CURRENT.reset(token)


def _convolutions_allow_tf32() -> bool:
    return torch.backends.cudnn.allow_tf32


def _set_old(matmul: str | None, convolutions: bool | None) -> None:
    """Set the settings by their old names, but for None: PyTorch compares them with the new ones."""
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def triton_options(
    *,
    precision: str | None = None,
    atomic: bool | None = None,
    tune: bool | None = None,
    scratch_bytes: int | None = None,
    cuda_graph: bool | None = None,
) -> Iterator[TritonOptions]:
    """Set options of the Triton kernels inside a `with` block; options that are not given keep their values.

    Args:
        precision: the precision of products, named as in `torch.set_float32_matmul_precision`. By default, PyTorch's
            own setting applies.
            "highest": float32 rows in IEEE arithmetic; 16-bit rows, unrounded, on tensor cores, with the other factor
            in two bfloat16 planes.
            "high": like "highest", except that float32 rows use the tensor cores of NVIDIA's GPUs, with both factors in
            three bfloat16 planes, which hold all of their bits.
            "medium": one product on tensor cores, with both factors rounded to bfloat16.
            What PyTorch computes for us (see docs/gpu.md) is IEEE at "highest" and "high"; at "medium", PyTorch's own
            settings apply.
        atomic: add partial sums by atomic operations, in single layers that take one launch and in EdgeConv layers.
            This takes less memory, but the last bits of the results differ from run to run. Other calls give the same
            bits on the same kind of GPU if tensors begin at multiples of 32 bytes, as PyTorch's do, nothing is tuned,
            and a solver has room for its copies of rows each time.
        tune: at the first call of each kind, time every configuration that fits the device, and keep the fastest.
        scratch_bytes: the memory for the intermediate product that wide layers store, and for copies of rows.
        cuda_graph: let `extremal_eigenpairs` record a step of Lanczos as a CUDA graph and repeat it until filters leave
            or spaces need more memory. It saves the host's time for every launch, which counts where layers are small.
            Where steps do not consist of launches alone, there is a warning that says why.

    Raises:
        ValueError: an option has an invalid value.
    """
    asked = {
        "precision": precision,
        "atomic": atomic,
        "tune": tune,
        "scratch_bytes": scratch_bytes,
        "cuda_graph": cuda_graph,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    if precision is not None:
        require.choice("precision", precision, PRECISIONS)
    for name in ("atomic", "tune", "cuda_graph"):
        if not isinstance(asked.get(name, False), bool):
            raise ValueError(f"{name} must be True or False, got {asked[name]!r}")
    if scratch_bytes is not None:
        require.count("scratch_bytes", scratch_bytes)
    token = _CURRENT.set(replace(current(), **asked))  # type: ignore[arg-type]
    try:
        yield current()
    finally:
        _CURRENT.reset(token)
