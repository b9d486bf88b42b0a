"""What a caller may choose about the Triton kernels; importing this does not import Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from s3d_fast.base import require

PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class TritonOptions:
    """See `triton_options`."""

    precision: str | None = None
    atomic: bool = False
    tune: bool = False
    scratch_bytes: int = 64 << 20

    @property
    def arithmetic(self) -> str:
        """The precision asked for here, or else PyTorch's own for float32 products."""
        return self.precision or torch.get_float32_matmul_precision()


_DEFAULTS = TritonOptions()
_CURRENT = ContextVar("s3d_fast_triton_options", default=_DEFAULTS)


def current() -> TritonOptions:
    """Return the options in force."""
    return _CURRENT.get()


@contextmanager
def triton_options(
    *,
    precision: str | None = None,
    atomic: bool | None = None,
    tune: bool | None = None,
    scratch_bytes: int | None = None,
) -> Iterator[TritonOptions]:
    """Set options of the Triton kernels for the calls inside a `with` block; what is not named stays as it was.

    Args:
        precision: of products, in the words of `torch.set_float32_matmul_precision`, which is asked where this is None.
            "highest": float32 by IEEE arithmetic; 16-bit rows on tensor cores, exactly, the other factor in two parts.
            "high": the same, but float32 in TF32 on tensor cores.
            "medium": the same as "high", but with 16-bit rows the other factor is rounded to 16 bits too.
        atomic: let single layers of up to 256 inputs, and EdgeConv layers, add partial sums by atomic operations: less
            memory, and results that differ in their last bits from run to run. All else, and everything without it,
            gives the same bits at every call on the same kind of GPU.
        tune: time every configuration that fits the device at the first call of each kind, and keep the fastest.
        scratch_bytes: how much memory the product may take that layers with more than 256 inputs store.

    Raises:
        ValueError: an option has a bad value.
    """
    asked = {"precision": precision, "atomic": atomic, "tune": tune, "scratch_bytes": scratch_bytes}
    asked = {name: value for name, value in asked.items() if value is not None}
    if precision is not None:
        require.choice("precision", precision, PRECISIONS)
    for name in ("atomic", "tune"):
        if not isinstance(asked.get(name, False), bool):
            raise ValueError(f"{name} must be True or False, got {asked[name]!r}")
    if scratch_bytes is not None:
        require.count("scratch_bytes", scratch_bytes)
    token = _CURRENT.set(replace(current(), **asked))  # type: ignore[arg-type]
    try:
        yield current()
    finally:
        _CURRENT.reset(token)
