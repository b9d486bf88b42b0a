"""Experiment G: growth of the gated feed-forward layers of a small transformer at equal compute."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

import s3d_fast as s3d
from benchmarks.results import text
from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.rows import (
    Cell,
    Row,
    counted,
    mean_of,
    means_figure,
    minus,
    minus_scratch,
    rate_of,
    rows_table,
    runs_of,
    signed_splits,
)
from benchmarks.results.text import CONTEXT, Text, bits, loss_of, reader

RATES = (0.015, 0.03, 0.06)
SEEDS = 8
# Multiply-accumulates x samples of every run; sequences of a batch, and those that growth looks at.
COMPUTE, BATCH, SAMPLES = 1.6e10, 32, 512
# Hidden neurons of every block at first; growth makes half as many more at each of these shares of the compute.
FIRST, MORE, AT = 3, 0.5, (0.05, 0.1, 0.15, 0.2)
EPS = "relative:0.3"
# Bits per byte differ by hundredths.
DIGITS = 3


def _adding(kind: str) -> dict[str, object]:
    return {"splits": False, "new_filters": {"kind": kind}}


ROWS = (
    Row("s2d", "S2D", {"m": 2, "c": 1.0}),
    Row("new", "new neurons, random", _adding("random")),
    Row("s2d scratch", "scratch, widths of S2D", like="s2d"),
    Row("new scratch", "scratch, widths of new neurons", like="new"),
    Row("firefly", "Firefly", _adding("firefly")),
    Row("gradmax", "GradMax", _adding("gradmax")),
    Row("s3d c1.3", "S3D, m = 2, c = 1.3", {"m": 2, "c": 1.3}),
    Row("s3d m3", "S3D, m = 3, c = 3", {"m": 3, "c": 3.0}),
    Row("first", "scratch, never grown"),
)


def runs() -> list[Run]:
    """Return all runs, seed by seed."""
    return runs_of(ROWS, RATES, SEEDS)


def perform(run: Run, records: Records, data: Text) -> Record:
    """Train one transformer, which may grow, until the compute is spent."""
    settings = run.settings
    row = next(row for row in ROWS if row.key == settings["row"])
    hidden = [FIRST] * text.BLOCKS if row.like is None else next(iter(records.values()))["widths"]
    return _Training(row, settings["lr"], settings["seed"], hidden, data).perform()


class _Training:
    """One run: training along one cosine over the compute, with steps of growth at some shares of it."""

    def __init__(self, row: Row, rate: float, seed: int, hidden: list[int], data: Text) -> None:
        self.row, self.rate, self.seed, self.data = row, rate, seed, data
        self.model = reader(hidden, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01, fused=True)
        self.batches = data.batches(BATCH, torch.Generator().manual_seed(seed))
        self.spent, self.samples, self.growing = 0.0, 0, 0.0
        self.phases: list[Record] = []

    def perform(self) -> Record:
        """Return the record of the run."""
        steps = AT if self.row.options else ()
        for place, share in enumerate((*steps, 1.0)):
            self._train(share * COMPUTE)
            if place < len(steps):
                began = time.process_time()
                self._grow(place)
                self.growing += time.process_time() - began
        graph = self._graph()
        return {
            "bits": round(bits(self.model, self.data), 4),
            "widths": list(graph.widths().values()),
            "params": sum(parameter.numel() for parameter in self.model.parameters()),
            "macs": s3d.count(graph).macs,
            "samples": self.samples,
            "compute": self.spent,
            "growth_seconds": round(self.growing, 2),
            "phases": self.phases,
        }

    def _graph(self) -> s3d.Graph:
        return s3d.trace(self.model, self.data.test[:2, :-1])

    def _train(self, until: float) -> None:
        macs = s3d.count(self._graph()).macs
        self.model.train()
        while self.spent + macs * BATCH / 2 < until:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * 0.5 * (1 + math.cos(math.pi * self.spent / COMPUTE))
            x, y = next(self.batches)
            self.optimizer.zero_grad(set_to_none=True)
            loss_of(self.model(x), y).backward()
            self.optimizer.step()
            self.spent += macs * BATCH
            self.samples += BATCH

    def _grow(self, place: int) -> None:
        draw = torch.Generator().manual_seed(1000 * self.seed + 100 + place)
        drawn = self.data.batches(128, draw)
        batches = [next(drawn) for _ in range(SAMPLES // 128)]
        options = dict(self.row.options)
        if "new_filters" in options:
            options["new_filters"] = {**options["new_filters"], "generator": draw}
        width = sum(self._graph().widths().values())
        extra = round(MORE * width)
        # A split into m copies adds m - 1 neurons.
        top = extra // (options.get("m", 2) - 1)
        self.model.eval()
        step = s3d.grow_step(self.model, loss_of, batches, self.optimizer, eps=EPS, top_k=top, **options)
        self.phases.append(counted(step.plan))


def compared(records: Records) -> Comparison:
    """Return the bits per byte of all rows on the seeds that are complete."""
    return Comparison.of(records, [row.key for row in ROWS], RATES, lambda record: record["bits"], lower=True)


def parts(records: Records) -> Mapping[str, str]:
    """Return the table of all rows, the best first."""
    columns: dict[str, Cell] = {
        "minus scratch of its widths": minus_scratch(ROWS, DIGITS),
        "minus scratch, never grown": minus("first", DIGITS),
        "learning rate": rate_of,
        "hidden neurons": _hidden,
        "parameters": mean_of("params"),
        "sequences": mean_of("samples"),
        "CPU s of growth": mean_of("growth_seconds", 1, grown=True),
        "signed splits": _signed,
    }
    return {"G: rows": rows_table(compared(records), ROWS, "bits per byte", columns, DIGITS)}


def _hidden(found: Comparison, row: Row) -> str:
    own = found.of_row(row.key)
    return f"{sum(sum(one['widths']) for one in own) / len(own):.0f}"


def _signed(found: Comparison, row: Row) -> str:
    signed, splits = signed_splits(found.of_row(row.key))
    return f"{signed / splits:.0%} of {splits}" if splits else ""


def values(records: Records) -> Mapping[str, str]:
    """Return differences for sentences: "G: new - new scratch"."""
    found = compared(records)
    pairs = (
        *(("new", "new scratch"), ("s2d", "s2d scratch"), ("new", "s2d"), ("s3d c1.3", "s2d"), ("s3d m3", "s2d")),
        *(("firefly", "new"), ("gradmax", "new"), ("s2d scratch", "first"), ("new", "first"), ("s2d", "first")),
        ("new scratch", "first"),
    )
    texts = {f"G: {first} - {second}": found.minus(first, second).shown(DIGITS, "+") for first, second in pairs}
    texts |= {
        f"G: {first} - {second} over rates": found.minus_over_rates(first, second).shown(DIGITS, "+")
        for first, second in pairs
    }
    return texts | {"G: seeds": str(len(found.seeds("s2d")))}


def figures(records: Records) -> Mapping[str, str]:
    """Return the bits per byte as a figure."""
    found = compared(records)
    drawn = means_figure(
        found,
        ROWS,
        "transformer",
        title="A small transformer on Python's own sources at equal compute: bits per byte of the test file",
        x_label=f"bits per byte, lower is better; mean and 95% interval of {len(found.seeds('s2d'))} seeds",
        digits=DIGITS,
    )
    return {"results-G.svg": drawn}


def _load(path: str) -> Text:
    """Return the text, which no file of ours holds."""
    return text.load()


EXPERIMENT = Experiment(
    key="G",
    title="gated feed-forward layers of a small transformer, grown and from scratch at equal compute",
    runs=runs,
    perform=perform,
    about={
        "compute": COMPUTE,
        "sequences of a batch": BATCH,
        "sequences for growth": SAMPLES,
        "context": CONTEXT,
        "width": text.WIDTH,
        "blocks": text.BLOCKS,
        "first width": FIRST,
        "growth at": AT,
        "eps": EPS,
        "text": text.load(2).digest,
    },
    load=_load,
    parts=parts,
    values=values,
    figures=figures,
)
