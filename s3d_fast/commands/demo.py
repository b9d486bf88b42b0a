"""s3d-fast demo: what signed splits can do that positive ones cannot, on a photograph and on curves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tqdm.auto import tqdm

from s3d_fast import report
from s3d_fast.commands.parsing import Parser
from s3d_fast.commands.rbf import small_tensors
from s3d_fast.experiments import demo


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Grow small networks from one neuron with S2D and S3D, on a photograph and on curves; print tables, draw a "
        "figure. Takes one to two minutes."
    )
    command.add_argument("--seeds", type=int, help="networks per method and task, trained as one batch; default: 16")
    command.add_argument(
        "--steps",
        type=int,
        help="gradient steps per neuron on curves, ten times those on the photograph; default: 3000",
    )
    command.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for results; default: %(default)s")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Grow the networks, print the tables and draw the figure."""
    given = {name: getattr(options, name) for name in ("seeds", "steps") if getattr(options, name) is not None}
    settings = demo.DemoSettings(**given)
    # Check before the run, so that a missing library or folder cannot spoil its end.
    report.require_matplotlib()
    options.out.mkdir(parents=True, exist_ok=True)
    with small_tensors(), tqdm(total=settings.total, unit="step", smoothing=0.05) as bar:
        found = demo.run(settings, bar.update)
    text = demo.words(found, settings)
    print(f"\n{text}\n")
    report.demo_figure(found.tasks, options.out / "demo.png")
    (options.out / "demo.txt").write_text(text + "\n")
    (options.out / "demo.json").write_text(json.dumps(demo.record(found)) + "\n")
    print(f"Written: {options.out / 'demo.png'}, demo.txt, demo.json")
    return 0
