"""A check of compiled kernels: loops in which a product may still read a buffer while the next copy overwrites it.

On sm_90 a product of a loop may go on (`isAsync`) until a later wait. A loop reads slot i of a buffer in iteration i
and copies ahead into slot i + d, both modulo the number of slots; before the loop, d copies were begun. If both slots
are the same and nothing waits for the product before the copy, the copy may overwrite what the product has not read
yet. The same holds for the product of the iteration before, which reads slot i - 1.

The simulator finds this where it runs; this check needs only the compiler's output, and no data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_LOOP = re.compile(r"^(\s*)(?:%[\w:]+ = )?scf\.(?:for|while)\b")
_ALLOCATION = re.compile(r"(%[\w#]+) = ttg\.local_alloc\b")
_INDEX = re.compile(r"(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)\[.*?\] : !ttg\.memdesc<(\d+)x")
_VIEW = re.compile(r"(%[\w#]+) = ttg\.memdesc_(?:trans|reinterpret|reshape|subslice) (%[\w#]+)")
_PRODUCT = re.compile(r"= ttng\.warp_group_dot (%[\w#]+), (%[\w#]+),")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %[\w#]+, (%[\w#]+)")
_BULK_COPY = re.compile(r"ttng\.async_tma_copy_global_to_local .*? (%[\w#]+), %[\w#]+, %[\w#]+ :")


@dataclass(frozen=True)
class UnwaitedRead:
    """A copy into a slot of a buffer that an earlier product may still read."""

    buffer: str
    product_line: int
    copy_line: int

    def __str__(self) -> str:
        return f"line {self.copy_line} copies into {self.buffer}, which the product of line {self.product_line} reads"


def unwaited_reads(ttgir: str) -> list[UnwaitedRead]:
    """Return the copies of all loops that may overwrite what an earlier product still reads."""
    lines = ttgir.splitlines()
    return [read for first, last in _loops(lines) for read in dict.fromkeys(_Loop(lines, first, last).unwaited())]


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of every innermost loop."""
    opened: list[tuple[str, int]] = []
    inner_ends = -1
    for number, line in enumerate(lines):
        if found := _LOOP.match(line):
            opened.append((found[1], number))
        elif opened and line.startswith(opened[-1][0] + "}"):
            _, first = opened.pop()
            if inner_ends < first:
                yield first, number
            inner_ends = number


@dataclass(frozen=True)
class _Product:
    line: int
    buffers: frozenset[str]
    iteration: int


class _Loop:
    """A loop and the copies that were begun before it."""

    def __init__(self, lines: list[str], first: int, last: int) -> None:
        self.lines, self.first, self.last = lines, first, last
        self.buffer_of: dict[str, str] = {}
        self.slots: dict[str, int] = {}
        self.ahead: Counter[str] = Counter()
        for line in lines[:first]:
            # Names may be used again in other regions, for other memory.
            if found := _ALLOCATION.search(line):
                self.ahead[found[1]] = 0
            self._note_names(line)
            if copied := self._copied(line):
                self.ahead[copied] += 1

    def _note_names(self, line: str) -> None:
        if found := _INDEX.search(line):
            self.buffer_of[found[1]] = found[2]
            self.slots[found[2]] = int(found[3])
        elif (found := _VIEW.search(line)) and found[2] in self.buffer_of:
            self.buffer_of[found[1]] = self.buffer_of[found[2]]

    def _copied(self, line: str) -> str | None:
        found = _COPY.search(line) or _BULK_COPY.search(line)
        return self.buffer_of.get(found[1]) if found else None

    def unwaited(self) -> Iterator[UnwaitedRead]:
        """Go through the loop twice, since products of one iteration may go on in the next."""
        pending: list[_Product] = []  # oldest first
        for iteration in range(2):
            for number in range(self.first, self.last):
                line = self.lines[number]
                self._note_names(line)
                if (found := _PRODUCT.search(line)) and "isAsync = true" in line:
                    buffers = frozenset(self.buffer_of[name] for name in found.groups() if name in self.buffer_of)
                    pending.append(_Product(number + 1, buffers, iteration))
                elif found := _WAIT.search(line):
                    left = int(found[1])
                    pending = pending[-left:] if left else []
                elif buffer := self._copied(line):
                    for product in pending:
                        distance = self.ahead[buffer] + iteration - product.iteration
                        if buffer in product.buffers and distance % self.slots[buffer] == 0:
                            yield UnwaitedRead(buffer, product.line, number + 1)
