"""What the compiled loops of a kernel contain: instructions, barriers and tensor-core work, from the listings.

A loop is a range of lines between a label and a branch back to it. Only innermost loops count, and of these only loops
with tensor-core instructions, unless there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# The names of tensor-core instructions in all instruction sets.
TENSOR_CORE = r"\b(?:HG?MMA|DMMA|UTC\wMMA|v_mfma)"
# The sizes of one instruction's product are in its name: m16n8k16 in PTX, 32x32x8 in AMD's assembly.
_PTX_MMA = re.compile(r"\b(wgmma\.mma_async|mma)\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\b")
_AMD_MFMA = re.compile(r"\bv_mfma_\w+?_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")


@dataclass(frozen=True)
class Loop:
    """One innermost loop."""

    instructions: int
    barriers: int
    tensor_core: int  # instructions
    multiply_adds: int  # of the tensor cores in one pass of the whole program


def ptx_loops(text: str, warps: int) -> list[Loop]:
    """Return the loops of PTX."""
    found = []
    for body in innermost(text.splitlines(), r"^(\$?\w+):", r"\bbra(?:\.uni)?\s+(\$?\w+);"):
        matches = [match for line in body if (match := _PTX_MMA.search(line))]
        # A warp issues mma together, four warps wgmma.
        groups = [warps // 4 if match[1].startswith("wgmma") else warps for match in matches]
        work = sum(
            count * int(match[2]) * int(match[3]) * int(match[4]) for count, match in zip(groups, matches, strict=True)
        )
        barriers = sum(bool(re.search(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|red)", line)) for line in body)
        found.append(Loop(_count(body, r"^\s+(?:@\S+\s+)?[a-z][\w.:]*\s"), barriers, len(matches), work))
    return _main(found)


def sass_loops(text: str) -> list[Loop]:
    """Return the loops of a listing by nvdisasm; their tensor-core work is not in it."""
    bodies = innermost(text.splitlines(), r"^(\.L_x_\d+):", r"\bBRA(?:\.\w+)*\s.*?`\((\.L_x_\d+)\)")
    return _main(
        [
            Loop(
                instructions=_count(body, r"^\s+/\*[0-9a-f]{4,}\*/\s+\S"),
                barriers=_count(body, r"\bBAR\.(?:SYNC|RED)"),
                tensor_core=_count(body, TENSOR_CORE),
                multiply_adds=0,
            )
            for body in bodies
        ]
    )


def amd_loops(text: str, warps: int) -> list[Loop]:
    """Return the loops of AMD's assembly."""
    found = []
    for body in innermost(text.splitlines(), r"^(\.LBB\w+):", r"\bs_c?branch\w*\s+(\.LBB\w+)"):
        matches = [match for line in body if (match := _AMD_MFMA.search(line))]
        work = sum(warps * int(match[1]) * int(match[2]) * int(match[3]) * int(match[4] or 1) for match in matches)
        instructions = _count(body, r"^\s+[a-z]\w+")
        found.append(Loop(instructions, _count(body, r"\bs_barrier\b"), len(matches), work))
    return _main(found)


def innermost(lines: Sequence[str], label: str, branch: str) -> Iterator[list[str]]:
    """Yield the lines of every loop that contains no other."""
    labels = {match[1]: number for number, line in enumerate(lines) if (match := re.match(label, line))}
    ends: dict[int, int] = {}
    for number, line in enumerate(lines):
        match = re.search(branch, line)
        if match and labels.get(match[1], number) < number:
            ends[labels[match[1]]] = number
    spans = sorted(ends.items())
    for first, last in spans:
        if not any(first <= other and end <= last and (other, end) != (first, last) for other, end in spans):
            yield list(lines[first : last + 1])


def _count(body: Sequence[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for line in body)


def _main(found: list[Loop]) -> list[Loop]:
    return [loop for loop in found if loop.tensor_core] or found


def overhead(found: Sequence[Loop], work: Sequence[int]) -> float:
    """Return the tensor-core work of the loops over the work that their tiles need; 0 if they need none.

    The compiler may unroll a loop; a pass of it then does the work of several tiles.
    """
    own = sorted(loop.multiply_adds for loop in found if loop.multiply_adds)
    if not own or not work:
        return 0.0
    if len(own) != len(work):
        return sum(own) / sum(work)
    # Loops are in any order.
    return max(done / needed for done, needed in zip(own, sorted(work), strict=True))
