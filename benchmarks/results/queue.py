"""Performs the runs that are not on disk yet: worker processes of one thread each, which keep torch and data loaded."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.store import Store

# In a worker: the data of every experiment that it has performed runs of.
_loaded: dict[str, Any] = {}


def waiting(experiments: Sequence[Experiment], stores: Mapping[str, Store]) -> list[tuple[Experiment, Run]]:
    """Return the runs without a record: lower ranks first, then in the order of the experiments and of their runs."""
    found = [(one, run) for one in experiments for run in one.runs() if not stores[one.key].has(run)]
    return sorted(found, key=lambda pair: pair[1].rank)


def perform_all(
    experiments: Sequence[Experiment], stores: Mapping[str, Store], paths: Mapping[str, str], jobs: int
) -> list[str]:
    """Perform all runs that wait, several at a time; return the names of those that failed or could not begin.

    Args:
        experiments: those whose runs are performed.
        stores: of these experiments, and of all whose records they need.
        paths: the files of data, by the name that experiments know them by.
        jobs: how many runs at a time, each in a process of one thread.
    """
    queue = waiting(experiments, stores)
    total, failed = len(queue), []
    under_way: dict[Future[tuple[Record, str]], tuple[Experiment, Run]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        while queue or under_way:
            while len(under_way) < jobs and (ready := _next(queue, stores)) is not None:
                experiment, run = queue.pop(ready)
                records = {name: _record(name, experiment, stores) for name in run.needs}
                path = None if experiment.data is None else paths[experiment.data]
                work = pool.submit(_perform, experiment.key, experiment.perform, experiment.load, run, records, path)
                under_way[work] = (experiment, run)
            if not under_way:
                for experiment, run in queue:
                    print(f"{experiment.key}: {run.name}: not begun, since what it needs is not there: {run.needs}")
                return failed + [f"{experiment.key}/{run.name}" for experiment, run in queue]
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                experiment, run = under_way.pop(done)
                record, error = done.result()
                if error:
                    failed.append(f"{experiment.key}/{run.name}")
                    print(f"{experiment.key}: {run.name}: failed\n{error}", flush=True)
                    continue
                stores[experiment.key].add(run, record)
                left = f"{total - len(queue) - len(under_way)} of {total}"
                print(f"{left}  {experiment.key}: {run.name}  {record['seconds']:.1f} s", flush=True)
    return failed


def _begin() -> None:
    """Begin a worker: one thread, which ends with the process that started it, also if that is killed."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _next(queue: Sequence[tuple[Experiment, Run]], stores: Mapping[str, Store]) -> int | None:
    """Return the place of the first run whose needs are met."""
    for place, (experiment, run) in enumerate(queue):
        if all(_record(name, experiment, stores) is not None for name in run.needs):
            return place
    return None


def _record(name: str, experiment: Experiment, stores: Mapping[str, Store]) -> Record | None:
    """Return the record of a run that another one needs; None if it is not there yet."""
    key, slash, own = name.partition("/")
    return stores[key].records.get(own) if slash else stores[experiment.key].records.get(name)


def _perform(
    key: str,
    perform: Callable[[Run, Records, Any], Record],
    load: Callable[[str], Any] | None,
    run: Run,
    records: Records,
    path: str | None,
) -> tuple[Record, str]:
    """Perform one run in a worker; return its record, or the text of an error."""
    try:
        if key not in _loaded:
            _loaded[key] = load(str(path)) if load is not None else None
        began = time.process_time()
        record = perform(run, records, _loaded[key])
        return {**record, "seconds": round(time.process_time() - began, 2)}, ""
    except Exception:
        # The worker goes on with other runs; the error is printed, and the call fails in the end.
        return {}, traceback.format_exc()
