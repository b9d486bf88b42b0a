"""S v at every width: python -m benchmarks.widths.

One thread computes `splitting_matvec` in float32 for all pairs of widths D and M. A cell of the table has the speed
relative to plain PyTorch, and the fraction of the peak of multiply-adds. A cell that misses its target is marked: with
`<` if PyTorch is faster, with `*` if the fraction is too low.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from s3d_fast.backends import extension
from s3d_fast.base.tables import text_table
from s3d_fast.maths import reference

N = 32768
WIDTHS = (8, 12, 16, 24, 27, 32, 40, 48, 64, 96, 128, 256, 512)
# The smallest fraction of the peak wanted, from this width on; the smaller of D and M counts.
FRACTIONS = {16: 0.5, 64: 0.7, 128: 0.85}


def medians(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Return the median processor time of every call; they take turns for this time, at least three each."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for own, call in zip(times, calls, strict=True):
            start = time.process_time()
            call()
            own.append(time.process_time() - start)
    return [statistics.median(own) for own in times]


def measure(D: int, M: int, peak: float, seconds: float) -> tuple[float, float, float]:
    """Return the speed relative to PyTorch, the fraction of the peak, and the fraction that is wanted."""
    assert extension.module is not None
    X, C, V = torch.randn(N, D), torch.randn(N, M), torch.randn(M, D)
    ours, theirs = medians(
        [
            lambda: torch.ops.s3d_fast.splitting_matvec(X, C, V, False),
            lambda: reference.splitting_matvec(X, C, V),
        ],
        seconds,
    )
    work = 4 * N * D * M
    wanted = max((fraction for width, fraction in FRACTIONS.items() if min(D, M) >= width), default=0.0)
    # Nothing is faster than reading X and C once.
    read = X.nbytes + C.nbytes
    bound = work / (read / extension.module.read_bandwidth(read)) / peak
    return theirs / ours, work / ours / peak, min(wanted, bound)


def table(widths: Sequence[int] = WIDTHS, seconds: float = 0.2) -> tuple[str, list[str]]:
    """Return the table, and a line for every cell that misses its target."""
    if extension.module is None:
        raise RuntimeError(f"the table needs the C++ extension: {extension.why_not}; {extension.HOW_TO_BUILD}")
    torch.set_num_threads(1)
    isa = extension.module.isa()
    peak = extension.module.fma_peak(isa)
    rows, missed = [[f"{isa}, {peak / 1e9:.0f} GFLOP/s", *(f"D={D}" for D in widths)]], []
    for M in widths:
        cells = []
        for D in widths:
            ratio, fraction, wanted = measure(D, M, peak, seconds)
            marks = "<" * (ratio < 1) + "*" * (fraction < wanted)
            cells.append(f"{ratio:.1f}x {fraction:.2f}{marks}")
            if marks:
                missed.append(f"D={D} M={M}: {ratio:.2f} x PyTorch, {fraction:.3f} of the peak, wanted {wanted:.2f}")
        rows.append([f"M={M}", *cells])
    return text_table(rows), missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--seconds", type=float, default=0.2, help="how long every cell is measured")
    arguments = parser.parse_args()
    printed, missed = table(arguments.widths, arguments.seconds)
    print(printed)
    print("\n".join(missed) or "Every cell meets its target.")


if __name__ == "__main__":
    main()
