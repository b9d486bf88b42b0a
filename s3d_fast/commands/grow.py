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
from s3d_fast.commands.parsing import Parser, read_options
from s3d_fast.commands.sweep import run_sweep, swept
from s3d_fast.integrations.loggers import TensorBoardLogger
from s3d_fast.recipes.job import Job
from s3d_fast.recipes.methods import METHODS, as_method
from s3d_fast.recipes.running import BEFORE, run
from s3d_fast.records.json_records import mapping
from s3d_fast.records.record import Phase
from s3d_fast.records.run import training_compute
from s3d_fast.records.run_folder import RunFolder

LIKE = (
    "uniform: match the number of parameters of this run in every phase, by default the filters that growth gives; "
    "scratch: the widths that this run ended with"
)
# While a run is under way, its report is written at most this often.
REPORT_SECONDS = 60.0


def add(command: Parser) -> None:
    """Add the options and the description."""
    methods = "; ".join(f"{name}: {method.summary}" for name, method in METHODS.items())
    command.description = "Grow a network by a recipe; writes checkpoints, history.jsonl and report.html."
    command.epilog = f"Methods: {methods}."
    command.add_argument(
        "recipe",
        nargs="?",
        choices=tuple(recipes.RECIPES),
        metavar="RECIPE",
        help="default: digits; see s3d-fast recipes",
    )
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="options by name, as JSON or TOML, or an earlier run; those of the command line have priority",
    )
    add_data_options(command)
    command.add_argument(
        "--method",
        choices=tuple(METHODS),
        help="default: that of the preset, which s3d-fast recipes NAME shows; s3d in the paper's",
    )
    command.add_argument(
        "--preset",
        choices=recipes.PRESETS,
        help="the paper's numbers (digits: full), or numbers for two CPU cores; by default those that fit this machine",
    )
    command.add_argument("--out", type=Path, help="folder of the run; default: runs/RECIPE-METHOD-SEED")
    command.add_argument(
        "--resume", action="store_true", help="resume the run in the folder, if there is one, with its settings"
    )
    command.add_argument("--seed", type=int, help="default: 0")
    command.add_argument(
        "--seeds", type=_seeds, metavar="N,N,...", help="a run for each seed, in folders that end with the seed"
    )
    command.add_argument(
        "--sweep",
        type=lambda text: swept(text, _parser),
        metavar="NAME=V,V,...",
        help="grow up to a step once, then make it with each of these values: --sweep c=1,1.1,1.3,2 --step 5. The "
        "folder gets a run for each, and their common beginning, trunk",
    )
    command.add_argument("--step", type=int, help="with --sweep: the step, from 1; the recipe's last by default")
    command.add_argument("--start", type=Path, metavar="FILE", help="start from a saved network; do not train the seed")
    command.add_argument(
        "--like",
        type=Path,
        metavar="RUN",
        help=LIKE,
    )
    command.add_argument(
        "--scratch",
        choices=("total", "phase", "compute"),
        default="total",
        help="full, uniform, scratch: train for all epochs that a grown network has had by then (total), for one "
        "phase's epochs, or for the MACs times samples of the run --like (compute)",
    )
    command.add_argument(
        "--match",
        choices=("epochs", "compute"),
        help="full, uniform, scratch: train for equal epochs, or for equal compute (the same as --scratch compute)",
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
        flag = f"--{name.replace('_', '-')}"
        if kind == "bool":
            settings.add_argument(flag, action="store_true", default=None, help=help)
            continue
        settings.add_argument(flag, type=_parser(kind), help=help, metavar=_metavar(kind))
    command.set_defaults(run=lambda options: _run(configured(command, options)), stored={})


def configured(command: Parser, options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with those of --config where the command line does not give them."""
    if options.config is not None:
        path = options.config / "run.json" if options.config.is_dir() else options.config
        values = read_options(path)
        named = values.pop("recipe", None)
        if named is not None and named not in tuple(recipes.RECIPES):
            raise ValueError(f"{path}: recipe must be one of {', '.join(recipes.RECIPES)}; got {named!r}")
        if options.recipe not in (None, named or options.recipe):
            raise ValueError(f"{path} is for the recipe {named}, not {options.recipe}; leave one of them out")
        if "environment" in values:
            values = _of_run(path, named, values, options)
        values |= mapping(f"{path}: settings", values.pop("settings", {}))
        given = command.parse_values(str(path), values)
        # One replaces the other.
        if options.seed is not None or options.seeds is not None:
            given = {name: value for name, value in given.items() if name not in ("seed", "seeds")}
        command.set_defaults(**given)
        options = command.parse_args(options.arguments)
        options.recipe = options.recipe or named
    if options.seed is not None and options.seeds is not None:
        raise ValueError("--seed and --seeds: give one of them")
    options.recipe = options.recipe or "digits"
    return options


def _of_run(path: Path, name: str | None, about: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return what an earlier run had been given, by its run.json: settings only where they differ from the preset's."""
    if name is None or not isinstance(about.get("preset"), str):
        raise ValueError(f"{path} must say its recipe and preset to be repeated")
    preset = recipes.preset_today(name, about["preset"])
    if options.preset not in (None, preset):
        raise ValueError(f"{path} is for the preset {preset}; leave out --preset {options.preset}")
    try:
        usual = recipes.recipe(name, preset).as_settings()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    settings = mapping(f"{path}: settings", about.get("settings"))
    # These methods have one value for both.
    fixed = ("m", "c") if about.get("method") in ("s2d", "net2net") else ()
    changed = {
        setting: value
        for setting, value in settings.items()
        if setting not in fixed and value != _plain(usual.get(setting))
    }
    kept = ("method", "seed", "scratch", "like", "start", "precision")
    return {one: about[one] for one in kept if one in about} | {"preset": preset, "settings": changed}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _run(options: argparse.Namespace) -> int:
    seeds = options.seeds or (options.seed or 0,)
    resumed = _resumed(options, seeds[0])
    options.preset = options.preset or _fitting_preset(options, resumed)
    usual = recipes.recipe(options.recipe, options.preset).method if resumed is None else resumed["method"]
    options.method = options.method or usual
    options.stored = {} if resumed is None else _stored(resumed)
    folders = {seed: _folder(options, options.method, seed) for seed in seeds}
    recipe = made_recipe(options)
    if options.step is not None and options.sweep is None:
        raise ValueError("--step has no effect without --sweep; --steps is the number of steps")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with joined(Job.device_of(options.device)) as world:
        if options.sweep is not None:
            run_sweep(options, folders, world, _grow, made_recipe)
            return 0
        for seed, folder in folders.items():
            _grow(options, recipe, seed, folder, world)
        if len(folders) > 1 and world.is_first:
            print(text_table(report.comparison_table([report.read_run(folder) for folder in folders.values()])))
    return 0


def _folder(options: argparse.Namespace, method: str, seed: int) -> Path:
    """Return the folder of the run of a seed."""
    if options.out is None:
        return Path("runs") / f"{options.recipe}-{method}-{seed}"
    return options.out if options.seeds is None else Path(f"{options.out}-{seed}")


def _resumed(options: argparse.Namespace, seed: int) -> dict[str, Any] | None:
    """Return run.json of the run that is resumed, if there is one.

    Without a method, that is the run of the preset's; or one of s3d, which was every preset's in earlier versions.
    """
    if not options.resume:
        return None
    preset = options.preset or recipes.preset_for(options.recipe, Job.device_of(options.device).type != "cpu")
    methods = (options.method,) if options.method else (recipes.recipe(options.recipe, preset).method, "s3d")
    for folder in dict.fromkeys(_folder(options, method, seed) for method in methods):
        if (folder / "run.json").is_file():
            about = RunFolder(folder).read_about()
            if about["recipe"] == options.recipe:
                return about
    return None


def _stored(about: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run; those that its version did not have are what they were then."""
    settings = mapping("run.json: settings", about["settings"])
    every = {name: settings.get(name, BEFORE.get(name)) for name in recipes.Recipe.settings()}
    return {name: value for name, value in every.items() if value is not None}


def _fitting_preset(options: argparse.Namespace, resumed: dict[str, Any] | None) -> str:
    """Return the preset of the run that is resumed, or the one that fits this machine."""
    if resumed is not None:
        return recipes.preset_today(resumed["recipe"], resumed["preset"])
    whole = recipes.preset_for(options.recipe, has_gpu=True)
    if Job.device_of(options.device).type != "cpu":
        return whole
    if not options.quiet:
        small, large = (recipes.recipe(options.recipe, preset) for preset in ("cpu", whole))
        print(
            f"No GPU: growing with the preset cpu, {small.steps + 1} phases of {small.epochs} epochs. --preset {whole} "
            f"has {large.steps + 1} of {large.epochs}.",
            file=sys.stderr,
        )
    return "cpu"


def _grow(options: argparse.Namespace, recipe: recipes.Recipe, seed: int, out: Path, world: World) -> None:
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
        seed=seed,
        out=out,
        start=options.start,
        like=options.like,
        scratch=_scratch(options),
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
    if history and METHODS[options.method].kind == "grow" and len(history) <= recipe.steps:
        print(
            f"Growth ended after phase {history[-1].index} of {recipe.steps}: nothing gains, or nothing that gains "
            "fits into what the step may cost."
        )
    compute = training_compute(report.read_run(out)) if history else []
    if compute and compute[-1] is not None:
        print(f"Training took {compute[-1]:.3e} MACs x samples: multiply-accumulates of a forward pass times samples.")
        if job.scratch == "compute" and options.like is not None:
            other = training_compute(report.read_run(options.like))[-1]
            print(f"That is {compute[-1] / (other or math.nan):.2f} times what {options.like} took.")
    if not options.no_report:
        print(f"Written: {report.write_report(out)}")


def made_recipe(options: argparse.Namespace) -> recipes.Recipe:
    """Return the recipe with the settings that were given; an error names the file that may have given them."""
    try:
        return _recipe(options)
    except ValueError as error:
        if options.config is None:
            raise
        raise ValueError(f"{error}; see --config {options.config}") from error


def _recipe(options: argparse.Namespace) -> recipes.Recipe:
    """Return the recipe with the settings that were given.

    Raises:
        ValueError: a setting is bad, or would have no effect.
    """
    every = {name: getattr(options, name) for name in recipes.Recipe.settings()}
    given = {name: value for name, value in every.items() if value is not None}
    # A resumed run keeps its settings, also where a newer version has other defaults.
    recipe = recipes.recipe(options.recipe, options.preset).with_settings(options.stored).with_settings(given)
    method = options.method or recipe.method
    for name, matters, where in (
        ("c", method in ("s3d", "regrow"), "--method s3d"),
        ("m", method in ("s3d", "regrow", "uniform"), "--method s3d"),
        ("prune_to", METHODS[method].kind == "prune", "a method that prunes"),
        ("penalty", method in ("bn", "morphnet"), "--method bn or morphnet"),
        (
            "width_multiplier",
            method == "full" or METHODS[method].kind == "prune",
            "--method full or one that prunes",
        ),
        ("new_filters", method in ("s3d", "s2d"), "--method s3d or s2d"),
        ("cost", recipe.growth is not None, "--growth"),
        ("momentum", recipe.optimizer == "sgd", "--optimizer sgd"),
        ("decay", recipe.schedule == "step", "--schedule step"),
        ("decay_at", recipe.schedule == "step", "--schedule step"),
    ):
        if name in given and not matters:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without {where}")
    return as_method(recipe, method, {**options.stored, **given})


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
    if kind.startswith(("float | str", "int | str")):
        number = float if kind.startswith("float") else int

        def number_or_word(text: str) -> float | str:
            return number(text) if _is_number(text) else text

        number_or_word.__name__ = number.__name__
        return number_or_word
    element: Callable[[str], Any] = float if "float" in kind else int if "int" in kind else str
    if kind.startswith("int | tuple"):

        def one_or_many(text: str) -> int | tuple[int, ...]:
            return tuple(map(int, text.split(","))) if "," in text else int(text)

        # Errors name the type.
        one_or_many.__name__ = "int"
        return one_or_many
    if kind.startswith("tuple"):

        def values(text: str) -> tuple[Any, ...]:
            return tuple(element(part) for part in text.split(",") if part)

        return values
    return element


def _scratch(options: argparse.Namespace) -> str:
    """Return how long networks that keep their size train, by --scratch and --match.

    Raises:
        ValueError: --match has no effect, or contradicts --scratch.
    """
    if options.match is None:
        return str(options.scratch)
    if METHODS[options.method].kind != "train":
        raise ValueError(f"--match has no effect with --method {options.method}, which does not train from scratch")
    if options.match == "epochs" and options.scratch == "compute":
        raise ValueError(f"--match {options.match} and --scratch {options.scratch} contradict each other")
    return "compute" if options.match == "compute" else str(options.scratch)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(part) for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"seeds must differ, got {text}")
    return seeds


def _metavar(kind: str) -> str:
    if kind.startswith("int | tuple"):
        return "N[,N,...]"
    return "N,N,..." if kind.startswith("tuple") else "X" if "float" in kind else "N" if "int" in kind else "NAME"
