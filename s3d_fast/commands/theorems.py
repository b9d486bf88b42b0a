"""s3d-fast theorems: what Theorems 4 and 5 of the paper guarantee, and what happens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from tqdm.auto import tqdm

from s3d_fast import report
from s3d_fast.base.tables import text_table
from s3d_fast.commands.parsing import Parser
from s3d_fast.experiments import theorems
from s3d_fast.experiments.theorem_records import explanation, record, theorem_table
from s3d_fast.report.plot import beside


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Split networks of one hidden layer as Theorems 4 and 5 assume, and compare the loss with their bound; "
        "print a table, draw a figure. Takes about ten seconds."
    )
    defaults = theorems.TheoremSettings()
    command.add_argument("--dimension", type=int, default=defaults.dimension, help="d; default: %(default)s")
    command.add_argument(
        "--samples", type=int, default=defaults.samples, help="n, at most d (d + 1) / 2; default: %(default)s"
    )
    command.add_argument(
        "--target", type=float, default=defaults.target, help="eta as a share of the first loss; default: %(default)s"
    )
    command.add_argument(
        "--reach", type=float, default=defaults.reach, help="softplus: |theta . x| stays below it; default: %(default)s"
    )
    command.add_argument(
        "--descent",
        type=int,
        default=defaults.descent,
        help="gradient steps between splits, which take minutes; default: %(default)s",
    )
    command.add_argument("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    command.add_argument(
        "--out", type=Path, default=Path("runs/theorems"), help="folder for results; default: %(default)s"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Split the networks of all cases, print the table and draw the figure."""
    names = [field.name for field in fields(theorems.TheoremSettings)]
    settings = theorems.TheoremSettings(**{name: getattr(options, name) for name in names})
    data = theorems.make_data(settings)
    options.out.mkdir(parents=True, exist_ok=True)

    records = []
    threads = torch.get_num_threads()
    # Tensors this small do not gain from a second thread.
    torch.set_num_threads(1)
    try:
        with tqdm(unit="split") as bar:
            for case in theorems.CASES:
                bar.set_description(f"{case.unit.name} m={case.m}")
                records.append(record(theorems.run_case(case, data, settings, bar.update)))
    finally:
        torch.set_num_threads(threads)
    figure = report.theorem_figure(records)
    text = "\n\n".join([text_table(theorem_table(records)), explanation(records), f"theorems.svg: {figure.caption}"])
    print(f"\n{text}\n")

    path = options.out / "theorems.svg"
    path.write_text(beside(figure.plots))
    (options.out / "theorems.txt").write_text(text + "\n")
    (options.out / "theorems.json").write_text(json.dumps([asdict(one) for one in records], indent=1) + "\n")
    print(f"Written: {path}, theorems.txt, theorems.json")
    return 0
