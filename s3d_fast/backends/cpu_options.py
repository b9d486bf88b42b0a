"""Options of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from s3d_fast.base import require
from s3d_fast.kernels.options import PRECISIONS


@dataclass(frozen=True)
class CpuOptions:
    """The options that `cpu_options` sets."""

    precision: str = "highest"


_DEFAULTS = CpuOptions()
_CURRENT = ContextVar("s3d_fast_cpu_options", default=_DEFAULTS)


def current() -> CpuOptions:
    """Return the options in force."""
    return _CURRENT.get()


@contextmanager
def cpu_options(*, precision: str) -> Iterator[CpuOptions]:
    """Set options of the CPU kernels inside a `with` block.

    Args:
        precision: the precision of products, named as for `triton_options`; "highest" by default.
            "highest", "high": bfloat16 rows are multiplied in float32.
            "medium": where X and C are bfloat16, `splitting_matvec` and `splitting_matvec_grouped` round V and the
            product X V^T * C to bfloat16 too, and sum in float32. The error is about 0.3% of the largest entry.
            Processors without AVX512_BF16 compute as for "highest", and so does `torch.compile`.

    Raises:
        ValueError: the precision has another name.
    """
    require.choice("precision", precision, PRECISIONS)
    token = _CURRENT.set(CpuOptions(precision))
    try:
        yield current()
    finally:
        _CURRENT.reset(token)
