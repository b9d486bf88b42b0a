"""The figures of one run: size, widths, spectra, predicted and measured changes of the loss, time and training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from s3d_fast.records.record import EIGEN_STAGES, PhaseRecord
from s3d_fast.records.run import Run, eigen_share, main_metric, share_of_eigen_stages
from s3d_fast.records.run_folder import read_spectra
from s3d_fast.report import drawing, wording
from s3d_fast.report.drawing import canvas, label, png

# Greys for the stages of any training, colours for the stages that splitting adds.
STAGE_COLOURS = {
    "train": "#c8c8c8",
    "evaluate": "#8a8a8a",
    "capture": "#56B4E9",
    "solve": "#0072B2",
    "select": "#E69F00",
    "split": "#D55E00",
}
OTHER_STAGE = "#444444"


@dataclass(frozen=True)
class Figure:
    """A figure, or the reason why there is none.

    Attributes:
        name: the name of its file, without the suffix.
        title: the title of its section.
        caption: what the figure shows; without an image, why there is none.
        image: the PNG file.
    """

    name: str
    title: str
    caption: str
    image: bytes | None = None


def run_figures(run: Run) -> list[Figure]:
    """Draw all figures of a run."""
    makers = (costs_figure, widths_figure, spectra_figure, promises_figure, times_figure, training_figure)
    return [make(run) for make in makers]


def costs_figure(run: Run) -> Figure:
    """Draw the main metric of every phase against parameters and MACs."""
    name, metric = "costs", main_metric([run])
    if metric is None:
        return Figure(name, "Quality and size", "Left out: no phase has a metric.")
    title = f"{wording.title(metric)} and size"
    phases = [phase for phase in run.phases if metric in phase.metrics]
    colour, marker = drawing.method_style(run.method)
    with canvas(1, 2, (9, 3.8), sharey=True) as (figure, axes):
        for axis, size, unit in zip(axes[0], ("params", "macs"), ("parameters", "MACs per sample"), strict=True):
            x, y = [getattr(phase, size) for phase in phases], [phase.metrics[metric] for phase in phases]
            axis.plot(x, y, color=colour, marker=marker)
            for phase, at in zip(phases, zip(x, y, strict=True), strict=True):
                axis.annotate(str(phase.index), at, (0, 6), textcoords="offset points", ha="center", fontsize=8)
            drawing.cost_axis(axis, x)
            axis.set_xlabel(unit)
            axis.margins(0.08, 0.12)
        axes[0, 0].set_ylabel(label(metric))
        image = png(figure)
    first, last = phases[0], phases[-1]
    caption = (
        f"{wording.title(metric)} at the end of every phase (the number is the phase) against parameters and against "
        f"multiply-accumulates: from {wording.decimal(first.metrics[metric])} with {wording.whole(first.params)} "
        f"parameters to {wording.decimal(last.metrics[metric])} with {wording.whole(last.params)}."
    )
    return Figure(name, title, caption, image)


def widths_figure(run: Run) -> Figure:
    """Draw the widths of all layers: bars for the first and the last phase, lines for the phases in between."""
    name, title = "widths", "Widths of the layers"
    units = list(dict.fromkeys(unit for phase in run.phases for unit in phase.widths))
    if not units:
        return Figure(name, title, "Left out: no phase has widths.")
    places = np.arange(len(units))
    colour, _ = drawing.method_style(run.method)
    with canvas(1, 1, (min(max(6.5, 1.5 + 0.5 * len(units)), 16), 4.2)) as (figure, axes):
        axis = axes[0, 0]
        first, last = run.phases[0], run.phases[-1]
        if first is last:
            axis.bar(places, _widths(first, units), 0.6, color=colour, label=f"phase {first.index}")
        else:
            axis.bar(places - 0.2, _widths(first, units), 0.38, color="#b5b5b5", label=f"phase {first.index} (first)")
            axis.bar(places + 0.2, _widths(last, units), 0.38, color=colour, label=f"phase {last.index} (last)")
        # matplotlib's legends list lines before bars; this one lists phases in order.
        handles = axis.get_legend_handles_labels()[0]
        between = run.phases[1:-1]
        for phase, shade in zip(between, drawing.shades(len(between)), strict=True):
            line = axis.plot(places, _widths(phase, units), ".-", color=shade, linewidth=1.2)[0]
            line.set_label(f"phase {phase.index}")
            handles.insert(-1, line)
        _layer_ticks(axis, units)
        axis.set_ylabel("width (filters or neurons)")
        if len(run.phases) > 1:
            figure.legend(handles=handles, loc="outside upper left", ncols=6)
        image = png(figure)
    caption = (
        f"Width of every layer in the first phase ({wording.whole(sum(first.widths.values()))} in total) and in the "
        f"last ({wording.whole(sum(last.widths.values()))} in total); lines are the phases in between."
        if first is not last
        else f"Width of every layer in the only phase ({wording.whole(sum(first.widths.values()))} in total)."
    )
    return Figure(name, title, caption, image)


def spectra_figure(run: Run) -> Figure:
    """Draw the extreme eigenvalues of the filters of every layer, one panel for each phase with a split."""
    name, title = "spectra", "Extreme eigenvalues of the splitting matrices"
    drawn, problems, dropped = {}, [], 0
    for phase in run.phases:
        try:
            spectra = read_spectra(run.folder, phase.index)
        except FileNotFoundError as error:
            # Methods that do not compute eigenvalues write no such file.
            problems += [str(error)] if "solve" in phase.seconds else []
            continue
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        finite = {unit: [end[np.isfinite(end)] for end in pair] for unit, pair in spectra.items()}
        dropped += sum(end.size for pair in spectra.values() for end in pair)
        dropped -= sum(end.size for pair in finite.values() for end in pair)
        if any(end.size for pair in finite.values() for end in pair):
            drawn[phase.index] = finite
    if not drawn:
        why = "; ".join(problems) or ("no eigenvalue is finite" if dropped else "no split has recorded eigenvalues")
        return Figure(name, title, f"Left out: {why}.")
    order = {unit: place for place, unit in enumerate(run.phases[0].widths)}
    units = sorted(
        {unit for layers in drawn.values() for unit in layers}, key=lambda unit: (order.get(unit, len(order)), unit)
    )
    size = (min(max(6.5, 1.5 + 0.5 * len(units)), 16), 1.0 + 2.0 * len(drawn))
    with canvas(len(drawn), 1, size, sharex=True, sharey=True) as (figure, axes):
        every = np.concatenate([end for layers in drawn.values() for pair in layers.values() for end in pair])
        threshold = drawing.symlog_threshold(every.tolist())
        if threshold is not None:
            drawing.symlog(axes[0, 0].yaxis, threshold, (float(every.min()), float(every.max())))
        for axis, (index, layers) in zip(axes[:, 0], drawn.items(), strict=True):
            _eigenvalue_ranges(axis, layers, units)
            axis.set_title(f"split after phase {index}")
        _layer_ticks(axes[-1, 0], units)
        figure.supylabel("eigenvalue", fontsize=10)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper right", ncols=2)
        image = png(figure)
    caption = (
        "Smallest and largest eigenvalue of every filter's splitting matrix, by layer. Thin lines span minimum to "
        "maximum, thick lines join the quartiles, and the marker is the median."
    )
    if dropped:
        caption += f" {wording.plural(dropped, 'value')} that are not finite are left out."
    if problems:
        caption += f" Not shown: {'; '.join(problems)}."
    return Figure(name, title, caption, image)


def promises_figure(run: Run) -> Figure:
    """Draw the measured change of the loss against the predicted one, for every split."""
    points = promised_and_measured(run.phases)
    if not points:
        why = "no split has both a predicted and a measured change of the loss."
        return Figure("promises", "Predicted and measured change of the loss", f"Left out: {why}")
    return draw_promises("promises", {run.variant: (run.method, points)})


def promised_and_measured(phases: Sequence[PhaseRecord]) -> list[tuple[int, float, float]]:
    """Return (phase, predicted change, measured change) of the splits that have both."""
    triples = ((phase.index, phase.predicted, phase.measured) for phase in phases)
    return [(index, first, second) for index, first, second in triples if first is not None and second is not None]


def draw_promises(name: str, groups: Mapping[str, tuple[str, list[tuple[int, float, float]]]]) -> Figure:
    """Draw measured against predicted changes of the loss, for one or several groups of runs with their methods."""
    values = [value for _, points in groups.values() for _, *pair in points for value in pair]
    with canvas(1, 1, (5.4, 5.0)) as (figure, axes):
        axis = axes[0, 0]
        ends = drawing.equal_axes(axis, values)
        axis.plot(ends, ends, color=drawing.GREY, linewidth=1, zorder=1, label="measured = predicted")
        styles = drawing.line_styles([method for method, _ in groups.values()])
        for (group, (_, points)), style in zip(groups.items(), styles, strict=True):
            _, x, y = zip(*points, strict=True)
            axis.plot(x, y, **{**style, "linestyle": ""}, zorder=2, label=label(group))
            if len(groups) == 1:
                _number_points(axis, points)
        axis.legend(loc="upper left")
        axis.set(xlabel="predicted change of the loss", ylabel="measured change of the loss")
        image = png(figure)
    ratios = [second / first for _, points in groups.values() for _, first, second in points if first]
    middle = f"; the median of measured / predicted is {np.median(ratios):.2f}" if ratios else ""
    caption = (
        "Change of the loss by every split"
        f"{' (the number is the phase)' if len(groups) == 1 else ''}, on the batches used for splitting. On the "
        f"diagonal the measured change equals the predicted one{middle}."
    )
    return Figure(name, "Predicted and measured change of the loss", caption, image)


def times_figure(run: Run) -> Figure:
    """Draw the time of every stage by phase, and once more for the splitting stages alone."""
    name, title = "times", "Time"
    phases = [phase for phase in run.phases if sum(phase.seconds.values()) > 0]
    if not phases:
        return Figure(name, title, "Left out: no phase has times.")
    used = dict.fromkeys(stage for phase in phases for stage in phase.seconds)
    stages = [stage for stage in STAGE_COLOURS if stage in used] + [
        stage for stage in used if stage not in STAGE_COLOURS
    ]
    eigen = [stage for stage in stages if stage in EIGEN_STAGES]
    with canvas(1, 2 if eigen else 1, (9 if eigen else 6, 3.9)) as (figure, axes):
        tops = _stacked_seconds(axes[0, 0], phases, stages)
        axes[0, 0].set_title("all stages (above the bars: share of splitting)" if eigen else "all stages")
        if eigen:
            split = [phase for phase in phases if share_of_eigen_stages([phase]) > 0]
            for phase, top in zip(phases, tops, strict=True):
                if phase not in split:
                    continue
                share = wording.percent(share_of_eigen_stages([phase]))
                axes[0, 0].annotate(
                    share, (phase.index, top), (0, 3), textcoords="offset points", ha="center", fontsize=8,
                    rotation=90 if len(phases) > 7 else 0,
                )  # fmt: skip
            _stacked_seconds(axes[0, 1], phases, eigen)
            axes[0, 1].set_title("splitting alone")
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=6)
        image = png(figure)
    total = sum(sum(phase.seconds.values()) for phase in phases)
    caption = f"Time of every stage by phase, {wording.duration(total)} in all" + (
        f", of which splitting (capture, solve, select, split) took {wording.percent(eigen_share(run))}."
        if eigen
        else "."
    )
    return Figure(name, title, caption, image)


def training_figure(run: Run) -> Figure:
    """Draw the training loss over the epochs of all phases."""
    name, title = "training", "Training"
    losses = [epoch.loss for phase in run.phases for epoch in phase.epochs]
    known = [loss for loss in losses if loss is not None]
    if not known:
        return Figure(name, title, "Left out: no epoch has a loss.")
    colour, _ = drawing.method_style(run.method)
    with canvas(1, 1, (9, 3.8)) as (figure, axes):
        axis = axes[0, 0]
        if min(known) > 0 and max(known) > 10 * min(known):
            axis.set_yscale("log")
        start = 0
        phases = [phase for phase in run.phases if phase.epochs]
        for place, phase in enumerate(phases):
            epochs = range(start + 1, start + len(phase.epochs) + 1)
            values = [math.nan if epoch.loss is None else epoch.loss for epoch in phase.epochs]
            axis.plot(epochs, values, color=colour, marker="." if len(losses) <= 60 else "")
            if place:
                axis.axvline(start + 0.5, color=drawing.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
            axis.annotate(
                f"phase {phase.index}" if len(phases) <= 10 else str(phase.index), (start + 0.5, 1),
                (3, 2), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8, color=drawing.GREY,
            )  # fmt: skip
            start += len(phase.epochs)
        axis.set(xlim=(0.5, start + 0.5), xlabel="epochs of all phases", ylabel="training loss")
        drawing.whole_numbers(axis)
        image = png(figure)
    gaps = f"; {len(losses) - len(known)} without a finite loss are gaps" if len(known) < len(losses) else ""
    splits = "" if len(phases) == 1 else f"; dashed lines are {'splits' if run.is_grown else 'new networks'}"
    counts = f"{wording.plural(len(losses), 'epoch')} over {wording.plural(len(phases), 'phase')}"
    caption = f"Training loss of {counts}{splits}{gaps}."
    return Figure(name, title, caption, image)


def _number_points(axis: Any, points: Sequence[tuple[int, float, float]]) -> None:
    """Write the phase beside its point, unless another number is there already."""
    taken: list[np.ndarray] = []
    for index, *at in points:
        place = axis.transData.transform(at)
        if all(np.linalg.norm(place - other) > 12 for other in taken):
            axis.annotate(str(index), at, (6, -3), textcoords="offset points", fontsize=8)
            taken.append(place)


def _widths(phase: PhaseRecord, units: Sequence[str]) -> list[int]:
    return [phase.widths.get(unit, 0) for unit in units]


def _layer_ticks(axis: Any, units: Sequence[str]) -> None:
    longest = max(len(label(unit)) for unit in units)
    steep = longest * len(units) > 60
    axis.set_xticks(
        range(len(units)), [label(unit) for unit in units],
        rotation=45 if steep else 0, ha="right" if steep else "center",
        rotation_mode="anchor" if steep else "default", fontsize=9 if len(units) <= 30 else 7,
    )  # fmt: skip
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.6, len(units) - 0.4)


def _eigenvalue_ranges(axis: Any, layers: Mapping[str, Sequence[np.ndarray]], units: Sequence[str]) -> None:
    styles = (
        (0, -0.13, drawing.LOW_COLOUR, r"$\lambda_\mathrm{min}$", "v"),
        (1, 0.13, drawing.HIGH_COLOUR, r"$\lambda_\mathrm{max}$", "^"),
    )
    for end, shift, colour, name, marker in styles:
        shown = [
            (place, layers[unit][end]) for place, unit in enumerate(units) if unit in layers and len(layers[unit][end])
        ]
        if not shown:
            continue
        x = [place + shift for place, _ in shown]
        least, lower, middle, upper, most = np.transpose(
            [np.quantile(values, (0, 0.25, 0.5, 0.75, 1)) for _, values in shown]
        )
        axis.vlines(x, least, most, color=colour, linewidth=1)
        axis.vlines(x, lower, upper, color=colour, linewidth=7, alpha=0.35)
        axis.plot(x, middle, linestyle="", marker=marker, markersize=4, color=colour, label=name)
    axis.axhline(0, color=drawing.GREY, linewidth=0.8, zorder=0)


def _stacked_seconds(axis: Any, phases: Sequence[PhaseRecord], stages: Sequence[str]) -> list[float]:
    """Draw the stages of every phase on top of each other; return the heights, in the axis's unit of time."""
    length, unit = drawing.time_unit(max(sum(phase.seconds.get(stage, 0.0) for stage in stages) for phase in phases))
    places = [phase.index for phase in phases]
    tops = [0.0] * len(phases)
    for stage in stages:
        heights = [phase.seconds.get(stage, 0.0) / length for phase in phases]
        axis.bar(places, heights, 0.7, bottom=tops, color=STAGE_COLOURS.get(stage, OTHER_STAGE), label=label(stage))
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    drawing.whole_numbers(axis)
    axis.set(xlabel="phase", ylabel=f"time ({unit})", xlim=(min(places) - 0.6, max(places) + 0.6))
    axis.set_ylim(0, 1.15 * max(tops) or 1)
    return tops
