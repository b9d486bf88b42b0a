"""Mutation: take each barrier, fence and wait out of a kernel in turn, and see whether the simulator notices.

A mutant that is not reported must give the same bits. What was taken out is then not needed in this case: what it
orders is ordered by others. A mutant that gives other bits and is not reported would be a fault of the simulator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from s3d_fast.kernels.ptx.findings import Fault, Finding
from s3d_fast.kernels.ptx.launch import Argument, simulated

ORDERING = re.compile(
    r"^[ \t]*(?:@!?[%\w$]+\s+)?((?:bar|barrier)(?:\.cta)?\.sync|bar\.warp\.sync|cp\.async\.wait_(?:group|all)"
    r"|wgmma\.wait_group|wgmma\.fence|fence\.proxy\.async)\b[^;\n]*;",
    re.M,
)
# Why a mutant may be right, by what was taken out.
REASONS = {
    **dict.fromkeys(
        ("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync"),
        "other barriers order every two accesses that conflict",
    ),
    "bar.warp.sync": "the threads of a warp exchange nothing here, or another barrier orders it",
    "cp.async.wait_group": "a later wait covers these copies before they are read",
    "cp.async.wait_all": "a later wait covers these copies before they are read",
    "wgmma.wait_group": "a later wait covers these products before their registers and memory are used",
    "wgmma.fence": "no register of the product was written since an earlier fence",
    "fence.proxy.async": "nothing that the products read was written since an earlier fence",
}
REPORTED, UNNEEDED, MISSED = "reported", "unneeded", "missed"


@dataclass(frozen=True)
class Mutant:
    """A kernel without one of its ordering instructions."""

    kernel: str
    target: str
    instruction: str
    line: int
    outcome: str  # REPORTED, UNNEEDED or MISSED
    reason: str  # what was found, or why nothing had to be


def ordering_instructions(ptx: str) -> list[tuple[int, str]]:
    """Return the lines and names of all barriers, fences and waits."""
    return [(ptx.count("\n", 0, found.start(1)) + 1, found[1]) for found in ORDERING.finditer(ptx)]


def without_line(ptx: str, line: int) -> str:
    """Return PTX in which one line is empty."""
    lines = ptx.split("\n")
    lines[line - 1] = ""
    return "\n".join(lines)


class Played:
    """The launches of a call, and what each left in its tensors: a call with one changed kernel runs that one alone."""

    def __init__(self, target: str, call: Callable[[], Sequence[Tensor]], reachable: Sequence[Tensor]) -> None:
        self.target, self.call, self.reachable = target, call, reachable
        self.states: list[list[Tensor]] = []

        def keep(arguments: Sequence[Argument]) -> None:
            self.states.append([tensor.clone() for tensor in self.tensors(arguments)])

        with simulated(target, reachable=reachable, after=keep) as self.report:
            call()

    def tensors(self, arguments: Sequence[Argument]) -> list[Tensor]:
        """Return what a launch can read or write."""
        return [*(own for own in arguments if isinstance(own, Tensor)), *self.reachable]

    def changed(self, ptx: str, line: int) -> tuple[list[Finding], bool]:
        """Run the launches of one kernel without a line; return what is found, and whether they leave the same bits.

        The other launches are not run: their tensors get what they had.
        """
        mutated, number, are_same = without_line(ptx, line), -1, True

        def replay(own: str, arguments: Sequence[Argument]) -> bool:
            nonlocal number
            number += 1
            if own != ptx:
                for tensor, state in zip(self.tensors(arguments), self.states[number], strict=True):
                    tensor.copy_(state)
            return own != ptx

        def compare(arguments: Sequence[Argument]) -> None:
            nonlocal are_same
            for tensor, state in zip(self.tensors(arguments), self.states[number], strict=True):
                are_same &= torch.equal(_bits(tensor), _bits(state))
                tensor.copy_(state)

        def edit(kernel: str, own: str) -> str:
            return mutated

        with simulated(self.target, reachable=self.reachable, edit=edit, instead=replay, after=compare) as report:
            self.call()
        return report.findings, are_same


def mutants(target: str, call: Callable[[], Sequence[Tensor]], reachable: Sequence[Tensor] = ()) -> list[Mutant]:
    """Return what becomes of every kernel that a call launches without each of its ordering instructions.

    `call` gives the same bits every time.
    """
    played = Played(target, call, reachable)
    before, found = _kinds(played.report.findings), []
    for kernel, ptx in dict.fromkeys((launch.kernel, launch.ptx) for launch in played.report.launches):
        own = [launch.executed for launch in played.report.launches if launch.ptx == ptx]
        for line, name in ordering_instructions(ptx):
            if not any(executed[line] for executed in own):
                found.append(Mutant(kernel, target, name, line, UNNEEDED, "not executed in this case"))
                continue
            outcome, reason = _judge(played, ptx, line, before)
            found.append(Mutant(kernel, target, name, line, outcome, reason or REASONS[name]))
    return found


def _judge(played: Played, ptx: str, line: int, before: set[tuple[str, int]]) -> tuple[str, str]:
    try:
        findings, are_same = played.changed(ptx, line)
    except Fault as fault:
        return REPORTED, str(fault).split(":")[0]
    new = [finding for finding in findings if (finding.kind, finding.line) not in before]
    if new:
        return REPORTED, new[0].kind
    return (UNNEEDED, "") if are_same else (MISSED, "the result changes and nothing is reported")


def _kinds(findings: Iterable[Finding]) -> set[tuple[str, int]]:
    return {(finding.kind, finding.line) for finding in findings}


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, so that NaN equals itself."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def table(found: Iterable[Mutant]) -> str:
    """Return a table in Markdown: for each kernel and instruction how many were taken out, and what became of them."""
    counts = Counter((mutant.kernel, mutant.target, mutant.instruction, mutant.outcome) for mutant in found)
    rows = [
        "| kernel | target | instruction | removed | reported | not needed | missed |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for kernel, target, name in dict.fromkeys(key[:3] for key in counts):
        numbers = [counts[kernel, target, name, outcome] for outcome in (REPORTED, UNNEEDED, MISSED)]
        rows.append(f"| `{kernel}` | {target} | `{name}` | {sum(numbers)} | {' | '.join(map(str, numbers))} |")
    return "\n".join(rows) + "\n"
