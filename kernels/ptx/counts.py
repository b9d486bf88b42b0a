"""Executed instructions by class, for models of the time that a kernel takes."""

from __future__ import annotations

from collections import Counter

from s3d_fast.kernels.ptx.mma import shape_of
from s3d_fast.kernels.ptx.parse import Instruction, Program
from s3d_fast.kernels.ptx.values import Array, is_float, is_type

# Opcodes that do not touch numbers of a type, by class. Everything else is arithmetic, see `class_of`.
CLASSES = {
    "bra": "branch", "brx": "branch", "ret": "branch", "exit": "branch", "shfl": "shuffle", "redux": "shuffle",
    "vote": "shuffle", "mov": "move", "selp": "move", "setp": "compare", "testp": "compare", "cvt": "convert",
    "cvta": "convert", "ldmatrix": "shared load", "stmatrix": "shared store", "fence": "fence", "membar": "fence",
    "atom": "global atomic", "red": "global atomic",
}  # fmt: skip


def class_of(instruction: Instruction) -> str:
    """Return the class of an instruction, such as "shared load", "mma m16n8k16 bf16", "barrier" or "float fma"."""
    name, parts = instruction.name, instruction.parts
    if name in CLASSES:
        return CLASSES[name]
    if name in ("ld", "st"):
        space = parts[1].split(":")[0]
        return f"{space} {'load' if name == 'ld' else 'store'}"
    if name in ("bar", "barrier"):
        return "warp barrier" if parts[1] == "warp" else "barrier"
    if name == "cp":
        return "asynchronous copy" if parts[2] in ("ca", "cg") else "asynchronous wait"
    if name == "mma" or parts[:2] == ("wgmma", "mma_async"):
        M, N, K = shape_of(instruction)
        kinds = [part for part in parts if is_type(part)]
        return f"{name} m{M}n{N}k{K} {kinds[1]}"
    if name == "wgmma":
        return "asynchronous wait" if parts[1] == "wait_group" else "fence"
    kind = parts[-1]
    if is_float(kind):
        return "float fma" if name == "fma" else f"{kind} special" if name in SPECIAL else "float"
    return "integer"


SPECIAL = ("ex2", "lg2", "sqrt", "rsqrt", "rcp", "div", "sin", "cos", "tanh")


def by_class(program: Program, executed: Array) -> dict[str, int]:
    """Return how many instructions of each class the warps have executed, the most frequent first."""
    counts: Counter[str] = Counter()
    for instruction, times in zip(program.code, executed, strict=True):
        counts[class_of(instruction)] += int(times)
    return {name: times for name, times in counts.most_common() if times}


def tensor_multiplications(program: Program, executed: Array) -> int:
    """Return the multiplications on tensor cores: M N K for each product, of one warp (mma) or of four (wgmma)."""
    total = 0
    for instruction, times in zip(program.code, executed, strict=True):
        if instruction.name == "mma" or instruction.parts[:2] == ("wgmma", "mma_async"):
            M, N, K = shape_of(instruction)
            total += M * N * K * int(times) // (4 if instruction.name == "wgmma" else 1)
    return total
