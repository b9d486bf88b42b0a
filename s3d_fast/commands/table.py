"""s3d-fast table: run all rows of one of the paper's tables, or resume them; print it beside the paper's figures."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from s3d_fast import recipes
from s3d_fast.base.batches import moved
from s3d_fast.base.tables import text_table
from s3d_fast.commands.datasets import add_data_options, load_dataset
from s3d_fast.commands.parsing import Parser
from s3d_fast.data.samples import classes_and_shape
from s3d_fast.data.sources import Dataset
from s3d_fast.network.forward_time import time_in_turns
from s3d_fast.recipes.amounts import TIMED_BATCH
from s3d_fast.recipes.job import Job, first
from s3d_fast.recipes.paper_tables import FORWARD, TABLES, Row, Table, expected, folder_of, recipe_of
from s3d_fast.recipes.running import run as run_job
from s3d_fast.recipes.saved import load_network, saved_network
from s3d_fast.recipes.saved import recipe_of as saved_recipe
from s3d_fast.records.record import PhaseRecord
from s3d_fast.records.run import Run, read_run, training_compute
from s3d_fast.report import wording

# Training samples of the data sets as they are published, for a dry run without data.
SAMPLES = {"cifar100": 50000, "imagenet": 1281167, "modelnet40": 9840}


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Run all rows of a table of the paper, one after the other, and print the table with the paper's figures in "
        "brackets. A table that was interrupted continues where it stopped."
    )
    command.add_argument("table", choices=tuple(TABLES))
    add_data_options(command)
    command.add_argument("--preset", help="paper, or cpu; by default what fits this machine")
    command.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    command.add_argument("--rows", metavar="NAME,NAME,...", help="only these rows, by the paper's names")
    command.add_argument("--epochs", type=int, help="epochs per phase, instead of the preset's")
    command.add_argument("--train-samples", type=int, help="training samples to use; all by default")
    command.add_argument("--test-samples", type=int, help="test samples to use; all by default")
    command.add_argument("--out", type=Path, help="folder of the runs; default: runs/table-NAME")
    command.add_argument("--device", default="auto", help="default: a GPU if there is one")
    command.add_argument("--threads", type=int, help="CPU threads; all cores by default")
    command.add_argument("--dry-run", action="store_true", help="print what would run, its compute and its time")
    command.add_argument("--quiet", action="store_true", help="no progress bars")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the rows, or say what would run."""
    table = TABLES[options.table]
    device = Job.device_of(options.device)
    preset = options.preset or recipes.preset_for(table.recipe, has_gpu=device.type != "cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows = chosen_rows(table, options.rows)
    if options.dry_run:
        print(text_table(_planned(table, rows, preset, options)))
        return 0
    out = options.out or Path("runs") / f"table-{options.table}"
    dataset = load_dataset(recipe_of(table, rows[0], preset), options)
    done: dict[str, list[PhaseRecord]] = {}
    for row in rows:
        folder = out / folder_of(row)
        if str(folder) not in done:
            _run_row(table, row, preset, folder, dataset, options)
            done[str(folder)] = read_run(folder).phases
    print(text_table(_results(table, rows, out, device)))
    return 0


def chosen_rows(table: Table, names: str | None) -> list[Row]:
    """Return the rows of these names, or all.

    Raises:
        ValueError: there is no such row.
    """
    if names is None:
        return list(table.rows)
    known = {row.name: row for row in table.rows}
    missing = [name for name in names.split(",") if name not in known]
    if missing:
        raise ValueError(f"--rows: {missing[0]!r} is not a row of the table; its rows are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _settings(options: argparse.Namespace) -> dict[str, int]:
    names = ("epochs", "train_samples", "test_samples")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _run_row(table: Table, row: Row, preset: str, folder: Path, dataset: Dataset, options: argparse.Namespace) -> None:
    print(f"{row.name}: {folder}", flush=True)
    job = Job(
        recipe_of(table, row, preset, _settings(options)),
        dataset,
        preset=preset,
        method=row.method,
        seed=options.seed,
        out=folder,
        device=options.device,
        progress=not options.quiet,
    )
    run_job(job, resume=True)


def _planned(table: Table, rows: list[Row], preset: str, options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of a dry run; runs that several rows show count once."""
    published = recipe_of(table, rows[0], preset)
    classes, shape = classes_and_shape(published.dataset, published.data_options)
    samples = SAMPLES[options.table]
    if options.data is not None:
        dataset = load_dataset(recipe_of(table, rows[0], preset), options)
        made = recipe_of(table, rows[0], preset, _settings(options))
        shape, classes, samples = dataset.input_shape, dataset.classes, len(first(dataset.train, made.train_samples))
    elif options.train_samples is not None:
        samples = min(samples, options.train_samples)
    found = [["row", "method", "settings", "epochs", "MACs x samples", "expected time", "folder"]]
    seen: set[str] = set()
    total, compute = 0.0, 0.0
    for row in rows:
        folder = folder_of(row)
        settings = ", ".join(f"{name} {value}" for name, value in row.settings.items()) or wording.NOTHING
        if folder in seen:
            found.append([row.name, row.method, settings, "as above", "", "", folder])
            continue
        seen.add(folder)
        made = recipe_of(table, row, preset, _settings(options))
        needs = expected(made, row.method, classes, shape, samples)
        total, compute = total + needs.seconds, compute + needs.compute
        figures = [str(needs.epochs), f"{needs.compute:.2e}", wording.duration(needs.seconds)]
        found.append([row.name, row.method, settings, *figures, folder])
    found.append(["all", "", "", "", f"{compute:.2e}", wording.duration(total), ""])
    return found


def _results(table: Table, rows: list[Row], out: Path, device: torch.device) -> list[list[str]]:
    """Return the table, with the paper's figures in brackets."""
    found = [["row", *table.columns, "compute (MACs x samples)"]]
    runs = [read_run(out / folder_of(row)) for row in rows]
    places = [
        len(run.phases) - 1 if row.step is None else min(row.step, len(run.phases) - 1)
        for row, run in zip(rows, runs, strict=True)
    ]
    times = _forward_times(runs, places, device) if FORWARD in table.columns else [math.nan] * len(rows)
    for row, found_run, place, seconds in zip(rows, runs, places, times, strict=True):
        phase, compute = found_run.phases[place], training_compute(found_run)[place]
        values = {
            "accuracy": 100 * phase.metrics.get("accuracy", math.nan),
            "top5": 100 * phase.metrics.get("top5", math.nan),
            "params (M)": phase.params / 1e6,
            "MACs (M)": phase.macs / 1e6,
            "FLOPs (M)": 2 * phase.macs / 1e6,
            FORWARD: 1e3 * seconds,
        }
        cells = []
        for column in table.columns:
            paper = row.figures.get(column)
            cells.append(f"{values[column]:.4g}" + ("" if paper is None else f" ({paper:g})"))
        found.append([row.name, *cells, wording.NOTHING if compute is None else f"{compute:.2e}"])
    return found


def _forward_times(runs: list[Run], places: list[int], device: torch.device) -> list[float]:
    """Return the median seconds of a forward pass of the networks of some phases, which take turns."""
    generator = torch.Generator().manual_seed(0)
    networks = []
    for run, place in zip(runs, places, strict=True):
        about, path = saved_network(run.folder, place)
        x = torch.randn(TIMED_BATCH, *about["input_shape"], generator=generator)
        is_last = saved_recipe(about).channels_last
        networks.append((load_network(about, path).to(device), moved(x, device, is_last)))
    return [took.median for took in time_in_turns(networks, warmup=3)]
