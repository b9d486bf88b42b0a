"""The runs of the experiment on Theorems 4 and 5 as plain data, and the table of what they guarantee and take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from s3d_fast.experiments.theorems import WEIGHT_BOUND, TheoremRun


@dataclass(frozen=True)
class TheoremRecord:
    """A run as plain data, for tables, figures and files."""

    unit: str
    m: int
    theorem: int
    dimension: int
    samples: int
    lambda_x: float
    h: float
    least_curvature: float
    alpha: float
    rho_0: float
    C: float
    eps: float
    first_loss: float
    eta: float
    last_loss: float
    decrease: float  # guaranteed for every split
    least_decrease: float | None  # of all splits, the smallest
    bound: int  # T
    splits: int
    first_neurons: int
    neurons: int
    least_lemma: float | None  # the smallest alpha (rho / w)^2 / (2 L) of all splits; the Lemma says >= 1
    stopped_by: str
    losses: list[tuple[int, float]]  # the loss after so many splits, at some of them


def record(run: TheoremRun, points: int = 60) -> TheoremRecord:
    """Return a run as plain data, with the loss at about so many splits, dense at the start.

    Without a split, as when gradient descent alone reaches the target, there is no decrease and no Lemma to record.
    """
    promise, count = run.promise, len(run.steps)
    at = sorted({round(count ** (place / points)) for place in range(points + 1) if count})
    return TheoremRecord(
        unit=run.case.unit.name,
        m=run.case.m,
        theorem=run.case.theorem,
        dimension=run.network.data.x.shape[1],
        samples=run.network.data.x.shape[0],
        lambda_x=promise.lambda_x,
        h=promise.h,
        least_curvature=run.least_curvature,
        alpha=promise.alpha,
        rho_0=promise.rho_0,
        C=promise.C,
        eps=promise.eps,
        first_loss=promise.first_loss,
        eta=promise.eta,
        last_loss=run.network.loss,
        decrease=promise.decrease,
        least_decrease=min((step.before - step.after for step in run.steps), default=None),
        bound=promise.splits,
        splits=count,
        first_neurons=run.first_neurons,
        neurons=run.network.size,
        least_lemma=min((step.lemma / (2 * step.before) for step in run.steps), default=None),
        stopped_by=run.stopped_by,
        losses=[(split, run.steps[split - 1].after) for split in at],
    )


def theorem_table(records: Sequence[TheoremRecord]) -> list[list[str]]:
    """Return a table of what the theorems guarantee and what happened."""
    head = ["units", "m", "theorem", "eps", "T", "splits taken", "decrease / guaranteed", "Lemma / 2 L", "neurons"]
    return [
        head,
        *(
            [
                one.unit,
                str(one.m),
                str(one.theorem),
                f"{one.eps:.3g}",
                f"{one.bound:,}",
                f"{one.splits:,}",
                _ratio(one.least_decrease, one.decrease),
                _ratio(one.least_lemma, 1.0),
                f"{one.first_neurons:,} to {one.neurons:,}",
            ]
            for one in records
        ),
    ]


def explanation(records: Sequence[TheoremRecord]) -> str:
    """Return what the columns of the table mean, with the numbers that all runs share."""
    one = records[0]
    return (
        f"d = {one.dimension}, n = {one.samples}, lambda_X = {one.lambda_x:.4f}, c = {WEIGHT_BOUND:g}. "
        f"Every run stops at eta = {one.eta / one.first_loss:g} of its first loss.\n"
        "T: the most splits that the theorem allows.\n"
        "decrease / guaranteed: the smallest decrease of the loss by a split, over eps^2/4 kappa rho_0.\n"
        "Lemma / 2 L: the smallest alpha (rho / w)^2 / (2 L) of a neuron that was split.\n"
        "The theorems hold if both ratios are at least 1 and the splits taken at most T."
    )


def _ratio(value: float | None, of: float) -> str:
    return "-" if value is None else f"{value / of:.2f}"
