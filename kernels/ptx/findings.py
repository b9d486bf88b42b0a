"""What a simulation can find wrong: faults, which end it, and findings, which are collected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from s3d_fast.kernels.ptx.values import FLOATS, Array

# Sums of the same numbers in another order differ by less than this fraction, where not all of them cancel.
ROUNDING = {32: 2.0**-10, 64: 2.0**-30}


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


def conflict(written: Array, found: Array, space: str) -> str:
    """Return the kind of finding if threads write different values (unsigned, any shape) to one place."""
    bits = 8 * written.itemsize
    if bits in ROUNDING:
        one, other = written.view(FLOATS[bits]), found.view(FLOATS[bits])
        if np.allclose(one, other, rtol=ROUNDING[bits], atol=0, equal_nan=True):
            return f"{AMBIGUOUS}: threads write sums that differ by rounding to one place in {space} memory"
    return f"threads write different values to one place in {space} memory"
