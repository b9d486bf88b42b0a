"""What an experiment is: runs, the function that performs one, and what the page shows of their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What a run leaves: numbers, texts, lists and dicts of them. The harness adds "settings" and "seconds" (of the CPU).
Record = dict[str, Any]
# Records by the names of runs.
Records = Mapping[str, Record]


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
        name: unique within the experiment, such as "s2d, lr 0.1, seed 3".
        settings: everything that decides its outcome; values must be JSON. A record with other settings is not its.
        rank: runs of lower rank come first, over all experiments of a call. With the seed as rank, whatever is finished
            when a call is interrupted is complete for the first seeds.
        needs: names of runs whose records it needs, of the same experiment, or "D/NAME" for another one's.
    """

    name: str
    settings: Mapping[str, Any]
    rank: int = 0
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """An experiment of docs/results.md.

    Attributes:
        key: its letter, which also names its file, docs/results/KEY.json.
        title: what it asks.
        runs: returns its runs; within a rank, the most important first.
        perform: performs a run on the loaded data; gets the records that it needs by the names in `Run.needs`. This and
            `load` run in other processes, so they must be functions of a module.
        about: what holds for all runs, such as sizes of data and budgets; kept in the file.
        data: "cifar100" or "modelnet40", the option that names the file of its data; None if it needs none.
        load: loads the data, once in every worker.
        parts: makes the parts of docs/results.md from the records, by the names of their marks.
        values: makes short texts from the records, such as a difference with its interval, which the page may show
            within a sentence or a cell, by the names of their marks.
        figures: makes figures as SVG from the records, by the names of their files in docs/figures.
        front: makes the parts of README.md that show its records, by the names of their marks.
    """

    key: str
    title: str
    runs: Callable[[], Sequence[Run]]
    perform: Callable[[Run, Records, Any], Record]
    about: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    load: Callable[[str], Any] | None = None
    parts: Callable[[Records], Mapping[str, str]] = lambda records: {}
    values: Callable[[Records], Mapping[str, str]] = lambda records: {}
    figures: Callable[[Records], Mapping[str, str]] = lambda records: {}
    front: Callable[[Records], Mapping[str, str]] = lambda records: {}
