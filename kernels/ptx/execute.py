"""Execute a kernel's PTX on tensors, all programs of a launch, and report what was executed and found."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from s3d_fast.kernels.ptx import (  # noqa: F401
    arithmetic,
    control,
    conversion,
    copies,
    exchange,
    mma,
    transfers,
    wgmma,
)
from s3d_fast.kernels.ptx.counts import by_class, tensor_multiplications
from s3d_fast.kernels.ptx.decode import Decoded, decode, items, types
from s3d_fast.kernels.ptx.findings import Fault, Finding
from s3d_fast.kernels.ptx.parse import Immediate, Instruction, Program, parse
from s3d_fast.kernels.ptx.provenance import float_registers
from s3d_fast.kernels.ptx.shared import SharedMemory
from s3d_fast.kernels.ptx.tensors import GlobalMemory
from s3d_fast.kernels.ptx.values import is_float, to_bits, width
from s3d_fast.kernels.ptx.wave import Tally, Wave

# Programs run together up to this many threads and bytes of shared memory: with more, numpy gains nothing.
MOST_LANES, MOST_SHARED = 4096, 4 << 20
# The largest access of a thread.
LARGEST_ACCESS = 16


@dataclass(frozen=True)
class Launch:
    """One launch: what its programs executed, and what was found."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int  # per program
    shared_memory: int  # bytes per program
    findings: list[Finding]
    executed: dict[int, int]  # how many warps executed the instruction of a line of the PTX
    instructions: dict[str, int]  # the same by class
    multiplications: int  # on tensor cores
    bytes: dict[str, int]  # moved, by kind of access
    passes: dict[str, tuple[int, int]]  # over shared memory: taken, and needed at least
    seconds: float  # of the simulation
    ptx: str

    @property
    def bank_conflicts(self) -> dict[str, float]:
        """The passes over shared memory per pass needed, by kind of access: 1 without conflicts."""
        return {kind: taken / max(least, 1) for kind, (taken, least) in self.passes.items()}


def execute(
    ptx: str,
    arguments: Sequence[Tensor | int | float],
    grid: Sequence[int],
    shared_memory: int = 0,
    reachable: Sequence[Tensor] = (),
) -> Launch:
    """Execute a kernel.

    Args:
        ptx: a PTX file with one entry.
        arguments: the parameters of the kernel, in order; those that are missing are zero.
        grid: the number of programs along up to three axes.
        shared_memory: bytes for each program.
        reachable: further tensors that the kernel knows by their addresses.

    Raises:
        Fault: an unknown instruction, an access outside of all tensors or misaligned, a deadlock.
    """
    began = time.perf_counter()
    program, code = decoded(ptx)
    if program.threads % 32:
        raise Fault(f"{program.name} has {program.threads} threads, which are no whole warps")
    x_size, y_size, z_size = (*grid, 1, 1, 1)[:3]
    sizes = (x_size, y_size, z_size)
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    memory = GlobalMemory([*tensors, *reachable], program.constants, smallest_access(program, "global"))
    values = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    parameters = parameter_bytes(program, values)
    tally = Tally(np.zeros(len(code), np.int64))
    places = [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(sizes)))]
    grain = smallest_access(program, "shared")
    together = max(1, min(MOST_LANES // program.threads, MOST_SHARED // max(shared_memory, 1)))
    with np.errstate(all="ignore"):
        for first in range(0, len(places), together):
            own = places[first : first + together]
            shared = SharedMemory(len(own), shared_memory, grain)
            Wave(program, code, first, own, sizes, parameters, memory, shared, tally).run()
    memory.write_back()
    executed = {i.line: int(times) for i, times in zip(program.code, tally.executed, strict=True)}
    return Launch(
        program.name, sizes, program.threads, shared_memory, list(tally.findings.values()), executed,
        by_class(program, tally.executed), tensor_multiplications(program, tally.executed), tally.bytes, tally.passes,
        time.perf_counter() - began, ptx,
    )  # fmt: skip


@lru_cache(maxsize=64)
def decoded(ptx: str) -> tuple[Program, list[Decoded]]:
    """Return the program of a PTX file with one entry, and its decoded instructions."""
    program = parse(ptx)
    program.floats = float_registers(program)
    return program, decode(program)


def parameter_bytes(program: Program, values: Sequence[int | float]) -> dict[str, bytes]:
    """Return the parameters of a kernel as they lie in memory; those that are missing are zero."""
    if len(values) > len(program.parameters):
        raise Fault(f"{program.name} has {len(program.parameters)} parameters, got {len(values)}")
    values = [*values, *[0] * (len(program.parameters) - len(values))]
    return {name: _bytes(value, kind) for (kind, name), value in zip(program.parameters, values, strict=True)}


def _bytes(value: float, kind: str) -> bytes:
    """Return a parameter as it lies in memory; types without a sign or a point take numbers of every kind."""
    bits = width(kind)
    if isinstance(value, float) or is_float(kind):
        if bits < 32:
            raise Fault(f"a number of {bits} bits as a parameter")
        return to_bits(np.array(value, np.float64), f"f{bits}").tobytes()
    return (int(value) & ((1 << bits) - 1)).to_bytes(bits // 8, "little")


def smallest_access(program: Program, space: str) -> int:
    """Return the bytes of the smallest access to a space; all others begin at multiples of it."""
    return min((size for i in program.code if (size := _access(i, space))), default=LARGEST_ACCESS)


def _access(instruction: Instruction, space: str) -> int:
    """Return the bytes that each thread accesses in a space, 0 if none."""
    name, spaces = instruction.name, [part.split(":")[0] for part in instruction.parts]
    if name == "cp" and len(instruction.operands) > 2:
        length = instruction.operands[2]
        assert isinstance(length, Immediate)
        return int(length.text, 0)
    if name not in ("ld", "st", "atom", "red") or space not in spaces:
        return 0
    data = instruction.operands[0 if name == "ld" else -1]
    return len(items(data)) * width(types(instruction)[0]) // 8
