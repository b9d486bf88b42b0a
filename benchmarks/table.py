"""The table of ratios from what `make bench` wrote: python -m benchmarks.table runs/bench.json > docs/benchmarks.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = """# Benchmarks

Written by `make bench`; every figure is a ratio of times taken side by side in one run, the median over rounds. Above 1
means that s3d_fast is faster than what it is compared with; of a limit (sgemm, dgemm, copy) it is the fraction of its
speed, measured in the same rounds. The aim, where there is one, stands in brackets. Memory is what a call takes at its
peak beyond its inputs and its result, in a process of its own. Cost against data is relative to the least data, within
a tenth of the memory that these would need: 1 is linear.
"""

MEMORY = {"ours": "memory", "reference": "reference's memory"}

NOTES = """
## What bounds them

- **S v, grouped S v**: the multipliers, from 64 filters on; with fewer, reading X and C, whose entries are then used
  too few times to hide it.
- **16-bit storage**: widening every entry of X and C costs more time than reading fewer bytes saves at these sizes; its
  use is half the memory.
- **EdgeConv**: gathering from and scattering to the winners, entry by entry; with 3 features there is little else.
- **dense S**: forming the products of pairs, which few filters share when there are few filters.
- **eigen phase**: of a narrow network, capture is the larger part: the forward and backward pass themselves, and laying
  out what they leave as rows, in newly allocated memory. At 224 x 224 it is the products S v, which run near the peak
  of the multipliers, while the forward and backward pass are bound by memory; a pass of all images at once is slower
  than one of few at a time because the operating system has to provide, and fill with zeros, more memory. How much
  slower varies from run to run, and this ratio with it, more than any other in this page.
- **a tenth of the memory**: reading ahead takes a core's time from the products. The scratch file was written shortly
  before: most of it is read from the kernel's cache, unless it is told to forget it (file not cached).
- **surgery**: allocating the new weights, which the operating system fills with zeros first (clone does the same);
  `apply_splits` as a whole, checking and sorting thousands of splits in Python.

Ratios against plain PyTorch vary more between runs than those against a limit: it allocates its intermediate results,
and what that costs depends on what ran before.
"""


def table(results: dict[str, Any]) -> str:
    """Return the markdown of the whole document."""
    machine = results["machine_info"]["s3d_fast"]
    keys = ("processor", "threads", "instruction sets", "torch", "extension", "device", "CUDA", "triton")
    lines = [HEAD, "Machine: " + "; ".join(f"{key} {machine.get(key, '-')}" for key in keys) + "."]
    groups: dict[str, list[dict[str, Any]]] = {}
    for benchmark in results["benchmarks"]:
        if {"ratios", "table"} & set(benchmark["extra_info"]):
            groups.setdefault(benchmark["group"], []).append(benchmark)
    for group, members in groups.items():
        lines += ["", f"## {group}", ""]
        ready = [row for member in members for row in member["extra_info"].get("table", ())]
        lines += markdown(ready or _ratios([{**member["extra_info"], **member} for member in members]))
    # What bounds them was found out on CPUs.
    return "\n".join(lines) + "\n" + (NOTES if machine.get("device", "cpu") == "cpu" else "")


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def _ratios(members: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for every benchmark: its ratios, its memory, and other figures."""

    def names(key: str) -> list[str]:
        return list(dict.fromkeys(name for member in members for name in member.get(key, ())))

    rows = [["case", *names("ratios"), *(MEMORY[key] for key in names("memory")), *names("figures")]]
    for member in members:
        row = [member["param"] or member["name"].removeprefix("test_")]
        for name in names("ratios"):
            aim = f" ({member['aims'][name]:.2f})" if name in member["aims"] else ""
            row.append(f"{member['ratios'][name]:.2f}{aim}" if name in member["ratios"] else "")
        memory = member.get("memory", {})
        row += [f"{memory[key] / 2**20:.1f} MiB" if key in memory else "" for key in names("memory")]
        row += [member.get("figures", {}).get(name, "") for name in names("figures")]
        rows.append(row)
    return rows


if __name__ == "__main__":
    path = Path(sys.argv[1])
    written = path.read_text() if path.exists() else ""
    # Nothing is written where every benchmark was skipped.
    sys.stdout.write(table(json.loads(written)) if written else "no benchmark ran\n")
