"""Kills `s3d-fast grow digits` at random times and resumes it, again and again.

    python -m tests.hostile.kill_worker FOLDER PROCESSES KILLS

Prints one line of JSON: how many kills there were, how many runs came to their end, and how many of these have the same
networks, byte by byte, as a run that nobody killed. Processes are forked, so that torch is imported once; each is the
command itself.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch

from s3d_fast.commands.main import main
from s3d_fast.records.run import read_run

SMALL = ["grow", "digits", "--quiet", "--no-report", "--resume", "--device", "cpu", "--preset", "cpu"]
SMALL += ["--steps", "2", "--epochs", "3", "--widths", "2,2,2", "--train-samples", "256", "--test-samples", "64"]
SMALL += ["--batch-size", "32", "--split-samples", "64", "--split-batch", "32"]
NETWORKS = ["network-000.safetensors", "network-001.safetensors", "network-002.safetensors"]


def started(folder: Path, processes: int) -> list[int]:
    """Start the run, or resume it; return the ids of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*SMALL, "--out", str(folder)]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            try:
                if processes > 1:
                    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                    os.environ.update({name: str(value) for name, value in places.items()})
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                code = main(arguments)
            except BaseException:
                code = 1
            os._exit(code)
        children.append(child)
    return children


def ended(children: list[int], deadline: float) -> list[int] | None:
    """Return the exit codes of all processes once they have ended; None if that is not before the deadline."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if len(codes) < len(children):
            if time.monotonic() > deadline and not codes:
                return None
            time.sleep(0.002)
    return list(codes.values())


def kill(children: list[int], generator: random.Random) -> None:
    """Kill all processes at once, or one of them and, as torchrun does, the others a little later."""
    order = generator.sample(children, len(children))
    for place, child in enumerate(order):
        if place and generator.random() < 0.5:
            time.sleep(generator.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)


def networks(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in NETWORKS]


def killed_and_resumed(place: Path, processes: int, kills: int) -> dict[str, float]:
    """Return what came of so many kills."""
    generator = random.Random(processes)
    # PyTorch imports modules on first use: import them once here instead of once in every child.
    with redirect_stdout(io.StringIO()):
        assert main([*SMALL, "--out", str(place / "first")]) == 0
    begin = time.monotonic()
    assert ended(started(place / "whole", processes), begin + 600) == [0] * processes
    took, whole = time.monotonic() - begin, networks(place / "whole")
    figures = {"kills": 0, "runs": 0, "identical": 0, "kills before the first checkpoint": 0, "most kills of a run": 0}
    folder, of_this_run = place / "run-0", 0
    # The last run is resumed to its end.
    while figures["kills"] < kills or of_this_run:
        last = figures["kills"] >= kills
        children = started(folder, processes)
        codes = ended(children, time.monotonic() + (600 if last else generator.uniform(0, took)))
        if codes is None:
            kill(children, generator)
            figures["kills"] += 1
            of_this_run += 1
            figures["kills before the first checkpoint"] += not any(folder.glob("*-000.safetensors"))
            if (folder / "history.jsonl").exists():
                # Whatever the moment, what is there is whole.
                assert not read_run(folder).notes
            continue
        assert codes == [0] * processes, (codes, folder)
        figures["runs"] += 1
        figures["identical"] += networks(folder) == whole
        figures["most kills of a run"] = max(figures["most kills of a run"], of_this_run)
        shutil.rmtree(folder)
        folder, of_this_run = place / f"run-{figures['runs']}", 0
    return {**figures, "seconds of a whole run": round(took, 1)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(killed_and_resumed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
