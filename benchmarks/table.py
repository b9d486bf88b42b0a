"""Turn the JSON of `make bench` into tables: python -m benchmarks.table runs/bench.json > docs/benchmarks.md.

With two files, `python -m benchmarks.table BEFORE.json AFTER.json` compares two runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = """# Benchmarks

Written by `make bench`. Every figure is a ratio of times taken side by side in one run: the median over rounds. Above 1
means that s3d_fast is faster than the competitor. For hardware limits (sgemm, dgemm, FMA peak, copy) the number is the
fraction of that limit we reach, measured in the same rounds. Aims are in brackets. Memory is the peak of a call beyond
its inputs and its result, measured in its own process. Cost against data is relative to the smallest amount of data,
within a tenth of the memory that this amount would need: 1 is linear.
"""

FIGURE = """
![Bars: how many times as fast as plain PyTorch, and which fraction of the machine's limits](figures/benchmarks.svg)"""

MEMORY = {"ours": "memory", "reference": "reference's memory"}

NOTES = """
## What bounds them

- **S v, grouped S v**: arithmetic, from 64 filters on. With fewer filters, reading X and C: each entry is used too few
  times to hide the read.
- **16-bit storage**: at these sizes, widening every entry of X and C costs more time than reading fewer bytes saves.
  The benefit is half the memory.
- **EdgeConv**: gathering from and scattering to the winners, entry by entry. With 3 features there is little else.
- **gated S v**: arithmetic; it runs at the speed of `S v`. Plain PyTorch gains on it as D grows, because storing the
  products costs less and less beside the arithmetic.
- **S v with a depthwise stage**: reading. It has four arrays of coefficients and rows to read where `S v` has two.
- **ties**: in EdgeConv, one more gather and scatter, entry by entry. With 3 features there is little else.
- **dense S**: forming the products of pairs. All filters share them; with few filters, forming them dominates.
- **eigen phase**: for a narrow network, mostly capture: the forward and backward pass, and storing their results as
  rows in newly allocated memory. At 224 x 224, the products S v, which run near the arithmetic peak; the forward and
  backward pass are bound by memory. One pass over all images is slower than several passes over a few, because the
  operating system has to provide more memory and fill it with zeros. How much slower varies from run to run, so this
  ratio varies more than any other on this page.
- **a tenth of the memory**: reading ahead takes processor time from the products. The scratch file was written shortly
  before, so most of it comes from the kernel's cache, except under "file not cached", where that cache is dropped.
- **surgery**: allocating the new weights, which the operating system first fills with zeros (clone does the same). For
  `apply_splits` as a whole: checking and sorting thousands of splits in Python.

Ratios against plain PyTorch vary more between runs than ratios against a limit: PyTorch allocates its intermediate
results, and the cost of that depends on what ran before.
"""


def table(results: dict[str, Any]) -> str:
    """Return the markdown of the whole document."""
    machine = results["machine_info"]["s3d_fast"]
    keys = ("processor", "threads", "instruction sets", "torch", "extension", "device", "CUDA", "triton")
    lines = [HEAD, "Machine: " + "; ".join(f"{key} {machine.get(key, '-')}" for key in keys) + "."]
    # The notes and the figure of docs/ hold for CPUs.
    on_cpu = machine.get("device", "cpu") == "cpu"
    lines += [FIGURE] if on_cpu else []
    groups: dict[str, list[dict[str, Any]]] = {}
    for benchmark in results["benchmarks"]:
        if {"ratios", "table"} & set(benchmark["extra_info"]):
            groups.setdefault(benchmark["group"], []).append(benchmark)
    for group, members in groups.items():
        lines += ["", f"## {group}", ""]
        ready = [row for member in members for row in member["extra_info"].get("table", ())]
        lines += markdown(ready or _ratios([{**member["extra_info"], **member} for member in members]))
    return "\n".join(lines) + "\n" + (NOTES if on_cpu else "")


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


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[list[str]]:
    """Return a table of every ratio of two runs of `make bench`: before, after, and after / before."""
    old = {(one["group"], one["name"]): one["extra_info"].get("ratios", {}) for one in before["benchmarks"]}
    rows = [["benchmark", "against", "before", "after", "after / before"]]
    for one in after["benchmarks"]:
        was = old.get((one["group"], one["name"]), {})
        for name, ratio in one["extra_info"].get("ratios", {}).items():
            if name in was:
                case = f"{one['group']}: {one['param'] or one['name'].removeprefix('test_')}"
                rows.append([case, name, f"{was[name]:.2f}", f"{ratio:.2f}", f"{ratio / was[name]:.2f}"])
    return rows


if __name__ == "__main__":
    texts = [path.read_text() if (path := Path(name)).exists() else "" for name in sys.argv[1:]]
    if not all(texts):
        # A file is missing or empty if every benchmark was skipped.
        print("no benchmark ran")
    elif len(texts) == 2:
        print("\n".join(markdown(differences(*map(json.loads, texts)))))
    else:
        sys.stdout.write(table(json.loads(texts[0])))
