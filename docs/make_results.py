"""Write the tables of docs/results.md and README.md from docs/results.json: python docs/make_results.py."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from marked import filled  # noqa: E402

from s3d_fast.records.record import EIGEN_STAGES  # noqa: E402

CIFAR, MODELNET = "cifar100-mobilenet", "modelnet40-dgcnn"
Run = dict[str, Any]
FRONT_PAGE = {
    "s3d": "grown by S3D, c = 1.3",
    "s2d": "grown by S2D",
    "net2net": "random splits (net2net)",
    "uniform": "same size, from scratch, all epochs",
    "scratch": "same size, from scratch, one phase",
}


def document() -> str:
    """Return the text of docs/results.md with up-to-date tables."""
    results = json.loads((DOCS / "results.json").read_text())
    runs = results["runs"]
    parts = {
        "machine": f"{results['environment']['processor']}; torch {results['environment']['torch']}, "
        f"Python {results['environment']['python']}; one thread per run, two runs at a time.\n",
        "commands": commands(runs),
        "cifar100": growth(runs, CIFAR, ("s3d", "s2d", "net2net", "uniform", "scratch")),
        "cost": cost(runs),
        "paired": paired(runs),
        "bounds": bounds(runs),
        "modelnet40": growth(runs, MODELNET, ("s3d", "s2d")),
        "forward": forward(results),
        "signs": signs(runs),
        "shares": shares(runs),
        "promises": promises(runs),
        "loading": f"```\n{results['loading']}\n```\n",
    }
    return filled(DOCS / "results.md", parts)


def front_page() -> str:
    """Return the text of README.md with the table of what to expect."""
    runs = json.loads((DOCS / "results.json").read_text())["runs"]
    return filled(DOCS.parent / "README.md", {"expect": expect(runs)})


def expect(runs: dict[str, Run]) -> str:
    """Return the last network of every method on CIFAR-100: parameters, accuracy, and what its training took."""
    rows = [["method", "parameters", "accuracy (%)", "time of training, relative to S3D"]]
    times = training_times(runs)
    for method in ("s3d", "s2d", "net2net", "uniform", "scratch"):
        last = [run["phases"][-1] for run in of(runs, CIFAR, method)]
        rows.append(
            [
                FRONT_PAGE[method],
                f"{statistics.median(phase['params'] for phase in last):.0f}",
                f"{statistics.median(100 * phase['accuracy'] for phase in last):.1f}",
                f"{statistics.median(times[method]):.2f}",
            ]
        )
    return table(rows)


def commands(runs: dict[str, Run]) -> str:
    """Return the commands of seed 0."""
    lines = [run["command"] for name, run in runs.items() if name.endswith("-0")]
    return "\n".join(["```", *lines, "```", ""])


def growth(runs: dict[str, Run], recipe: str, methods: Sequence[str]) -> str:
    """Return parameters and accuracy after every step, by method: median [least, greatest] over the seeds."""
    rows = [["step", *(f"{title(method)}: parameters | accuracy" for method in methods)]]
    found = {method: of(runs, recipe, method) for method in methods}
    steps = max(len(run["phases"]) for group in found.values() for run in group)
    for step in range(steps):
        row = [str(step)]
        for group in found.values():
            phases = [run["phases"][step] for run in group if step < len(run["phases"])]
            row.append(
                " | ".join(
                    [
                        spread([phase["params"] for phase in phases], "{:.0f}"),
                        spread([100 * phase["accuracy"] for phase in phases], "{:.1f}"),
                    ]
                )
            )
        rows.append(row)
    return table(rows)


def cost(runs: dict[str, Run]) -> str:
    """Return the total training time for the network after the last step, relative to S3D."""
    rows = [["method", "total training time for the last network, relative to S3D"]]
    rows += [[title(method), spread(ratios, "{:.2f}")] for method, ratios in training_times(runs).items()]
    return table(rows)


def training_times(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Return the total training time of every seed's last network, relative to S3D, by method."""
    seeds = {run["seed"]: run["phases"][0]["seconds"]["train"] for run in of(runs, CIFAR, "seed")}

    def seconds(method: str, run: Run) -> float:
        if method in ("uniform", "scratch"):
            return run["phases"][-1]["seconds"]["train"]
        return seeds[run["seed"]] + sum(phase["seconds"]["train"] for phase in run["phases"])

    base = {run["seed"]: seconds("s3d", run) for run in of(runs, CIFAR, "s3d")}
    return {
        method: [seconds(method, run) / base[run["seed"]] for run in of(runs, CIFAR, method)]
        for method in ("s3d", "s2d", "net2net", "uniform", "scratch")
    }


def paired(runs: dict[str, Run]) -> str:
    """Return the difference between each method's last accuracy and S2D's, seed by seed."""
    base = {run["seed"]: run for run in of(runs, CIFAR, "s2d")}
    rows = [["method", "accuracy after the last step minus S2D's, seed by seed", "median"]]
    for method in ("s3d", "net2net", "uniform", "scratch"):
        differences = [
            100 * (run["phases"][-1]["accuracy"] - base[run["seed"]]["phases"][-1]["accuracy"])
            for run in of(runs, CIFAR, method)
        ]
        shown = ", ".join(f"{difference:+.2f}" for difference in differences)
        rows.append([title(method), shown, f"{statistics.median(differences):+.2f}"])
    return table(rows)


def bounds(runs: dict[str, Run]) -> str:
    """Return accuracy after one step by c."""
    by_bound = {1.0: "s2d", 1.1: "c1.1", 1.3: "s3d", 1.5: "c1.5", 2.0: "c2.0"}
    rows = [["c", "parameters", "accuracy", "signed splits"]]
    for c, method in by_bound.items():
        group = [run["phases"] for run in of(runs, CIFAR, method)]
        rows.append(
            [
                f"{c:g}",
                spread([phases[1]["params"] for phases in group], "{:.0f}"),
                spread([100 * phases[1]["accuracy"] for phases in group], "{:.2f}"),
                ", ".join("{} of {}".format(*phases[0]["signed"][str(c)]) for phases in group),
            ]
        )
    return table(rows)


def forward(results: dict[str, Any]) -> str:
    """Return forward times of the grown DGCNNs, relative to the full-width network."""
    rows = [["step", *(f"{title(method)}: forward time" for method in ("s3d", "s2d"))]]
    times = results["forward"]
    groups = {
        method: [entry["relative"] for name, entry in times.items() if f"-{method}-" in name]
        for method in ("s3d", "s2d")
    }
    rows += [
        [str(step), *(spread([one[step] for one in group], "{:.2f}") for group in groups.values())]
        for step in range(len(groups["s3d"][0]))
    ]
    full = next(iter(times.values()))["full_params"]
    return table(rows) + f"\nRelative to the network with the full widths, which has {full} parameters.\n"


def signs(runs: dict[str, Run]) -> str:
    """Return how many splits in the networks grown by S3D would have a negative weight, by c and step."""
    rows = [["recipe", "c", *(f"step {step}" for step in range(1, 5))]]
    for recipe in (CIFAR, MODELNET):
        group = [[phase["signed"] for phase in run["phases"] if phase["signed"]] for run in of(runs, recipe, "s3d")]
        for c in group[0][0]:
            cells = [
                "; ".join("{} of {}".format(*one[step][c]) for one in group) if step < len(group[0]) else ""
                for step in range(4)
            ]
            rows.append([recipe, f"{float(c):g}", *cells])
    return table(rows)


def shares(runs: dict[str, Run]) -> str:
    """Return the eigen phase's share of the total time of S3D runs, including the training of the seed."""
    rows = [["recipe", "eigen phase", "of which capture", "solve", "select", "split", "measure"]]
    for recipe in (CIFAR, MODELNET):
        seeds = {run["seed"]: run for run in of(runs, recipe, "seed")}
        found = []
        for run in of(runs, recipe, "s3d"):
            phases = [*seeds[run["seed"]]["phases"], *run["phases"]]
            total = sum(sum(phase["seconds"].values()) for phase in phases)
            stages = [sum(phase["seconds"].get(stage, 0.0) for phase in phases) / total for stage in EIGEN_STAGES]
            found.append([sum(stages), *stages])
        rows.append([recipe, *(spread([100 * one[i] for one in found], "{:.2f}") + " %" for i in range(6))])
    return table(rows)


def promises(runs: dict[str, Run]) -> str:
    """Return measured / predicted change of the loss for all splitting steps along eigenvectors."""
    rows = [["recipe", "splitting steps", "measured / predicted change: median", "least", "greatest"]]
    for recipe in (CIFAR, MODELNET):
        ratios = [
            phase["measured"] / phase["predicted"]
            for run in runs.values()
            if run["recipe"] == recipe and run["method"] in ("s3d", "s2d")
            for phase in run["phases"]
            if phase["measured"] is not None and phase["predicted"]
        ]
        rows.append([recipe, str(len(ratios)), *(f"{f(ratios):.2f}" for f in (statistics.median, min, max))])
    return table(rows)


def of(runs: dict[str, Run], recipe: str, method: str) -> list[Run]:
    """Return the runs of a method, one for each of the three seeds."""
    found = [run for name, run in runs.items() if re.fullmatch(rf"{recipe}-{re.escape(method)}-\d+", name)]
    assert len(found) == 3, f"{recipe}, {method}: {len(found)} runs"
    return found


def title(method: str) -> str:
    """Return the name of a method in the tables."""
    names = {"s3d": "S3D c=1.3", "s2d": "S2D", "uniform": "uniform, all epochs", "scratch": "uniform, 3 epochs"}
    return names.get(method, method)


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, with the least and the greatest value if they differ."""
    if not values:
        return ""
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return middle if low == high else f"{middle} [{low}, {high}]"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a cell may hold several columns, separated by bars."""
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    columns = head.count("|") - 1
    return "\n".join([head, "|" + "---|" * columns, *rest, ""])


if __name__ == "__main__":
    (DOCS / "results.md").write_text(document())
    (DOCS.parent / "README.md").write_text(front_page())
