"""Options of the Triton kernels; importing this module does not import Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from s3d_fast.base import require
from s3d_fast.maths.activations import Activation

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
        return self.precision or torch.get_float32_matmul_precision()


_DEFAULTS = TritonOptions()
_CURRENT = ContextVar("s3d_fast_triton_options", default=_DEFAULTS)


def current() -> TritonOptions:
    """Return the options in force."""
    return _CURRENT.get()


def why_not_activation(activation: Activation) -> str:
    """Return why the kernel of `curvature_coefficients` cannot take this activation; empty if it can."""
    known = activation.formula is not None and len(activation.kinks) <= MOST_KINKS
    return "" if known else f"it has no formula for {activation.name!r}"


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
        atomic: add partial sums by atomic operations, in single layers that take one launch and in EdgeConv layers.
            This takes less memory, but the last bits of the results differ from run to run. All other calls give the
            same bits every time on the same kind of GPU.
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
