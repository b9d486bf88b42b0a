"""Draw the picture of a growing network, docs/figures/growth.svg: python docs/make_growth.py.

`python docs/make_growth.py run` first grows the networks on scikit-learn's digits (about ten minutes on one core) and
records them in docs/growth.json; without it, the picture is drawn from that record.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from s3d_fast.records.run import read_run, samples_trained
from s3d_fast.report import scales
from s3d_fast.report.figures import method_styles
from s3d_fast.report.plot import Band, Box, Line, Mark, Note, Plot, Point, Style, beside

DOCS = Path(__file__).parent
SEEDS = (0, 1, 2)
GROW = ["grow", "digits", "--preset", "cpu", "--steps", "6", "--epochs", "20", "--threads", "1", "--quiet"]
METHODS = {
    "s3d": "grown by S3D",
    "uniform": "same size and epochs, from scratch",
    "scratch": "same size, from scratch, 20 epochs",
}


def commands() -> dict[str, list[str]]:
    """Return the commands by the folder that each of them fills."""
    found = {}
    for seed in SEEDS:
        like = ["--method", "uniform", "--like", f"runs/growth/s3d-{seed}"]
        for method, options in {"s3d": [], "uniform": like, "scratch": [*like, "--scratch", "phase"]}.items():
            name = f"{method}-{seed}"
            found[name] = ["s3d-fast", *GROW, *options, "--seed", str(seed), "--out", f"runs/growth/{name}"]
    return found


def record() -> dict[str, Any]:
    """Run the commands and return what the picture needs of their records."""
    found: dict[str, Any] = {}
    for name, command in commands().items():
        folder = Path("runs/growth") / name
        subprocess.run([sys.executable, "-m", "s3d_fast", *command[1:], "--resume"], check=True)
        run = read_run(folder)
        found[name] = {
            "command": " ".join(command),
            "layers": [run.layer_name(unit) for unit in run.phases[0].widths],
            "phases": [
                {
                    "widths": list(phase.widths.values()),
                    "params": phase.params,
                    "macs": phase.macs,
                    "accuracy": phase.metrics["accuracy"],
                    "samples": samples_trained(run, phase),
                }
                for phase in run.phases
            ],
        }
    return {"runs": found, "environment": run.about["environment"]}


def picture(runs: dict[str, Any]) -> str:
    """Return the SVG: the widths of the layers over the phases, and accuracy against compute."""
    return beside([_network(runs["s3d-0"]), _accuracy(runs)])


def _network(run: dict[str, Any]) -> Plot:
    """Return a column for every phase with a bar for every layer; what the last split added stands out."""
    phases, layers = run["phases"], run["layers"]
    most = max(max(phase["widths"]) for phase in phases)
    old, new = Style("first", marker="", line=False), Style("orange", marker="", line=False)
    marks: list[Mark] = []
    for place, phase in enumerate(phases):
        for row, width in enumerate(phase["widths"]):
            before = phases[place - 1]["widths"][row] if place else width
            half, kept = (0.46 * size / most for size in (width, before))
            words = (layers[row], f"phase {place}: {width} filters")
            if width > before:
                marks.append(Box(place - half, place + half, row - 0.3, row + 0.3, new, words, "new in this phase"))
            marks.append(Box(place - kept, place + kept, row - 0.3, row + 0.3, old, words))
            marks.append(Note(place, row + 0.45, str(width), anchor="middle"))
    return Plot(
        "network",
        scales.Scale(
            -0.6,
            len(phases) - 0.4,
            fixed=tuple(scales.Tick(at, str(phase["params"])) for at, phase in enumerate(phases)),
        ),
        scales.Scale(-0.5, len(layers) - 0.3, fixed=tuple(scales.Tick(at, name) for at, name in enumerate(layers))),
        marks,
        title="A network grows: filters of its layers, phase by phase",
        x_label="parameters of the network in each phase",
        width=470,
        height=230,
        rows=True,
    )


def _accuracy(runs: dict[str, Any]) -> Plot:
    """Return the accuracy on test images against the compute of training, median and range over the seeds."""
    lines: list[Mark] = []
    bands: list[Mark] = []
    values: list[float] = []
    places: list[float] = []
    styles = dict(zip(METHODS, method_styles(["s3d", "uniform", "uniform"]), strict=True))
    for method, label in METHODS.items():
        found = [_costs(runs[f"{method}-{seed}"], method) for seed in SEEDS]
        points, edges = [], []
        for place, of_seeds in enumerate(zip(*found, strict=True)):
            x = statistics.median(cost for cost, _ in of_seeds)
            heights = [100 * accuracy for _, accuracy in of_seeds]
            words = (label, f"phase {place}: {statistics.median(heights):.1f}%", f"{scales.engineering(x)} MACs")
            points.append(Point(x, statistics.median(heights), words))
            edges.append((x, min(heights), max(heights)))
            values += heights
            places.append(x)
        lines.append(Line(points, styles[method], label))
        bands.append(Band(edges, styles[method]))
    return Plot(
        "accuracy",
        scales.of_sizes(places),
        scales.linear(values),
        [*bands, *lines],
        title="Accuracy and the compute of training",
        x_label="MACs of a forward pass x samples trained on",
        y_label="test accuracy (%), median and range of three seeds",
        width=440,
        height=196,
    )


def _costs(run: dict[str, Any], method: str) -> list[tuple[float, float]]:
    """Return (MACs x samples, accuracy) of every phase; a grown network has cost what all phases so far have cost."""
    own = [phase["macs"] * phase["samples"] for phase in run["phases"]]
    costs = [sum(own[: place + 1]) if method == "s3d" else cost for place, cost in enumerate(own)]
    return [(cost, phase["accuracy"]) for cost, phase in zip(costs, run["phases"], strict=True)]


def main() -> None:
    """Draw the picture, after growing the networks if asked."""
    path = DOCS / "growth.json"
    if sys.argv[1:] == ["run"]:
        path.write_text(json.dumps(record(), indent=1) + "\n")
    (DOCS / "figures" / "growth.svg").write_text(picture(json.loads(path.read_text())["runs"]))


if __name__ == "__main__":
    main()
