"""Compile every kernel ahead of time, without a GPU, and check the result: python -m s3d_fast.kernels.aot.

What is compiled is what the operations launch. The check fails on compiler errors, on spills to local memory, on more
shared memory than the GPU has, on products without tensor-core instructions where there should be some, and on a main
loop with too many barriers or too much tensor-core work; on NVIDIA also on wgmma instructions that the assembler
serialized. The PTX for A100 and H100 is executed in outline: the check fails on races in shared memory, such as a copy
into a buffer that a wgmma may still read. Each compiled kernel is recorded with a fingerprint of what was compiled,
which tells without compiling whether the record is still valid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from s3d_fast.kernels.checked import CheckedLaunches
from s3d_fast.kernels.compiled import TARGETS, Compiled, compile_launch, identity, outline_again
from s3d_fast.kernels.device import INTERPRETED
from s3d_fast.kernels.launch import Launch

# The dtype of the rows, followed by the precision unless that is "highest".
CHECKED = ("fp32", "bf16", "fp16", "fp32 high")
EVERYTHING = (*CHECKED, "fp64", "fp32 medium", "bf16 medium", "fp16 medium")
# The most barriers in a pass of a main loop. On B200 all warps wait before and after every product, which another unit
# computes, and a pass has up to twelve products.
MOST_BARRIERS, MOST_BARRIERS_TENSOR_MEMORY = 4, 40
# The most tensor-core work in a pass of a main loop, over what its tile needs.
MOST_OVERHEAD = 1.1


def faults(compiled: Compiled) -> list[str]:
    """Return the faults of a compiled kernel; an empty list means none."""
    found = []
    device = TARGETS[compiled.target].device
    if compiled.spills:
        found.append(f"spills {compiled.spills} bytes a thread to local memory")
    if compiled.shared_memory > device.shared_memory:
        found.append(f"wants {compiled.shared_memory} bytes of shared memory of {device.shared_memory}")
    if compiled.serialized:
        found.append("waits for every wgmma: the assembler serialized them")
    if compiled.outline:
        found.append(f"is wrong in outline: {compiled.outline}")
    most = MOST_BARRIERS_TENSOR_MEMORY if device.has_tensor_memory and compiled.multiplies else MOST_BARRIERS
    if compiled.loop_barriers > most:
        found.append(f"has {compiled.loop_barriers} barriers in a loop, more than {most}")
    if not compiled.multiplies:
        return found
    if compiled.dtype not in ("fp32", "fp64") and not compiled.tensor_core:
        found.append("has no tensor-core instruction")
    # On NVIDIA, float64 has few tensor cores; its tiles are small, and warps repeat each other's work.
    if compiled.overhead > MOST_OVERHEAD and compiled.dtype != "fp64":
        found.append(f"issues {compiled.overhead:.2f} times the tensor-core work that its tile needs")
    return found


# A target, a kind of rows and an index into their CheckedLaunches: only this is sent to another process.
Job = tuple[str, str, int]


def jobs(targets: Sequence[str], kinds: Sequence[str]) -> list[Job]:
    """Return all that is to be compiled for these targets and kinds of rows."""
    return [
        (target, kind, index) for target in targets for kind in kinds for index in range(len(_launches(target, kind)))
    ]


def sample(everything: Sequence[Job]) -> list[Job]:
    """Return the first and the last job of every kernel function for NVIDIA's GPUs, and for AMD's; the last for B200.

    With all targets and CHECKED these are float32 rows, the plain variant and the older GPU; and bfloat16 rows, the
    general variant and the newer GPU.
    """
    first: dict[tuple[str, str], Job] = {}
    last: dict[tuple[str, str], Job] = {}
    for job in everything:
        device = TARGETS[job[0]].device
        key = _launch(job).kernel.__name__, device.family if device.has_tensor_memory else device.vendor
        if not device.has_tensor_memory:
            first.setdefault(key, job)
        last[key] = job
    chosen = {*first.values(), *last.values()}
    return [job for job in everything if job in chosen]


def identities(everything: Sequence[Job]) -> list[dict[str, str]]:
    """Return the name, target, rows, configuration and fingerprint of every job, without compiling."""
    return [identity(_launch(job), job[1], TARGETS[job[0]]) for job in everything]


def check(
    everything: Sequence[Job], processes: int = 2, known: Sequence[Compiled] = ()
) -> tuple[list[Compiled], list[str]]:
    """Compile all kernels except those whose fingerprint is known; return the compiled kernels and their faults.

    Where only the simulator differs, what is known of the code still holds: it is executed in outline again.
    """
    records: dict[str, Compiled | str] = {item.fingerprint: item for item in known}
    own = identities(everything)
    # Kernels that do not depend on the rows have one fingerprint for all of them.
    missing = {entry["fingerprint"]: job for entry, job in zip(own, everything, strict=True)}
    missing = {key: job for key, job in missing.items() if key not in records}
    earlier = {_code(item.fingerprint): item for item in known}
    with ProcessPoolExecutor(processes) as pool:
        mapped = pool.map(_compile, missing.values(), [earlier.get(_code(key)) for key in missing])
        results = tqdm(mapped, total=len(missing), desc="kernels", disable=None)
        records |= dict(zip(missing, results, strict=True))
    compiled, found = [], []
    for entry in own:
        where = "{kernel} ({config}) for {target} in {dtype}".format(**entry)
        record = records[entry["fingerprint"]]
        if isinstance(record, str):
            found.append(f"{where} does not compile: {record}")
            continue
        compiled.append(Compiled(**{**record.as_dict(), **entry}))
        found += [f"{where} {fault}" for fault in faults(compiled[-1])]
    return compiled, found


@cache
def _launches(target: str, kind: str) -> list[Launch]:
    return list(CheckedLaunches(TARGETS[target], kind))


def _launch(job: Job) -> Launch:
    target, kind, index = job
    return _launches(target, kind)[index]


def _code(fingerprint: str) -> str:
    """Return the part of a fingerprint that stands for the code, without the simulator."""
    return fingerprint.partition("-")[0]


def _compile(job: Job, known: Compiled | None) -> Compiled | str:
    """Return the compiled kernel, or the compiler's error; if its code is known, only execute it in outline."""
    launch, kind, target = _launch(job), job[1], TARGETS[job[0]]
    try:
        return outline_again(known, launch, target) if known else compile_launch(launch, kind, target)
    except Exception as error:
        return str(error)


def table(compiled: Sequence[Compiled]) -> str:
    """Return the compiled kernels as a Markdown table; sizes of layers may differ where names and tiles do not."""
    lines = [
        "| kernel | rows | target | tile | registers | shared memory | instructions | loop | barriers | work |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    alike: dict[tuple[str, str, int, str], list[Compiled]] = {}
    for item in compiled:
        key = item.kernel, item.dtype, list(TARGETS).index(item.target), item.config
        alike.setdefault(key, []).append(item)
    for (kernel, dtype, target, config), own in sorted(alike.items()):
        names = ("registers", "shared_memory", "instructions", "loop_instructions", "loop_barriers")
        numbers = [max(getattr(item, name) for item in own) for name in names]
        work = max(item.overhead for item in own)
        cells = (kernel, dtype, list(TARGETS)[target], config, *numbers, f"{work:.2f}" if work else "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def summary(compiled: Sequence[Compiled]) -> str:
    """Return, by GPU and rows, the largest numbers of all kernels with products, as a Markdown table."""
    lines = [
        "| target | rows | kernels | registers | spilled bytes | barriers in a pass | tensor-core work over need |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    groups: dict[tuple[str, str], list[Compiled]] = {}
    for item in compiled:
        if item.multiplies:
            groups.setdefault((item.target, item.dtype), []).append(item)
    for (target, rows), own in groups.items():
        overhead = max(item.overhead for item in own)
        numbers = (
            len(own), *(max(getattr(item, name) for item in own) for name in ("registers", "spills", "loop_barriers")),
        )  # fmt: skip
        lines.append(
            f"| {target} | {rows} | {' | '.join(map(str, numbers))} | {f'{overhead:.2f}' if overhead else ''} |"
        )
    return "\n".join(lines) + "\n"


def as_json(entries: Sequence[dict[str, Any]]) -> str:
    """Return a JSON list with one entry a line."""
    lines = ",\n".join(map(json.dumps, entries))
    return f"[\n{lines}\n]\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all kernels; return 0 if there are no faults."""
    parser = argparse.ArgumentParser(prog="python -m s3d_fast.kernels.aot", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--rows", nargs="+", choices=EVERYTHING, default=list(CHECKED))
    parser.add_argument(
        "--everything", action="store_const", dest="rows", const=list(EVERYTHING), help="all choices of --rows"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--sample", action="store_true", help="only the first and the last of every kernel function for either vendor"
    )
    parser.add_argument(
        "--fingerprints", action="store_true", help="compile nothing; print the kernels and their fingerprints as JSON"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", type=Path, help="write the compiled kernels to this file")
    output.add_argument("--update", type=Path, help="the same, but compile only kernels that the file does not have")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    chosen = jobs(options.targets, options.rows)
    if options.sample:
        chosen = sample(chosen)
    if options.fingerprints:
        print(as_json(identities(chosen)), end="")
        return 0
    known = json.loads(options.update.read_text()) if options.update else []
    compiled, found = check(chosen, options.processes, [Compiled(**entry) for entry in known])
    path = options.json or options.update
    if path:
        path.write_text(as_json([item.as_dict() for item in compiled]))
    if options.markdown:
        options.markdown.write_text(table(compiled))
    if not (path or options.markdown):
        print(table(compiled), end="")
    for fault in found:
        print(fault, file=sys.stderr)
    print(f"{len(compiled)} kernels, {len(found)} faults", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
