"""What a simulation can find wrong: faults, which end it, and findings, which are collected."""

from __future__ import annotations

from dataclasses import dataclass


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

    def __str__(self) -> str:
        place = f"{self.kernel}, PTX line {self.line}, program {self.program}, thread {self.thread}"
        return f"{self.kind}: {self.instruction} ({place})"
