"""s3d-fast rbf: the paper's toy experiment."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from s3d_fast import report
from s3d_fast.base.tables import text_table
from s3d_fast.commands.parsing import Parser
from s3d_fast.experiments import rbf_growth as rbf


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Grow one-dimensional RBF networks from one neuron with S2D and S3D; print a table, draw a figure."
    )
    command.add_argument("--preset", choices=tuple(rbf.PRESETS), default="quick", help="default: %(default)s")
    command.add_argument("--seeds", type=int, help="networks per method, trained as one batch")
    command.add_argument("--neurons", type=int, help="the size to grow to, at least 5")
    command.add_argument("--steps", type=int, help="gradient steps per neuron")
    command.add_argument("--eps", type=float, help="size of a split")
    command.add_argument("--first-seed", type=int, help="the first seed")
    command.add_argument("--out", type=Path, default=Path("runs/rbf"), help="folder for results; default: %(default)s")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Grow the networks, print the table and draw the figure."""
    names = ("seeds", "neurons", "steps", "eps", "first_seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings = replace(rbf.PRESETS[options.preset], **given)
    # Check before the run, so that a missing library or folder cannot spoil its end.
    report.require_matplotlib()
    options.out.mkdir(parents=True, exist_ok=True)

    problem = rbf.make_problem(settings)
    total = len(rbf.METHODS) * settings.steps * settings.neurons
    runs = []
    with small_tensors(), tqdm(total=total, unit="step", smoothing=0.05) as bar:
        for method in rbf.METHODS:
            bar.set_description(method.name)
            runs.append(rbf.grow(problem, method, settings, bar.update))
    text = "\n\n".join(
        [
            f"Loss over {settings.seeds} seeds, {settings.steps} steps per neuron: median [quartiles].",
            *(text_table(rbf.loss_table(runs, group, settings.neurons)) for group in (rbf.BY_COPIES, rbf.BY_BOUND)),
            "stuck: networks that ran out of useful splits before they reached the last size.",
            rbf.verdict(runs),
        ]
    )
    print(f"\n{text}\n")

    figure = options.out / "rbf.png"
    report.rbf_figure(runs, problem, settings, figure)
    (options.out / "rbf.txt").write_text(text + "\n")
    records = [rbf.summary(run) for run in runs]
    (options.out / "rbf.json").write_text(json.dumps(records, indent=1) + "\n")
    print(f"Written: {figure}, rbf.txt, rbf.json")
    return 0


@contextmanager
def small_tensors() -> Iterator[None]:
    """Compute with one thread and without denormal numbers.

    Tensors this small do not gain from a second thread. Far from a centre exp(-z^2 / 2) is a denormal number, which is
    slow to compute with and contributes nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
