"""s3d-fast time: how long forward passes of networks take, side by side."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from s3d_fast import recipes
from s3d_fast.base import require
from s3d_fast.base.batches import moved
from s3d_fast.base.tables import text_table
from s3d_fast.commands.parsing import Parser
from s3d_fast.data.samples import classes_and_shape
from s3d_fast.network import costs
from s3d_fast.network.forward_time import ForwardTime, time_in_turns
from s3d_fast.network.tracing import trace
from s3d_fast.recipes.job import Job, make_network
from s3d_fast.recipes.saved import is_own, load_network, recipe_of, saved_network


@dataclass(frozen=True)
class Timed:
    """A network to be timed.

    Attributes:
        name: as it was given.
        model: the network.
        shape: of a sample.
        channels_last: whether images have their channels innermost.
        is_of_recipe: whether a recipe made it, and no run.
    """

    name: str
    model: nn.Module
    shape: tuple[int, ...]
    channels_last: bool
    is_of_recipe: bool


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Time forward passes in eval mode. The networks take turns, so that their ratios are comparable; each ratio is "
        "the median over rounds of the time relative to the first network in the same round."
    )
    command.add_argument(
        "networks",
        nargs="+",
        metavar="NETWORK",
        help="a recipe, at its full widths; RECIPE@0.5, at half of them; RECIPE@seed, its seed network; the folder of "
        "a run, for its last network; or RUN@1, for that of phase 1",
    )
    command.add_argument("--batch", type=int, default=16, help="samples per forward pass; default: %(default)s")
    command.add_argument("--repeats", type=int, default=15, help="rounds that count; default: %(default)s")
    command.add_argument("--warmup", type=int, default=3, help="rounds before these; default: %(default)s")
    command.add_argument("--preset", choices=recipes.PRESETS, help="preset of recipes; the whole experiment by default")
    command.add_argument("--device", default="auto", help="default: a GPU if there is one")
    command.add_argument("--threads", type=int, help="CPU threads; all cores by default")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    require.count("batch", options.batch)
    require.count("repeats", options.repeats)
    require.count("warmup", options.warmup, at_least=0)
    device = Job.device_of(options.device)
    if options.threads is not None:
        require.count("threads", options.threads)
        torch.set_num_threads(options.threads)
    networks = [_network(name, options.preset) for name in options.networks]
    if options.preset is not None and not any(one.is_of_recipe for one in networks):
        raise ValueError("--preset has no effect on runs, which have a preset of their own")
    found = [costs.count(trace(one.model, torch.zeros(2, *one.shape))) for one in networks]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        moved(torch.randn(options.batch, *one.shape, generator=generator), device, one.channels_last)
        for one in networks
    ]
    models = [one.model.to(device) for one in networks]
    times = time_in_turns(list(zip(models, inputs, strict=True)), options.repeats, options.warmup)
    print(
        f"Forward passes of {options.batch} samples on {_described(device)}: median and quartiles of {options.repeats} "
        f"rounds, after {options.warmup} for warm-up."
    )
    rows = [["network", "input", "parameters", "MACs", "ms", "quartiles", "ratio"]]
    rows += [_row(*one) for one in zip(networks, found, times, strict=True)]
    print(text_table(rows))
    return 0


def _row(network: Timed, cost: costs.Cost, time: ForwardTime) -> list[str]:
    low, high = (_milliseconds(seconds) for seconds in time.quartiles)
    return [
        network.name,
        "x".join(map(str, network.shape)),
        str(cost.params),
        str(cost.macs),
        _milliseconds(time.median),
        f"{low} to {high}",
        f"{time.ratio:.3f}",
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"{device}, {threads} thread{'s' * (threads != 1)}"


def _network(text: str, preset: str | None) -> Timed:
    """Return the network that an argument names.

    Raises:
        FileNotFoundError, ValueError: it names no recipe and no run, or the run has no such network.
    """
    name, which = text, None
    # The names of folders may have an @ of their own.
    if "@" in text and not Path(text).is_dir():
        name, _, which = text.rpartition("@")
    if name in recipes.RECIPES:
        return _of_recipe(text, recipes.recipe(name, preset), which)
    if not Path(name).is_dir():
        raise ValueError(
            f"{text}: {name!r} is neither a recipe nor the folder of a run; recipes are {', '.join(recipes.RECIPES)}"
        )
    if which is not None and not which.isdecimal():
        raise ValueError(f"{text}: after @ comes a phase of the run, an integer >= 0; got {which!r}")
    return _of_run(text, Path(name), None if which is None else int(which))


def _of_recipe(text: str, recipe: recipes.Recipe, which: str | None) -> Timed:
    classes, shape = classes_and_shape(recipe.dataset, recipe.data_options)
    if which != "seed":
        try:
            scaled = recipe.with_settings({"width_multiplier": 1.0 if which is None else float(which)})
        except ValueError as error:
            raise ValueError(
                f"{text}: after @ comes 'seed', or a positive factor of the recipe's full widths; got {which!r}"
            ) from error
        recipe = scaled.with_settings({"widths": scaled.full()})
    return Timed(text, make_network(recipe, classes), shape, recipe.channels_last, is_of_recipe=True)


def _of_run(text: str, folder: Path, phase: int | None) -> Timed:
    if is_own(folder):
        raise ValueError(f"{text} is the run of a network of your own, which cannot be built here")
    about, path = saved_network(folder, phase)
    model, shape = load_network(about, path), tuple(about["input_shape"])
    return Timed(text, model, shape, recipe_of(about).channels_last, is_of_recipe=False)
