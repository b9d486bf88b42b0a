"""The figure of the RBF experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from s3d_fast.experiments import rbf_growth as rbf
from s3d_fast.report.drawing import require_matplotlib


def rbf_figure(runs: Sequence[rbf.MethodRun], problem: rbf.Problem, settings: rbf.RBFSettings, path: Path) -> None:
    """Draw the paper's four panels: losses by method and by c, fitted curves, eigenvalues of the neurons."""
    plt = require_matplotlib()
    by_method = {run.method: run for run in runs}
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), constrained_layout=True)
    seed = rbf.typical_seed(runs)
    _losses(axes[0, 0], [by_method[method] for method in rbf.BY_COPIES], "(a) loss by method (c = 3)")
    _losses(axes[0, 1], [by_method[method] for method in rbf.BY_BOUND], "(b) loss of m = 2 by c", rbf.S2D)
    _fits(axes[1, 0], [by_method[method] for method in rbf.BY_COPIES], problem, seed)
    _eigenvalues(axes[1, 1], by_method[rbf.Method(2, 3.0)], problem, seed, settings)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _losses(axis: Any, runs: Sequence[rbf.MethodRun], title: str, base: rbf.Method | None = None) -> None:
    reference = next((run for run in runs if run.method == base), None)
    quartiles = torch.tensor([0.25, 0.5, 0.75])
    for run in runs:
        losses = torch.stack(run.losses)
        low, middle, high = losses.quantile(quartiles, dim=1).numpy()
        times = [time / 1e4 for time in run.times]
        (line,) = axis.plot(times, middle, label=run.method.name, linewidth=1.5)
        axis.fill_between(times, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
        if reference is not None and run is not reference:
            apart = rbf.divergence(run, reference)
            if apart is not None:
                index = min(range(len(run.times)), key=lambda i: abs(run.times[i] - apart))
                axis.plot(times[index], middle[index], "^", color=line.get_color(), markersize=9)
    axis.set(title=title, xlabel="steps (x 10^4)", ylabel="loss: median, quartiles", yscale="log")
    axis.legend(fontsize=8)


def _fits(axis: Any, runs: Sequence[rbf.MethodRun], problem: rbf.Problem, seed: int) -> None:
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


def _eigenvalues(axis: Any, run: rbf.MethodRun, problem: rbf.Problem, seed: int, settings: rbf.RBFSettings) -> None:
    stage = run.at(5)
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
    after = run.at(6)
    if after is not None:
        curves.plot(x, _curve(after.model, seed, x), "--", color="tab:blue", label="after the signed split")
    positive = rbf.positive_branch(problem, stage, seed, settings)
    if positive is not None:
        curves.plot(x, _curve(positive, 0, x), "--", color="tab:orange", label="after the positive split")
    curves.set_ylabel("f(x)")
    handles = [axis.get_legend_handles_labels(), curves.get_legend_handles_labels()]
    curves.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], fontsize=8)


def _curve(model: torch.nn.Module, network: int, x: torch.Tensor) -> torch.Tensor:
    """Return f(x) of one network of a batch."""
    parameter = next(model.parameters())
    with torch.no_grad():
        return model(x.to(parameter.dtype).expand(len(parameter), -1))[network]
