"""s3d-fast grow: run a recipe."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from s3d_fast import recipes, report
from s3d_fast.base.tables import text_table
from s3d_fast.base.world import World, joined
from s3d_fast.commands.datasets import add_data_options, load_dataset
from s3d_fast.integrations.loggers import TensorBoardLogger
from s3d_fast.recipes.running import METHODS, Job, run
from s3d_fast.records.record import Phase

LIKE = "uniform: match the number of parameters of this run in every phase; by default the filters that growth gives"
# While a run is under way, its report is written at most this often.
REPORT_SECONDS = 60.0


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    methods = "; ".join(f"{name}: {what}" for name, what in METHODS.items())
    command = commands.add_parser(
        "grow",
        help="grow a network by a recipe",
        description="Grow a network by a recipe; writes checkpoints, history.jsonl and report.html.",
        epilog=f"Methods: {methods}.",
    )
    command.add_argument("recipe", nargs="?", default="digits", choices=tuple(recipes.RECIPES), metavar="RECIPE")
    add_data_options(command)
    command.add_argument("--method", choices=tuple(METHODS), default="s3d", help="default: %(default)s")
    command.add_argument(
        "--preset", choices=recipes.PRESETS, default="paper", help="the paper's numbers, or numbers for two CPU cores"
    )
    command.add_argument("--out", type=Path, help="folder of the run; default: runs/RECIPE-METHOD-SEED")
    command.add_argument("--resume", action="store_true", help="resume the run in the folder, if there is one")
    command.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    command.add_argument("--start", type=Path, metavar="FILE", help="start from a saved network; do not train the seed")
    command.add_argument(
        "--like",
        type=Path,
        metavar="RUN",
        help=LIKE,
    )
    command.add_argument(
        "--scratch",
        choices=("total", "phase"),
        default="total",
        help="uniform: train for all epochs that a grown network has had by then (total), or for one phase's epochs",
    )
    command.add_argument("--device", default="auto", help="default: a GPU if there is one")
    command.add_argument(
        "--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="default: %(default)s"
    )
    command.add_argument("--compile", action="store_true", help="train through torch.compile")
    command.add_argument(
        "--sync-batchnorm", action="store_true", help="BatchNorm over the samples of all processes, not of each alone"
    )
    command.add_argument("--threads", type=int, help="CPU threads; all cores by default")
    command.add_argument("--tensorboard", action="store_true", help="write TensorBoard events too")
    command.add_argument("--no-report", action="store_true", help="do not draw report.html")
    command.add_argument("--quiet", action="store_true", help="no progress bars")
    settings = command.add_argument_group("settings of the recipe, instead of the preset's")
    for name, (kind, help) in recipes.Recipe.settings().items():
        settings.add_argument(f"--{name.replace('_', '-')}", type=_parser(kind), help=help, metavar=_metavar(kind))
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    recipe = _recipe(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    out = options.out or Path("runs") / f"{recipe.name}-{options.method}-{options.seed}"
    with joined(Job.device_of(options.device)) as world:
        _grow(options, recipe, out, world)
    return 0


def _grow(options: argparse.Namespace, recipe: recipes.Recipe, out: Path, world: World) -> None:
    observers: list[Callable[[Phase], object]] = []
    if not options.no_report:
        observers.append(_Reporter(out))
    loggers = [TensorBoardLogger(out / "tensorboard")] if options.tensorboard else []

    def after_phase(phase: Phase) -> None:
        for observer in observers:
            observer(phase)

    job = Job(
        recipe,
        load_dataset(recipe, options),
        preset=options.preset,
        method=options.method,
        seed=options.seed,
        out=out,
        start=options.start,
        like=options.like,
        scratch=options.scratch,
        device=options.device,
        world=world,
        precision=options.precision,
        compile=options.compile,
        progress=not options.quiet,
        after_phase=after_phase,
        loggers=loggers,
        sync_batchnorm=options.sync_batchnorm,
    )
    history = run(job, resume=options.resume)
    if not world.is_first:
        return
    print(text_table(_table(history)))
    if not options.no_report:
        print(f"Written: {report.write_report(out)}")


def _recipe(options: argparse.Namespace) -> recipes.Recipe:
    """Return the recipe with the settings that were given.

    Raises:
        ValueError: a setting is bad, or would have no effect.
    """
    every = {name: getattr(options, name) for name in recipes.Recipe.settings()}
    given = {name: value for name, value in every.items() if value is not None}
    recipe = recipes.recipe(options.recipe, options.preset).with_settings(given)
    for name, matters, where in (
        ("c", options.method == "s3d", "--method s3d"),
        ("m", options.method in ("s3d", "uniform"), "--method s3d"),
        ("momentum", recipe.optimizer == "sgd", "--optimizer sgd"),
        ("decay", recipe.schedule == "step", "--schedule step"),
        ("decay_at", recipe.schedule == "step", "--schedule step"),
    ):
        if name in given and not matters:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without {where}")
    # Record the values that these methods use.
    return recipe.with_settings({"m": 2, "c": 1.0}) if options.method in ("s2d", "net2net") else recipe


def _table(history: list[Phase]) -> list[list[str]]:
    rows = [["phase", "filters", "parameters", "MACs", "accuracy", "predicted change", "measured change"]]
    for phase in history:
        measured = phase.split_loss - phase.loss
        rows.append(
            [
                str(phase.index),
                str(sum(phase.widths.values())),
                str(phase.params),
                str(phase.macs),
                f"{phase.metrics['accuracy']:.4f}",
                _change(phase.predicted_change if phase.new_filters else math.nan),
                _change(measured),
            ]
        )
    return rows


def _change(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3e}"


class _Reporter:
    """Draws the report of a run while it is under way."""

    def __init__(self, out: Path) -> None:
        self.out, self.last = out, time.monotonic()

    def __call__(self, phase: Phase) -> None:
        if time.monotonic() - self.last > REPORT_SECONDS:
            self.last = time.monotonic()
            try:
                report.write_report(self.out)
            # A failed report must not end the run.
            except Exception as error:
                print(f"s3d-fast: the report could not be drawn: {error}", file=sys.stderr)


def _parser(kind: str) -> Callable[[str], Any]:
    """Return a function that parses the text of an option into a value of a setting's type."""
    element: Callable[[str], Any] = float if "float" in kind else int if "int" in kind else str
    if kind.startswith("tuple"):

        def values(text: str) -> tuple[Any, ...]:
            return tuple(element(part) for part in text.split(",") if part)

        return values
    return element


def _metavar(kind: str) -> str:
    return "N,N,..." if kind.startswith("tuple") else "X" if "float" in kind else "N" if "int" in kind else "NAME"
