"""Products of one warp on tensor cores: mma.sync.

Products are exact and their sum is rounded once, to the type of the accumulator. A GPU rounds, or cuts off, in between:
its last bits may differ.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Step, executes, items, reader, types, unknown, writer
from s3d_fast.kernels.ptx.parse import Instruction
from s3d_fast.kernels.ptx.values import TF32_MASK, Array, dtype, halves

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

# In every fragment, thread 4 g + t of a warp holds entries of row (or column) g, at t or at 2 t and 2 t + 1.
GROUP, WITHIN = np.arange(32) // 4, np.arange(32) % 4


def shape_of(instruction: Instruction) -> tuple[int, int, int]:
    """Return M, N and K of a tensor-core instruction."""
    (found,) = (match for part in instruction.parts if (match := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", part)))
    return int(found[1]), int(found[2]), int(found[3])


def left_fragment(registers: list[Array], kind: str, M: int, K: int) -> Array:
    """Return A (warps, M, K) from the registers of all threads: (lanes,) each."""
    A = np.zeros((len(registers[0]) // 32, M, K), np.float64)
    for i, register in enumerate(registers):
        row = GROUP + 8 * (i % 2)
        if kind in ("bf16", "f16"):
            pairs = halves(register, kind).reshape(-1, 32, 2)
            for j in range(2):
                A[:, row, 2 * WITHIN + 8 * (i // 2) + j] = pairs[..., j]
        else:
            A[:, row if M > 8 else GROUP, WITHIN + 4 * (i // 2)] = _numbers(register, kind)
    return A


def right_fragment(registers: list[Array], kind: str, K: int, N: int) -> Array:
    """Return B (warps, K, N) from the registers of all threads."""
    B = np.zeros((len(registers[0]) // 32, K, N), np.float64)
    for i, register in enumerate(registers):
        if kind in ("bf16", "f16"):
            pairs = halves(register, kind).reshape(-1, 32, 2)
            for j in range(2):
                B[:, 2 * WITHIN + 8 * i + j, GROUP] = pairs[..., j]
        else:
            B[:, WITHIN + 4 * i, GROUP] = _numbers(register, kind)
    return B


def _numbers(register: Array, kind: str) -> Array:
    bits = register & TF32_MASK if kind == "tf32" else register
    return bits.view(np.float32 if kind == "tf32" else np.float64).reshape(-1, 32)


# The number of registers of A, B and C for each shape and type of A.
FRAGMENTS = {
    ("m16n8k16", "bf16"): (4, 2, 4),
    ("m16n8k8", "bf16"): (2, 1, 4),
    ("m16n8k16", "f16"): (4, 2, 4),
    ("m16n8k8", "f16"): (2, 1, 4),
    ("m16n8k8", "tf32"): (4, 2, 4),
    ("m16n8k4", "tf32"): (2, 1, 4),
    ("m8n8k4", "f64"): (1, 1, 2),
    ("m16n8k4", "f64"): (2, 1, 4),
    ("m16n8k8", "f64"): (4, 2, 4),
    ("m16n8k16", "f64"): (8, 4, 4),
}


@executes("mma")
def multiply(instruction: Instruction) -> Step:
    """D = A B + C."""
    M, N, K = shape_of(instruction)
    result, left, right, added = types(instruction)
    target, *sources = map(items, instruction.operands)
    sizes = tuple(len(part) for part in sources)
    if left != right or result != added or result not in ("f32", "f64") or "row" not in instruction.parts:
        raise unknown(instruction)
    if FRAGMENTS[f"m{M}n{N}k{K}", left] != sizes or instruction.parts[5] != "col":
        raise unknown(instruction)
    bits = "b64" if left == "f64" else "b32"
    a, b = ([reader(item, bits) for item in part] for part in sources[:2])
    c, d = [reader(item, added) for item in sources[2]], [writer(item, result) for item in target]
    places = [(GROUP + 8 * (i // 2), 2 * WITHIN + i % 2) for i in range(len(c))]

    def run(wave: Wave, mask: Mask) -> None:
        A = left_fragment([read(wave) for read in a], left, M, K)
        total = A @ right_fragment([read(wave) for read in b], left, K, N)
        # All of C is read before any of D is written: they may share registers.
        addends = [np.broadcast_to(read(wave), wave.lanes).reshape(-1, 32) for read in c]
        for (row, column), addend, write in zip(places, addends, d, strict=True):
            write(wave, (total[:, row, column] + addend).astype(dtype(result)).reshape(-1), mask)

    return run
