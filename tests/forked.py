"""Starts processes as torchrun does, from one that has imported everything: a fork takes no time, an import seconds."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# Every process that comes from one with this variable inherits it.
MARK = "S3D_MARK"


@dataclass(frozen=True)
class Launched:
    """How processes ended: torchrun's report, empty if all went well; how long they took; which are still there."""

    report: str
    seconds: float
    left: list[str]


def launch(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    nodes: int = 1,
    port: int = 0,
    run_id: str | None = None,
) -> Launched:
    """Run a function in several processes under torchrun's agent, which ends all of them if one dies.

    With several nodes, this is the agent of one of them; all have the same port and id.
    """
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=run_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    report, began = "", time.monotonic()
    try:
        elastic_launch(config, _patient)(function, *arguments)
    except ChildFailedError as error:
        report = str(error)
    seconds = time.monotonic() - began
    mark = os.environ.get(MARK)
    return Launched(report, seconds, [] if mark is None else processes_with(mark, but=os.getpid()))


def launch_nodes(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[str]:
    """Run a function in a process on each of several nodes of this machine, an agent each; return their reports."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run_id, agents = uuid.uuid4().hex, []
    for own in arguments:
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                done = launch(1, function, *own, nodes=len(arguments), port=port, run_id=run_id)
                os.write(writable, done.report.encode())
            finally:
                os._exit(0)
        os.close(writable)
        agents.append((child, readable))
    reports = []
    for child, readable in agents:
        with open(readable, "rb") as pipe:
            reports.append(pipe.read().decode())
        os.waitpid(child, 0)
    return reports


def _patient(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function; an error waits, since it may come from another process that died, which is to be seen first."""
    try:
        function(*arguments)
    except Exception:
        time.sleep(2)
        raise


def processes_with(mark: str, but: int | None = None) -> list[str]:
    """Return the processes that have the mark in their environment, but for one."""

    def has_mark(entry: Path) -> bool:
        try:
            return mark.encode() in entry.read_bytes()
        except OSError:
            return False

    found = [entry.parent.name for entry in Path("/proc").glob("[0-9]*/environ") if has_mark(entry)]
    return [process for process in found if process != str(but)]
