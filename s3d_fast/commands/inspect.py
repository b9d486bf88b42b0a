"""s3d-fast inspect: which layers of a saved network can be split, and their spectra."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

from s3d_fast import recipes
from s3d_fast.base import require
from s3d_fast.base.random_state import seed_all
from s3d_fast.base.tables import text_table
from s3d_fast.capture.all_batches import capture
from s3d_fast.capture.curvature import GROWTH_FLOOR
from s3d_fast.commands.datasets import add_data_options, load_dataset
from s3d_fast.commands.parsing import Parser
from s3d_fast.growth.separation import distances
from s3d_fast.growth.step_size import StepSize
from s3d_fast.maths.schemes import split_gain
from s3d_fast.network.graph import Graph
from s3d_fast.network.tracing import trace
from s3d_fast.recipes.job import Job, first, make_loss, make_network
from s3d_fast.recipes.saved import is_own, load_network, recipe_of, saved_network
from s3d_fast.recipes.split_data import SplitData
from s3d_fast.records.run import Run, read_run, steps_trained
from s3d_fast.records.run_folder import RunFolder, read_spectra
from s3d_fast.report import wording
from s3d_fast.solvers import extremal_eigenpairs
from s3d_fast.solvers.noise import FINEST

Ends = dict[str, tuple[np.ndarray, np.ndarray]]  # lambda_min and lambda_max of every unit


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Print which layers can be split, why others cannot, and the extreme eigenvalues of every layer."
    )
    command.add_argument(
        "folder",
        type=Path,
        metavar="RUN",
        help="folder of a run, of a recipe or of a Grower; or a recipe, with --dry-run",
    )
    command.add_argument("--phase", type=int, help="phase of the network; the last by default")
    add_data_options(command)
    dry = command.add_argument_group("before a run starts")
    dry.add_argument(
        "--dry-run", action="store_true", help="print what a capture will keep, where, and how long it will take"
    )
    dry.add_argument(
        "--preset", choices=recipes.PRESETS, help="preset of the recipe; by default the one that fits this machine"
    )
    dry.add_argument("--memory-budget", metavar="BYTES", help="such as 4GiB; the recipe's by default")
    dry.add_argument("--processes", type=int, default=1, help="processes that will share the run; default: %(default)s")
    dry.add_argument("--device", default="auto", help="default: a GPU if there is one")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.dry_run:
        return _dry_run(options)
    if options.memory_budget is not None or options.processes != 1 or options.device != "auto":
        raise ValueError("--memory-budget, --processes and --device have no effect without --dry-run")
    if is_own(options.folder):
        return _recorded(options)
    about, path = saved_network(options.folder, options.phase)
    recipe = recipe_of(about)
    solved = sorted(path.parent.glob("spectra-*.safetensors"))
    if options.phase is None and options.data is None and recipe.dataset != "digits" and solved:
        # The last phase does not split, so without data the phase before it is the last one with spectra.
        path = solved[-1].with_name(solved[-1].name.replace("spectra", "network"))
    model = load_network(about, path)
    graph = trace(model, torch.zeros(2, *about["input_shape"]))
    print(f"{path}: {sum(p.numel() for p in model.parameters())} parameters\n")
    print(graph.explain())
    phase = int(path.stem.rpartition("-")[2])
    _print_separation(read_run(path.parent), phase, model, graph)
    if options.data is not None or recipe.dataset == "digits":
        ends, where = _computed(recipe, model, graph, options)
    elif RunFolder(path.parent).file("spectra", phase).exists():
        ends, where = read_spectra(path.parent, phase), "the run"
    else:
        print("\nThe run has not computed the spectra of this network; give --data to compute them.")
        return 0
    m = recipe.m if isinstance(recipe.m, int) else 4
    print(f"\nExtreme eigenvalues of the filters, from {where}; G: the gains for m = {m}, c = {recipe.c}:")
    print(text_table(_table(ends, m, recipe.c)))
    return 0


def _recorded(options: argparse.Namespace) -> int:
    """Print what the files of a run say about a network of one's own, which cannot be built here."""
    if options.data is not None or options.workers is not None:
        raise ValueError("--data and --workers go with a recipe's run; this is the run of a network of your own")
    run = read_run(options.folder)
    spectra = {phase.index for phase in run.phases if RunFolder(run.folder).file("spectra", phase.index).exists()}
    indices = [phase.index for phase in run.phases]
    if options.phase is not None and options.phase not in indices:
        raise ValueError(f"{run.folder} has no phase {options.phase}; it has {', '.join(map(str, indices)) or 'none'}")
    if not run.phases:
        raise ValueError(f"{run.folder} has no phase yet")
    # The last phase does not split: the phase before it is the last one with spectra.
    index = options.phase if options.phase is not None else max(spectra, default=indices[-1])
    phase = run.phases[indices.index(index)]
    print(f"{run.title}, {run.label}, phase {index}: {phase.params} parameters, {phase.macs} MACs per sample\n")
    rows = [["layer", "kind", "width", "splittable", "because"]]
    for name, layer in run.about["layers"].items():
        kind, why, can = (
            layer.get(key) if isinstance(layer, dict) else None for key in ("kind", "because", "splittable")
        )
        rows.append([name, str(kind), str(phase.widths.get(name, "")), "yes" if can is True else "no", str(why)])
    print(text_table(rows))
    _print_separation(run, index)
    if index not in spectra:
        print("\nThe run has not computed the spectra of this network.")
        return 0
    m, c = run.settings.get("m", 2), run.settings.get("c", 1.0)
    m = m if m in (2, 3, 4) else 2
    print(f"\nExtreme eigenvalues of the filters, from the run; G: the gains for m = {m}, c = {c}:")
    print(text_table(_table(read_spectra(run.folder, index), m, c)))
    return 0


def _print_separation(run: Run, index: int, model: nn.Module | None = None, graph: Graph | None = None) -> None:
    """Print how far apart the copies of splits are at the ends of phases, by phase; of a network, by unit as well."""
    after = {phase.index - 1: phase for phase in run.phases}
    rows = [["split after phase", "eps", "steps to part, by formula", "steps trained", "apart then", "gain kept"]]
    for phase in run.phases:
        later = after.get(phase.index)
        if phase.splits and later is not None:
            made = steps_trained(run, later)
            rows.append(
                [
                    str(phase.index),
                    wording.NOTHING if phase.eps is None else f"{phase.eps:g}{' |theta|' * phase.relative}",
                    wording.NOTHING if phase.steps_to_part is None else wording.compact(round(phase.steps_to_part)),
                    wording.NOTHING if made is None else wording.compact(round(made)),
                    wording.NOTHING if later.apart is None else wording.percent(later.apart),
                    wording.NOTHING if phase.kept is None else wording.percent(phase.kept),
                ]
            )
    if len(rows) > 1:
        print(
            "\nSeparation of copies. Steps to part: until copies are as far apart as their filter is long, by the "
            "formula for gradient\ndescent with momentum. Apart: at the end of the next phase, relative to the filter; "
            "medians."
        )
        print(text_table(rows))
    before = next((phase for phase in run.phases if phase.index == index - 1), None)
    if model is None or graph is None or before is None or not before.copies:
        return
    rows = [["unit", "split neurons", "least", "median", "largest"]]
    for name, groups in before.copies.items():
        found = distances(model, graph, {name: groups})
        if len(found):
            middle = [wording.percent(float(value)) for value in (found.min(), found.median(), found.max())]
            rows.append([name, str(len(found)), *middle])
    if len(rows) > 1:
        print(f"\nDistances of the copies of the split after phase {index - 1}, at the end of phase {index}:")
        print(text_table(rows))


def _dry_run(options: argparse.Namespace) -> int:
    """Print the capture plan for a recipe's seed network, or for a network of a run."""
    require.count("processes", options.processes)
    name = str(options.folder)
    if name in recipes.RECIPES:
        if options.phase is not None:
            raise ValueError("--phase goes with a run, not with a recipe")
        gpu = Job.device_of(options.device).type != "cpu"
        recipe = recipes.recipe(name, options.preset or recipes.preset_for(name, gpu))
        dataset = load_dataset(recipe, options)
        model = make_network(recipe, dataset.classes)
    else:
        about, path = saved_network(options.folder, options.phase)
        recipe = recipe_of(about)
        dataset = load_dataset(recipe, options)
        model = load_network(about, path)
    seed_all(0)
    if options.memory_budget is not None:
        recipe = recipe.with_settings({"memory_budget": options.memory_budget})
    split_data = SplitData(recipe, first(dataset.train, recipe.train_samples), model.to(Job.device_of(options.device)))
    batches = split_data.count()
    own = -(-batches // options.processes)
    print(f"A split is computed on {batches} batches of {recipe.split_batch} training samples, {own} in each process.")
    print(split_data.plan(own))
    return 0


def _computed(recipe: recipes.Recipe, model: nn.Module, graph: Graph, options: argparse.Namespace) -> tuple[Ends, str]:
    dataset = load_dataset(recipe, options)
    seed_all(0)
    batches = SplitData(recipe, first(dataset.train, recipe.train_samples), model).batches()
    step = StepSize.of(recipe.eps)
    operators = capture(
        model,
        make_loss(recipe),
        batches,
        graph,
        curvature=recipe.curvature,
        eps=step.size,
        relative=step.relative,
        floor=GROWTH_FLOOR,
        rows_per_sample=recipe.rows_per_sample or None,
        memory_budget=recipe.memory_budget,
        progress=True,
    )
    spectra = extremal_eigenpairs(operators, tol=recipe.tol or FINEST)
    ends = {name: (spectrum.lambda_min.numpy(), spectrum.lambda_max.numpy()) for name, spectrum in spectra.items()}
    return ends, f"{len(batches) * recipe.split_batch} training samples"


def _table(ends: Ends, m: int, c: float) -> list[list[str]]:
    rows = [["unit", "filters", "lambda_min: least", "median", "lambda_max: median", "largest", "G: least", "median"]]
    for unit, (low, high) in ends.items():
        gain = split_gain(torch.from_numpy(low), torch.from_numpy(high), m, c).numpy()
        values = (low.min(), np.median(low), np.median(high), high.max(), gain.min(), np.median(gain))
        rows.append([unit, str(len(low)), *(f"{value:.3g}" for value in values)])
    return rows
