"""The command line: s3d-fast COMMAND."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from s3d_fast import __version__, report
from s3d_fast.experiments import rbf
from s3d_fast.tables import text_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="s3d-fast", description="Grow neural networks by signed splitting steepest descent."
    )
    parser.add_argument("--version", action="version", version=f"s3d_fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_rbf(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"s3d-fast: {error}", file=sys.stderr)
        return 2


def _add_rbf(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "rbf",
        help="the paper's toy experiment: RBF networks grown by S2D and S3D",
        description="Grow one-dimensional RBF networks from one neuron with S2D and S3D; print a table, draw a figure.",
    )
    command.add_argument("--preset", choices=tuple(rbf.PRESETS), default="quick", help="default: %(default)s")
    command.add_argument("--seeds", type=int, help="networks per method, trained as one batch")
    command.add_argument("--neurons", type=int, help="the size to grow to, at least 5")
    command.add_argument("--steps", type=int, help="gradient steps per neuron")
    command.add_argument("--eps", type=float, help="size of a split")
    command.add_argument("--first-seed", type=int, help="the first of the seeds")
    command.add_argument("--out", type=Path, default=Path("runs/rbf"), help="folder for results; default: %(default)s")
    command.set_defaults(run=_run_rbf)


def _run_rbf(options: argparse.Namespace) -> int:
    names = ("seeds", "neurons", "steps", "eps", "first_seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings = replace(rbf.PRESETS[options.preset], **given)
    # Before the work, not after it: a missing library or folder should not cost a run.
    report.require_matplotlib()
    options.out.mkdir(parents=True, exist_ok=True)

    problem = rbf.make_problem(settings)
    total = len(rbf.METHODS) * settings.steps * settings.neurons
    runs = []
    with _small_tensors(), tqdm(total=total, unit="step", smoothing=0.05) as bar:
        for method in rbf.METHODS:
            bar.set_description(method.name)
            runs.append(rbf.grow(problem, method, settings, bar.update))
    text = "\n\n".join(
        [
            f"Loss over {settings.seeds} seeds, {settings.steps} steps per neuron: median [quartiles].",
            *(text_table(rbf.loss_table(runs, group, settings.neurons)) for group in (rbf.BY_COPIES, rbf.BY_BOUND)),
            "stuck: networks that had no split left to gain from before they reached the last size.",
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
def _small_tensors() -> Iterator[None]:
    """Compute with one thread and without denormal numbers.

    Tensors this small do not gain from a second thread; and exp(-z^2 / 2) far from a centre is a denormal number, which
    is slow to compute with and contributes nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
