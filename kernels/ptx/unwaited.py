"""A check of compiled kernels: loops in which a product may still read a buffer while the next copy overwrites it.

On sm_90 a product of a loop may go on (`isAsync`) until a later wait. If nothing waits for it before the same iteration
copies into the buffers that it reads, the copy may overwrite what the product has not read yet. The simulator finds this
where it runs; this check needs only the compiler's output, and no data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LOOP = re.compile(r"^(\s*)(?:%[\w:]+ = )?scf\.(?:for|while)\b")
_INDEX = re.compile(r"(%[\w#]+) = ttg\.memdesc_(?:index|subview|subslice) (%[\w#]+)")
_VIEW = re.compile(r"(%[\w#]+) = ttg\.memdesc_(?:trans|reinterpret|reshape) (%[\w#]+)")
_PRODUCT = re.compile(r"= ttng\.warp_group_dot (%[\w#]+), (%[\w#]+),")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %[\w#]+, (%[\w#]+)")
_BULK_COPY = re.compile(r"ttng\.async_tma_copy_global_to_local .*? (%[\w#]+), %[\w#]+, %[\w#]+ :")


@dataclass(frozen=True)
class UnwaitedRead:
    """A copy into a buffer that an earlier product of the same iteration may still read."""

    buffer: str
    product_line: int
    copy_line: int

    def __str__(self) -> str:
        return f"line {self.copy_line} copies into {self.buffer}, which the product of line {self.product_line} reads"


def unwaited_reads(ttgir: str) -> list[UnwaitedRead]:
    """Return the copies of all loops that may overwrite what a product of the same iteration still reads."""
    lines = ttgir.splitlines()
    return [read for first, last in _loops(lines) for read in _in_loop(lines, first, last)]


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of every innermost loop."""
    opened: list[tuple[str, int]] = []
    inner_ends = -1
    for number, line in enumerate(lines):
        if found := _LOOP.match(line):
            opened.append((found[1], number))
        elif opened and re.match(rf"{opened[-1][0]}\}}", line):
            _, first = opened.pop()
            if inner_ends < first:
                yield first, number
            inner_ends = number


def _in_loop(lines: list[str], first: int, last: int) -> Iterator[UnwaitedRead]:
    buffer_of: dict[str, str] = {}
    # Products that have begun and were not waited for, oldest first: their lines and the buffers that they read.
    pending: list[tuple[int, set[str]]] = []
    for number in range(first, last):
        line = lines[number]
        if found := _INDEX.search(line):
            buffer_of[found[1]] = buffer_of.get(found[2], found[2])
        elif (found := _VIEW.search(line)) and found[2] in buffer_of:
            buffer_of[found[1]] = buffer_of[found[2]]
        elif (found := _PRODUCT.search(line)) and "isAsync = true" in line:
            pending.append((number + 1, {buffer_of[name] for name in found.groups() if name in buffer_of}))
        elif found := _WAIT.search(line):
            left = int(found[1])
            pending = pending[-left:] if left else []
        elif (found := _COPY.search(line) or _BULK_COPY.search(line)) and found[1] in buffer_of:
            buffer = buffer_of[found[1]]
            for product_line, buffers in pending:
                if buffer in buffers:
                    yield UnwaitedRead(buffer, product_line, number + 1)
