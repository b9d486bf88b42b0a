"""What a simulation can find wrong: faults, which end it, and findings, which are collected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from s3d_fast.kernels.ptx.values import FLOATS, Array

# Sums of the same numbers in which one product is rounded or not differ by so many units in the last place at most:
# products of orthogonal vectors are a thousand times smaller than what they are sums of.
MOST_ULPS = 1 << 12


class Fault(Exception):
    """A kernel does what no GPU could carry out, or what the simulator does not know."""


@dataclass(frozen=True)
class Finding:
    """Something wrong in a kernel, where it was first seen."""

    kind: str
    kernel: str
    line: int  # of the PTX
    instruction: str
    program: tuple[int, int, int]
    thread: int

    @property
    def is_ambiguous(self) -> bool:
        """Whether only the rounding of a result is at stake.

        The compiler contracts a product and the first step of a sum over threads to one `fma`, so that threads get sums
        that differ by rounding. Where all of them write their sum to one place, the last bits are those of any thread.
        """
        return self.kind.startswith(AMBIGUOUS)

    def __str__(self) -> str:
        place = f"{self.kernel}, PTX line {self.line}, program {self.program}, thread {self.thread}"
        return f"{self.kind}: {self.instruction} ({place})"


AMBIGUOUS = "ambiguous rounding"


def conflict(written: Array, found: Array, space: str, are_floats: bool) -> str:
    """Return the kind of finding if threads write different values (unsigned, any shape) to one place.

    Only of floating-point numbers, of 32 or 64 bits, the last bits may be open: integers, pairs of 16-bit numbers,
    zeros and what is no number must be equal.
    """
    if are_floats:
        numbers = [np.abs(values.view(FLOATS[8 * values.itemsize])) for values in (written, found)]
        are_normal = all((np.isfinite(n) & (n >= np.finfo(n.dtype).tiny)).all() for n in numbers)
        # Of numbers of one sign, the bits count the units in the last place; those of both signs are far apart.
        if are_normal and (np.maximum(written, found) - np.minimum(written, found) <= MOST_ULPS).all():
            return f"{AMBIGUOUS}: threads write sums that differ by rounding to one place in {space} memory"
    return f"threads write different values to one place in {space} memory"
