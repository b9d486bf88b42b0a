"""The figure of the demo: what positive and signed splits make of a photograph and of a curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from s3d_fast.report.drawing import require_matplotlib

POSITIVE, SIGNED = "#c8452c", "#1f6fb4"
# Powers of ten; and ticks of scales that hold no two of them.
DECADES, FINER = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0), (0.1, 0.2, 0.3, 0.5, 1.0)
COLOURS = {"S2D": POSITIVE, "S3D": SIGNED}


@dataclass(frozen=True)
class Fit:
    """What one method made of one target, and its loss by size over all seeds."""

    method: str  # "S2D" or "S3D"
    fitted: Tensor  # like the target
    error: float  # of `fitted`
    neurons: list[int]
    losses: list[Tensor]  # each (R,), one for every number of neurons


@dataclass(frozen=True)
class Task:
    """A target and the fits of both methods.

    Attributes:
        name: the heading.
        target: (H, W), a picture; or (N,), values of a curve.
        fits: of S2D and of S3D.
        x: (N,), ascending, where the curve has these values; None for a picture.
    """

    name: str
    target: Tensor
    fits: Sequence[Fit]
    x: Tensor | None = None


def demo_figure(tasks: Sequence[Task], path: Path) -> None:
    """Draw a row for every task: the target, what S2D and S3D make of it, and their losses by number of neurons.

    Args:
        tasks: what was fitted.
        path: the file to write.
    """
    plt = require_matplotlib()
    figure, axes = plt.subplots(
        len(tasks), 4, figsize=(13, 3.6 * len(tasks)), width_ratios=(1, 1, 1, 1.35), constrained_layout=True,
        squeeze=False,
    )  # fmt: skip
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.14, wspace=0.03)
    for row, task in zip(axes, tasks, strict=True):
        _target(row[0], task)
        for axis, fit in zip(row[1:3], task.fits, strict=True):
            _fit(axis, task, fit)
        _losses(row[3], task)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _target(axis: Any, task: Task) -> None:
    axis.set_title(task.name, fontsize=12, fontweight="bold")
    if task.x is None:
        _picture(axis, task, task.target)
    else:
        axis.plot(task.x, task.target, color="0.3", linewidth=4)
        _curve_frame(axis, task)


def _fit(axis: Any, task: Task, fit: Fit) -> None:
    colour = COLOURS[fit.method]
    word = "positive" if fit.method == "S2D" else "signed"
    axis.set_title(f"{fit.method}, {word} splits: {fit.neurons[-1]} neurons", fontsize=12, color=colour)
    if task.x is None:
        _picture(axis, task, fit.fitted)
        axis.set_xlabel(f"loss {fit.error:.2g}", fontsize=11, color=colour)
        return
    axis.plot(task.x, task.target, color="0.78", linewidth=6, solid_capstyle="round")
    axis.plot(task.x, fit.fitted, color=colour, linewidth=2)
    axis.set_xlabel(f"loss {fit.error:.2g}", fontsize=11, color=colour)
    _curve_frame(axis, task)


def _curve_frame(axis: Any, task: Task) -> None:
    """Give all panels of a curve the same scale."""
    _bare(axis)
    both = torch.cat([task.target, *(one.fitted.to(task.target) for one in task.fits)])
    margin = 0.06 * float(both.max() - both.min())
    axis.set_ylim(float(both.min()) - margin, float(both.max()) + margin)
    axis.set_box_aspect(1)


def _picture(axis: Any, task: Task, picture: Tensor) -> None:
    axis.imshow(picture.numpy(), cmap="gray", vmin=float(task.target.min()), vmax=float(task.target.max()))
    _bare(axis)


def _bare(axis: Any) -> None:
    axis.set_xticks([])
    axis.set_yticks([])


def _losses(axis: Any, task: Task) -> None:
    """Draw the medians as lines, and the middle half of the seeds as bars that stand beside one another."""
    axis.set_yscale("log")
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    for fit, shift in zip(task.fits, (-0.09, 0.09), strict=True):
        colour = COLOURS[fit.method]
        low, middle, high = torch.stack([one.double().quantile(quartiles) for one in fit.losses], 1)
        places = [size + shift for size in fit.neurons]
        axis.vlines(places, low, high, color=colour, linewidth=4, alpha=0.3)
        axis.plot(places, middle, "o-", color=colour, linewidth=2, markersize=5)
        axis.annotate(
            fit.method, (places[-1], float(middle[-1])), (8, 0), textcoords="offset points", va="center",
            color=colour, fontsize=12, fontweight="bold",
        )  # fmt: skip
    lowest, highest = axis.get_ylim()
    ticks = [tick for tick in (DECADES if highest / lowest > 30 else FINER) if lowest <= tick <= highest]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_yticks([], minor=True)
    most = max(fit.neurons[-1] for fit in task.fits)
    axis.set(xlabel="neurons", xlim=(0.6, most + 1.2), xticks=range(1, most + 1, 2))
    axis.set_title("loss by neurons: median, middle half of seeds", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9")
    axis.set_axisbelow(True)
