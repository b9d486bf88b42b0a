"""What a warp executes, read from listings: instructions by the unit that they keep busy, in main loops and outside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from s3d_fast.kernels.loops import TENSOR_CORE, innermost

# One count per warp and execution, except `tensor` (multiply-adds) and what ends in "bytes".
Counts = dict[str, float]


@dataclass(frozen=True)
class Code:
    """The counts of one pass of the main loop, and of everything outside."""

    loop: Counts
    outside: Counts


_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_SASS_LOOP = r"^(\.L_x_\d+):", r"\bBRA(?:\.\w+)*\s.*?`\((\.L_x_\d+)\)"
_PTX_LOOP = r"^(\$?\w+):", r"\bbra(?:\.uni)?\s+(\$?\w+);"
_AMD_LOOP = r"^(\.LBB\w+):", r"\bs_c?branch\w*\s+(\.LBB\w+)"
_FP32 = re.compile(r"F(?:FMA|MUL|ADD|MNMX|SEL|SETP|CHK)2?\b")
# Products of tensor cores and, for kernels without, single multiplications: in PTX, and in machine code.
_PTX_PRODUCTS = re.compile(r"\b(?:wgmma\.mma_async|mma)\.sync"), re.compile(r"\bfma\.rn\.f(?:32|64)\b")
_SASS_PRODUCTS = re.compile(TENSOR_CORE), re.compile(r"\b[FD]FMA\b")


def nvidia(listing: str, ptx: str) -> Code:
    """Return the counts of a listing by nvdisasm: all instructions, and those of the float32 units.

    The assembler may unroll a loop: then one pass of the listing is several of the PTX.
    """
    has_tensor_core = bool(_SASS_PRODUCTS[0].search(listing))
    in_listing, in_ptx = (patterns[not has_tensor_core] for patterns in (_SASS_PRODUCTS, _PTX_PRODUCTS))
    main, outside = _parts(listing, _SASS_LOOP, in_listing)
    own, _ = _parts(ptx, _PTX_LOOP, in_ptx)
    unrolled = max(1, round(_number(main, in_listing) / max(1, _number(own, in_ptx))))
    loop = {name: count / unrolled for name, count in _sass(main).items()}
    return Code(loop, _sass(outside))


def _number(lines: Sequence[str], pattern: re.Pattern[str]) -> int:
    return sum(bool(pattern.search(line)) for line in lines)


def _sass(lines: Sequence[str]) -> Counts:
    names = [match[1] for line in lines if (match := _SASS.match(line)) and not match[1].startswith("NOP")]
    return {"instructions": len(names), "fp32": sum(bool(_FP32.match(name)) for name in names)}


_MFMA = re.compile(r"\bv_mfma_\w+?_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")
_LDS = re.compile(r"^\s+ds_(?:read|write|load|store)(2(?:st64)?)?_[a-z]*(\d+)")
_GLOBAL = re.compile(r"^\s+(?:global|buffer|flat)_(?:load|store)_(?:dword(?:x(\d))?|\w*(?:short|16)|\w*(?:byte|8))\b")
WAVE = 64


def amd(listing: str) -> Code:
    """Return the counts of AMD's assembly: vector instructions, matrix products, and bytes of both memories.

    The compiler moves passes out of the loop, in front of it or behind: these count as passes.
    """
    main, rest = _parts(listing, _AMD_LOOP, _MFMA)
    loop, outside = _amd(main), _amd(rest)
    moved = round(outside.get("tensor", 0) / loop["tensor"]) if loop.get("tensor") else 0
    left = {name: outside.get(name, 0) - moved * loop.get(name, 0) for name in {**outside, **loop}}
    return Code(loop, {name: count for name, count in left.items() if count})


def _amd(lines: Sequence[str]) -> Counts:
    counts: Counter[str] = Counter()
    for line in lines:
        if match := _MFMA.search(line):
            counts["tensor"] += int(match[1]) * int(match[2]) * int(match[3]) * int(match[4] or 1)
        elif re.match(r"^\s+v_", line):
            counts["instructions"] += 1
        elif match := _LDS.match(line):
            # Smaller accesses take a bank of 4 bytes as well.
            counts["shared bytes"] += (2 if match[1] else 1) * max(4, int(match[2]) // 8) * WAVE
        elif match := _GLOBAL.match(line):
            size = 4 * int(match[1] or 1) if "dword" in line else 2
            counts["requested bytes"] += size * WAVE
        elif re.match(r"^\s+s_barrier\b", line):
            counts["barriers"] += 1
    return dict(counts)


def _parts(text: str, pattern: tuple[str, str], product: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the lines of the main loops and all others. A loop with products is a main loop; without, any is."""
    lines = text.splitlines()
    bodies = list(innermost(lines, *pattern))
    main = [body for body in bodies if _number(body, product)] or bodies
    inside = [line for body in main for line in body]
    left = Counter(inside)
    outside = []
    for line in lines:
        if left[line]:
            left[line] -= 1
        else:
            outside.append(line)
    return inside, outside
