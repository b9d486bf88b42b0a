"""The figure of the RBF experiment, drawn from what the experiment returns; it imports no experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from s3d_fast.models.rbf_batch import RBFBatch
from s3d_fast.report.drawing import require_matplotlib
from s3d_fast.solvers import Spectrum

# (m, c) of the methods that every panel needs.
S2D, SIGNED = (2, 1.0), (2, 3.0)


class MethodLike(Protocol):
    """What the figure uses of a method: m copies, weights bounded by c."""

    @property
    def m(self) -> int: ...
    @property
    def c(self) -> float: ...
    @property
    def name(self) -> str: ...


class StageLike(Protocol):
    """What the figure uses of a stage: all seeds of a method at one size, before the next split."""

    neurons: int
    sizes: Tensor
    steps: int
    loss: Tensor
    model: RBFBatch
    spectra: list[Spectrum]
    chosen: Tensor
    negative: Tensor


class RunLike(Protocol):
    """What the figure uses of the history of one method."""

    times: list[int]
    losses: list[Tensor]

    @property
    def method(self) -> MethodLike: ...
    @property
    def stages(self) -> Sequence[StageLike]: ...


class ProblemLike(Protocol):
    """What the figure uses of the problem: the data of every seed, and a positive split to compare with."""

    @property
    def x(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...
    def positive_branch(self, stage: Any, seed: int, settings: Any) -> RBFBatch | None: ...


def rbf_figure(runs: Sequence[RunLike], problem: ProblemLike, settings: Any, path: Path) -> None:
    """Draw the paper's four panels: losses by method and by c, fitted curves, eigenvalues of the neurons.

    Args:
        runs: the histories of the methods, S2D and S3D with m = 2 and c = 3 among them.
        problem: the problem that all of them were grown on.
        settings: the settings of the experiment.
        path: the file to write.
    """
    plt = require_matplotlib()
    by_rule = {(run.method.m, run.method.c): run for run in runs}
    ordered = [by_rule[rule] for rule in sorted(by_rule)]
    by_copies = [run for run in ordered if run.method.c == SIGNED[1] or run is by_rule[S2D]]
    by_bound = [run for run in ordered if run.method.m == S2D[0]]
    seed = typical_seed(by_rule[S2D], by_rule[SIGNED])
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), constrained_layout=True)
    _losses(axes[0, 0], by_copies, "(a) loss by method (c = 3)")
    _losses(axes[0, 1], by_bound, "(b) loss of m = 2 by c", by_rule[S2D])
    _fits(axes[1, 0], by_copies, problem, seed)
    _eigenvalues(axes[1, 1], by_rule[SIGNED], problem, seed, settings)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def divergence(run: RunLike, base: RunLike) -> int | None:
    """Return the step by which half of the seeds were split differently than by `base`, or None if they never are."""
    apart = torch.zeros(len(run.stages[0].loss), dtype=torch.bool)
    for stage, other in zip(run.stages, base.stages, strict=True):
        apart |= (stage.chosen != other.chosen) | (stage.negative != other.negative)
        if 2 * int(apart.sum()) >= len(apart):
            return stage.steps
    return None


def typical_seed(base: RunLike, signed: RunLike, neurons: int = 5) -> int:
    """Return the seed, counted from 0, with the median gain of signed over positive splits."""
    positive, negative = _at(base, neurons), _at(signed, neurons)
    assert positive is not None
    assert negative is not None
    ratio = (positive.loss / negative.loss.clamp(min=1e-12)).log()
    return int(ratio.argsort()[(len(ratio) - 1) // 2])


def _at(run: RunLike, neurons: int) -> StageLike | None:
    """Return the stage of the given size, or None if the method skips it."""
    return next((stage for stage in run.stages if stage.neurons == neurons), None)


def _losses(axis: Any, runs: Sequence[RunLike], title: str, reference: RunLike | None = None) -> None:
    quartiles = torch.tensor([0.25, 0.5, 0.75])
    for run in runs:
        losses = torch.stack(run.losses)
        low, middle, high = losses.quantile(quartiles, dim=1).numpy()
        times = [time / 1e4 for time in run.times]
        (line,) = axis.plot(times, middle, label=run.method.name, linewidth=1.5)
        axis.fill_between(times, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
        if reference is not None and run is not reference:
            apart = divergence(run, reference)
            if apart is not None:
                index = min(range(len(run.times)), key=lambda i: abs(run.times[i] - apart))
                axis.plot(times[index], middle[index], "^", color=line.get_color(), markersize=9)
    axis.set(title=title, xlabel="steps (x 10^4)", ylabel="loss: median, quartiles", yscale="log")
    axis.legend(fontsize=8)


def _fits(axis: Any, runs: Sequence[RunLike], problem: ProblemLike, seed: int) -> None:
    order = problem.x[seed].argsort()
    x = problem.x[seed, order]
    axis.plot(x, problem.y[seed, order], color="black", linewidth=2, label="truth")
    for run in runs:
        # A method that skips five neurons is shown at its largest smaller size.
        stage = max((stage for stage in run.stages if stage.neurons <= 5), key=lambda stage: stage.neurons)
        fit = _curve(stage.model, seed, x)
        axis.plot(x, fit, "--", label=f"{run.method.name}: {int(stage.sizes[seed])} neurons")
    axis.set(title="(c) fitted curves at 5 neurons", xlabel="x", ylabel="f(x)")
    axis.legend(fontsize=8)


def _eigenvalues(axis: Any, run: RunLike, problem: ProblemLike, seed: int, settings: Any) -> None:
    stage = _at(run, 5)
    assert stage is not None
    spectrum, theta = stage.spectra[seed], stage.model.theta[seed].detach()
    alive = stage.model.alive[seed] > 0
    centres = (-theta[:, 1] / theta[:, 0])[alive].clamp(-5.5, 5.5).numpy()
    low, high = spectrum.lambda_min[alive].numpy(), spectrum.lambda_max[alive].numpy()
    axis.bar(centres, high, width=0.25, color="tab:blue", alpha=0.8, label="lambda_max")
    axis.bar(centres, low, width=0.25, color="tab:red", alpha=0.8, label="lambda_min")
    span = max(float(high.max() - low.min()), 1e-12)
    for values, place, colour in ((high, high.argmax(), "tab:blue"), (low, low.argmin(), "tab:red")):
        sign = 1 if colour == "tab:blue" else -1
        tip = float(values[place]) if sign * float(values[place]) > 0 else 0.0
        axis.annotate(
            "split",
            xy=(float(centres[place]), tip),
            xytext=(float(centres[place]), tip + sign * 0.12 * span),
            ha="center",
            arrowprops={"arrowstyle": "->", "color": colour},
            color=colour,
        )
    axis.margins(y=0.3)
    axis.set(
        title="(d) eigenvalues at 5 neurons, and the split",
        xlabel="centre of the neuron",
        ylabel="eigenvalue",
    )

    curves = axis.twinx()
    order = problem.x[seed].argsort()
    x = problem.x[seed, order]
    curves.plot(x, problem.y[seed, order], color="black", linewidth=1, label="truth")
    after = _at(run, 6)
    if after is not None:
        curves.plot(x, _curve(after.model, seed, x), "--", color="tab:blue", label="after the signed split")
    positive = problem.positive_branch(stage, seed, settings)
    if positive is not None:
        curves.plot(x, _curve(positive, 0, x), "--", color="tab:orange", label="after the positive split")
    curves.set_ylabel("f(x)")
    handles = [axis.get_legend_handles_labels(), curves.get_legend_handles_labels()]
    curves.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], fontsize=8)


def _curve(model: RBFBatch, network: int, x: Tensor) -> Tensor:
    """Return f(x) of one network of a batch."""
    parameter = next(model.parameters())
    with torch.no_grad():
        return model(x.to(parameter.dtype).expand(len(parameter), -1))[network]
