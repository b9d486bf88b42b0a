"""Run the experiments of docs/results.md on real data, and summarise them in docs/results.json.

    python -m benchmarks.results run --cifar100 PATH --modelnet40 PATH [--jobs 2] [--out runs/results]
    python -m benchmarks.results time [--out runs/results]
    python -m benchmarks.results summary [--out runs/results]

`run` calls the command line with one thread per run, `--jobs` runs at a time. It skips finished runs and resumes
interrupted ones. `time` measures forward passes side by side and needs an idle machine. docs/make_results.py turns the
summary into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from s3d_fast import env, recipes, report
from s3d_fast.growth.checkpoint import load_grown
from s3d_fast.maths.schemes import split_gain
from s3d_fast.network.forward_time import time_in_turns
from s3d_fast.recipes.job import make_network
from s3d_fast.recipes.saved import recipe_of, saved_network

SEEDS = (0, 1, 2)
BOUNDS = (1.0, 1.1, 1.3, 1.5, 2.0)
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Experiment:
    """A call of `s3d-fast grow`, and the file that must exist before it can start."""

    name: str
    recipe: str
    options: tuple[str, ...]
    needs: Path | None = None

    def command(self, data: str, out: Path) -> list[str]:
        """Return the command, as a user would type it."""
        common = ("--preset", "cpu", "--data", data, "--out", str(out / self.name), "--threads", "1", "--resume")
        return ["s3d-fast", "grow", self.recipe, *self.options, *common]


def experiments(out: Path) -> list[Experiment]:
    """Return all runs, in the best order to start them."""
    found = []
    for recipe, methods in (
        ("cifar100-mobilenet", ("s3d", "s2d", "net2net")),
        ("modelnet40-dgcnn", ("s3d", "s2d")),
    ):
        for seed in SEEDS:
            by_seed = ("--seed", str(seed))
            trained = out / f"{recipe}-seed-{seed}" / "network-000.safetensors"
            # All methods start from the same trained seed network.
            start = (*by_seed, "--start", str(trained))
            found.append(Experiment(f"{recipe}-seed-{seed}", recipe, (*by_seed, "--steps", "0")))
            found += [
                Experiment(f"{recipe}-{method}-{seed}", recipe, ("--method", method, *start), trained)
                for method in methods
            ]
            if recipe == "cifar100-mobilenet":
                grown = out / f"{recipe}-s3d-{seed}"
                like = ("--method", "uniform", *by_seed, "--like", str(grown))
                finished = grown / f"phase-{recipes.recipe(recipe, 'cpu').steps:03d}.safetensors"
                found.append(Experiment(f"{recipe}-uniform-{seed}", recipe, like, finished))
                alone = (*like, "--scratch", "phase")
                found.append(Experiment(f"{recipe}-scratch-{seed}", recipe, alone, finished))
                # The first steps of S2D and S3D cover c = 1 and c = 1.3.
                found += [
                    Experiment(f"{recipe}-c{c}-{seed}", recipe, (*start, "--steps", "1", "--c", str(c)), trained)
                    for c in BOUNDS
                    if c not in (1.0, 1.3)
                ]
    return found


def run(options: argparse.Namespace) -> None:
    """Run all unfinished experiments, several at a time."""
    paths = {"cifar100-mobilenet": options.cifar100, "modelnet40-dgcnn": options.modelnet40}
    waiting = [e for e in experiments(options.out) if paths[e.recipe] and not (options.out / e.name / "done").exists()]
    lock, failed = threading.Lock(), []
    running: set[str] = set()  # names of the experiments under way

    def take() -> Experiment | None:
        with lock:
            for experiment in waiting:
                if experiment.needs is None or experiment.needs.exists():
                    waiting.remove(experiment)
                    running.add(experiment.name)
                    return experiment
            return None

    def work() -> None:
        while waiting and not failed:
            experiment = take()
            if experiment is None:
                if waiting and not running:
                    failed.append(waiting[0].name)
                    print(f"{waiting[0].name} needs {waiting[0].needs}, which no experiment makes", flush=True)
                time.sleep(1)
                continue
            folder = options.out / experiment.name
            folder.mkdir(parents=True, exist_ok=True)
            command = experiment.command(paths[experiment.recipe], options.out)
            print(shlex.join(command), flush=True)
            with open(folder / "log.txt", "a") as log:
                ended = subprocess.run(
                    [sys.executable, "-m", "s3d_fast", *command[1:], "--quiet"], stdout=log, stderr=log, check=False
                )
            running.discard(experiment.name)
            if ended.returncode == 0:
                (folder / "done").touch()
            else:
                failed.append(experiment.name)
                print(f"failed: {experiment.name}; see {folder / 'log.txt'}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise SystemExit(1)


def time_forward(options: argparse.Namespace) -> None:
    """Time forward passes of the grown and the full-width DGCNNs, in turns; and the loading of data."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for method in ("s3d", "s2d"):
        for seed in SEEDS:
            folder = options.out / f"modelnet40-dgcnn-{method}-{seed}"
            about, _ = saved_network(folder, None)
            recipe = recipe_of(about)
            models = []
            for phase in range(recipe.steps + 1):
                model = make_network(recipe, about["classes"])
                load_grown(model, saved_network(folder, phase)[1])
                models.append(model.eval())
            full = recipe.network(recipe.full_widths, about["classes"]).eval()
            x = torch.randn(16, *about["input_shape"])
            seconds = [one.median for one in time_in_turns([(model, x) for model in (*models, full)])]
            results[folder.name] = {
                "relative": [value / seconds[-1] for value in seconds[:-1]],
                "full_params": sum(p.numel() for p in full.parameters()),
            }
    (options.out / "forward.json").write_text(json.dumps(results, indent=1) + "\n")
    loading = subprocess.run([sys.executable, "-m", "benchmarks.loading"], capture_output=True, text=True, check=True)
    (options.out / "loading.txt").write_text(loading.stdout)


def summary(options: argparse.Namespace) -> None:
    """Write docs/results.json, from which the tables of docs/results.md are made."""
    runs = {}
    for experiment in experiments(options.out):
        folder = options.out / experiment.name
        if not (folder / "done").exists():
            continue
        found = report.read_run(folder)
        path = "DATA"
        command = [part for part in experiment.command(path, Path("runs/results")) if part != "--resume"]
        command = [part.replace(str(options.out), "runs/results") for part in command]
        runs[experiment.name] = {
            "command": shlex.join(command),
            "recipe": experiment.recipe,
            "method": found.about["method"],
            "seed": found.about["seed"],
            "c": found.about["settings"]["c"] if found.about["method"] == "s3d" else 1.0,
            "phases": [
                {
                    "params": phase.params,
                    "macs": phase.macs,
                    "filters": sum(phase.widths.values()),
                    "accuracy": phase.metrics["accuracy"],
                    "train_loss": phase.epochs[-1].loss if phase.epochs else None,
                    "predicted": phase.predicted,
                    "measured": phase.measured,
                    "signed": _signed(found, phase),
                    "seconds": phase.seconds,
                }
                for phase in found.phases
            ],
        }
    forward, loading = options.out / "forward.json", options.out / "loading.txt"
    content = {
        "environment": {name: env.report()[name] for name in ("processor", "torch", "python", "s3d_fast")},
        "runs": runs,
        "forward": json.loads(forward.read_text()) if forward.exists() else {},
        "loading": loading.read_text().strip() if loading.exists() else "",
    }
    (ROOT / "docs" / "results.json").write_text(json.dumps(content, indent=1) + "\n")


def _signed(run: report.Run, phase: report.PhaseRecord) -> dict[str, list[int]]:
    """Return, by bound c, how many chosen splits would have a negative weight, and how many splits are chosen."""
    if run.method not in ("s3d", "s2d") or not phase.is_split:
        return {}
    spectra = report.read_spectra(run.folder, phase.index).values()
    low, high = (torch.cat([torch.from_numpy(pair[end]) for pair in spectra]) for end in (0, 1))
    found = {}
    for c in (*BOUNDS, 3.0, 5.0):
        gain = split_gain(low, high, 2, c)
        chosen = gain.argsort(stable=True)[: round(run.settings["fraction"] * len(gain))]
        found[str(c)] = [int((gain < low.clamp(max=0))[chosen].sum()), len(chosen)]
    return found


def main() -> None:
    """Parse the command line and run one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "time", "summary"))
    parser.add_argument("--cifar100", help="path of the data")
    parser.add_argument("--modelnet40", help="path of the data")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    options = parser.parse_args()
    {"run": run, "time": time_forward, "summary": summary}[options.what](options)


if __name__ == "__main__":
    main()
