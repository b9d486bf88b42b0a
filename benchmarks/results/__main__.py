"""Run the experiments of docs/results.md, and make the page.

    python -m benchmarks.results list
    python -m benchmarks.results run [--only D,E] [--cifar100 FILE] [--modelnet40 FILE] [--jobs 1]
    python -m benchmarks.results page

`run` performs the runs that docs/results/*.json do not have yet, so that an interrupted call is simply repeated.
`page` makes all tables and figures of docs/results.md from these files.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.results import page
from benchmarks.results.experiment import Experiment
from benchmarks.results.experiments import EXPERIMENTS
from benchmarks.results.queue import perform_all, waiting
from benchmarks.results.store import Store


def main() -> None:
    """Parse the command line and do what it asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "page"))
    parser.add_argument("--only", help="keys of experiments, such as D,E; all by default")
    parser.add_argument("--cifar100", help="the file of the data")
    parser.add_argument("--modelnet40", help="the file of the data")
    parser.add_argument("--ranks", type=int, help="only runs of lower rank: the first so many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    options = parser.parse_args()
    if options.what == "page":
        page.write()
        return
    keys = list(EXPERIMENTS) if options.only is None else options.only.split(",")
    for key in keys:
        if key not in EXPERIMENTS:
            parser.error(f"--only: there is no experiment {key!r}; there are {', '.join(EXPERIMENTS)}")
    chosen = [EXPERIMENTS[key] for key in keys]
    stores = {key: Store(experiment) for key, experiment in EXPERIMENTS.items()}
    if options.what == "list":
        for experiment in chosen:
            every = len(experiment.runs())
            done = every - len(waiting([experiment], stores))
            print(f"{experiment.key:3} {done:4} of {every:4}  {experiment.title}")
        return
    paths = {"cifar100": options.cifar100, "modelnet40": options.modelnet40}
    for experiment in chosen:
        if experiment.data is not None and paths[experiment.data] is None:
            parser.error(f"experiment {experiment.key} needs --{experiment.data} FILE")
    failed = perform_all(_limited(chosen, options.ranks), stores, paths, options.jobs)
    if failed:
        raise SystemExit(f"{len(failed)} runs are missing, the first of them {failed[0]}")


def _limited(experiments: list[Experiment], ranks: int | None) -> list[Experiment]:
    """Return the experiments with only their runs of lower rank."""
    if ranks is None:
        return experiments
    return [replace(one, runs=lambda one=one: [run for run in one.runs() if run.rank < ranks]) for one in experiments]


if __name__ == "__main__":
    main()
