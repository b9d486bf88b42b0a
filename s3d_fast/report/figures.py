"""The figures of one run: size, widths, spectra, predicted and measured changes of the loss, time and training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from s3d_fast.records.record import EIGEN_STAGES, PhaseRecord
from s3d_fast.records.run import Run, eigen_share, main_metric, share_of_eigen_stages, training_compute
from s3d_fast.records.run_folder import read_spectra
from s3d_fast.report import scales, svg, wording
from s3d_fast.report.plot import Box, Guide, Line, Mark, Plot, Point, Spread, Style

_STYLES = {
    "s3d": ("blue", "circle"),
    "s2d": ("orange", "square"),
    "net2net": ("green", "triangle"),
    "uniform": ("pink", "diamond"),
}
_DASHES = ("", "7 3", "2 3", "8 3 2 3")
# Greys for the stages of any training, colours for the stages that splitting adds.
STAGE_COLOURS = {
    "train": "pale",
    "evaluate": "middle",
    "capture": "sky",
    "solve": "blue",
    "select": "yellow",
    "split": "orange",
    "measure": "green",
}
_LOW, _HIGH = Style("orange", marker="down", line=False), Style("blue", marker="triangle", line=False)
_PLAIN = Style("grey", marker="", line=False)


@dataclass(frozen=True)
class Figure:
    """A figure, or the reason why there is none.

    Attributes:
        name: the name of its section.
        title: the title of its section.
        caption: what the figure shows; without plots, why there is none.
        plots: its plots; those of one figure share a legend.
    """

    name: str
    title: str
    caption: str
    plots: tuple[Plot, ...] = ()


def run_figures(run: Run) -> list[Figure]:
    """Draw all figures of a run."""
    makers = (costs_figure, widths_figure, training_figure, spectra_figure, times_figure, promises_figure)
    return [make(run) for make in makers]


def method_styles(methods: Sequence[str]) -> list[Style]:
    """Return styles for groups of runs: colour and marker show the method, line and fill its variant."""
    styles = []
    for place, method in enumerate(methods):
        colour, marker = _STYLES.get(method, ("grey", "down"))
        variant = methods[:place].count(method)
        styles.append(Style(colour, _DASHES[variant % len(_DASHES)], marker, filled=variant % 2 == 0))
    return styles


def costs_figure(run: Run) -> Figure:
    """Draw the main metric of every phase against parameters, MACs, and the compute that training took."""
    name, metric = "costs", main_metric([run])
    if metric is None:
        return Figure(name, "Quality and size", "Left out: no phase has a metric.")
    title = f"{wording.title(metric)} and size"
    phases = [phase for phase in run.phases if metric in phase.metrics]
    (style,) = method_styles([run.method])
    compute = {phase.index: value for phase, value in zip(run.phases, training_compute(run), strict=True)}
    sizes: list[tuple[str, str, list[float]]] = [
        ("params", "parameters", [phase.params for phase in phases]),
        ("macs", "MACs per sample", [phase.macs for phase in phases]),
    ]
    known = [value for phase in phases if (value := compute[phase.index]) is not None]
    if len(known) == len(phases) and any(known):
        sizes.append(("compute", "MACs x samples of all training so far", known))
    y = scales.linear([phase.metrics[metric] for phase in phases])
    plots = []
    for which, unit, found in sizes:
        points = [
            Point(
                size,
                phase.metrics[metric],
                (f"phase {phase.index}", f"{metric} {wording.decimal(phase.metrics[metric])}", _amount(size, unit)),
                note=str(phase.index),
            )
            for phase, size in zip(phases, found, strict=True)
        ]
        plots.append(
            Plot(
                f"{name}-{which}",
                scales.of_sizes(found),
                y,
                [Line(points, style)],
                x_label=unit,
                y_label=metric,
                width=310,
                height=190,
            )
        )
    first, last = phases[0], phases[-1]
    caption = (
        f"{wording.title(metric)} at the end of every phase (the number is the phase): from "
        f"{wording.decimal(first.metrics[metric])} with {wording.whole(first.params)} parameters to "
        f"{wording.decimal(last.metrics[metric])} with {wording.whole(last.params)}."
    )
    if len(plots) == 3:
        caption += " MACs x samples: the multiply-accumulates of one forward pass times the samples trained on."
    return Figure(name, title, caption, tuple(plots))


def widths_figure(run: Run) -> Figure:
    """Draw the widths of all layers as bars: what the first phase had, and what every split added."""
    name, title = "widths", "Widths of the layers"
    units = list(dict.fromkeys(unit for phase in run.phases for unit in phase.widths))
    if not units:
        return Figure(name, title, "Left out: no phase has widths.")
    shades = svg.shades(len(run.phases))
    marks: list[Mark] = []
    for row, unit in enumerate(units):
        before = 0
        for phase, shade in zip(run.phases, shades, strict=True):
            width = phase.widths.get(unit, 0)
            words = (run.layer_name(unit), f"phase {phase.index}: {wording.whole(width)}")
            if phase is not run.phases[0]:
                words = (words[0], f"{words[1]} ({wording.signed(width - before)})")
            # A layer never shrinks while it grows; a network from scratch might be narrower than the one before.
            label = f"phase {phase.index}"
            style = Style(shade, marker="", line=False)
            marks.append(Box(before, max(width, before), row - 0.36, row + 0.36, style, words, label))
            before = max(width, before)
    last = run.phases[-1]
    most = max(max(phase.widths.values(), default=0) for phase in run.phases)
    high = max(most, 1) * 1.03
    row_height = 22 if len(units) <= 40 else 17
    plot = Plot(
        name,
        scales.Scale(0, high, word=scales.engineering) if high > 10 else scales.whole(0, high),
        scales.names([run.layer_name(unit) for unit in units]),
        marks,
        x_label="width (filters or neurons)",
        height=row_height * len(units),
        rows=True,
    )
    first = run.phases[0]
    caption = (
        f"Width of every layer: {wording.whole(sum(first.widths.values()))} in total in the first phase and "
        f"{wording.whole(sum(last.widths.values()))} in the last. "
        + (
            "A bar begins with the first network; every further part is what one split added."
            if run.is_grown
            else "Bars are the networks in their order."
        )
        if first is not last
        else f"Width of every layer in the only phase ({wording.whole(sum(first.widths.values()))} in total)."
    )
    return Figure(name, title, caption, (plot,))


def spectra_figure(run: Run) -> Figure:
    """Draw the extreme eigenvalues of every layer's filters over the phases, a plot for each layer."""
    name, title = "spectra", "Extreme eigenvalues of the splitting matrices"
    found, problems, dropped = _finite_spectra(run)
    if not found:
        why = "; ".join(problems) or ("no eigenvalue is finite" if dropped else "no split has recorded eigenvalues")
        return Figure(name, title, f"Left out: {why}.")
    order = {unit: place for place, unit in enumerate(run.phases[0].widths)}
    units = sorted(
        {unit for layers in found.values() for unit in layers}, key=lambda unit: (order.get(unit, len(order)), unit)
    )
    every = [float(value) for layers in found.values() for pair in layers.values() for end in pair for value in end]
    y = scales.around_zero(every)
    x = scales.whole(min(found) - 0.5, max(found) + 0.5)
    plots = []
    for place, unit in enumerate(units):
        marks: list[Mark] = [Guide(y=0.0, dashed=False)]
        for index, layers in found.items():
            for end, style, word, shift in zip((0, 1), (_LOW, _HIGH), ("λ min", "λ max"), (-5, 5), strict=True):
                values = layers[unit][end] if unit in layers else np.zeros(0)
                if values.size:
                    marks.append(_spread(index, values, style, word, shift))
        plots.append(
            Plot(
                f"{name}-{place:02d}",
                x,
                y,
                marks,
                title=run.layer_name(unit),
                x_label="split after phase",
                width=300,
                height=150,
            )
        )
    caption = (
        "Smallest and largest eigenvalue of every filter's splitting matrix, by layer and phase; all plots have the "
        "same scale. Thin lines span minimum to maximum, thick lines join the quartiles, and the marker is the median."
    )
    if dropped:
        caption += f" {wording.plural(dropped, 'value')} that are not finite are left out."
    if problems:
        caption += f" Not shown: {'; '.join(problems)}."
    return Figure(name, title, caption, tuple(plots))


Layers = dict[str, list[np.ndarray]]  # lambda_min and lambda_max of every unit


def _finite_spectra(run: Run) -> tuple[dict[int, Layers], list[str], int]:
    """Return the finite eigenvalues by phase; sentences about files; how many values are not finite."""
    drawn: dict[int, Layers] = {}
    problems: list[str] = []
    dropped = 0
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
    return drawn, problems, dropped


def _spread(index: int, values: np.ndarray, style: Style, word: str, shift: float) -> Spread:
    least, lower, middle, upper, most = map(float, np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))
    words = (
        f"{word} after phase {index}",
        f"median {scales.short(middle)}",
        f"from {scales.short(least)} to {scales.short(most)}",
        wording.plural(values.size, "filter"),
    )
    return Spread(index, (least, lower, middle, upper, most), style, words, word, shift)


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
    scale = scales.around_zero([value for _, points in groups.values() for _, *pair in points for value in pair])
    marks: list[Mark] = [Guide(label="measured = predicted")]
    styles = method_styles([method for method, _ in groups.values()])
    for (group, (_, points)), style in zip(groups.items(), styles, strict=True):
        shown = [
            Point(
                first,
                second,
                (f"phase {index}", f"predicted {wording.change(first)}", f"measured {wording.change(second)}"),
                note=str(index) if len(groups) == 1 else "",
            )
            for index, first, second in points
        ]
        marks.append(Line(shown, Style(style.colour, marker=style.marker, filled=style.filled, line=False), group))
    plot = Plot(
        name, scale, scale, marks, x_label="predicted change of the loss", y_label="measured change of the loss",
        width=400, height=310,
    )  # fmt: skip
    ratios = [second / first for _, points in groups.values() for _, first, second in points if first]
    middle = f"; the median of measured / predicted is {statistics.median(ratios):.2f}" if ratios else ""
    caption = (
        "Change of the loss by every split"
        f"{' (the number is the phase)' if len(groups) == 1 else ''}, on the batches used for splitting. On the "
        f"diagonal the measured change equals the predicted one{middle}."
    )
    return Figure(name, "Predicted and measured change of the loss", caption, (plot,))


def times_figure(run: Run) -> Figure:
    """Draw the time of every stage by phase, and once more for the splitting stages alone."""
    name, title = "times", "Time"
    phases = [phase for phase in run.phases if sum(phase.seconds.values()) > 0]
    if not phases:
        return Figure(name, title, "Left out: no phase has times.")
    used = dict.fromkeys(stage for phase in phases for stage in phase.seconds)
    stages = [*(stage for stage in STAGE_COLOURS if stage in used), *(one for one in used if one not in STAGE_COLOURS)]
    eigen = [stage for stage in stages if stage in EIGEN_STAGES]
    plots = [_stacked_seconds(f"{name}-all", "all stages", phases, stages, stages)]
    if eigen:
        plots.append(_stacked_seconds(f"{name}-splitting", "splitting alone", phases, eigen, stages))
    total = sum(sum(phase.seconds.values()) for phase in phases)
    caption = f"Time of every stage by phase, {wording.duration(total)} in all" + (
        f", of which splitting ({', '.join(eigen)}) took {wording.percent(eigen_share(run))}." if eigen else "."
    )
    return Figure(name, title, caption, tuple(plots))


def _stacked_seconds(
    name: str, title: str, phases: Sequence[PhaseRecord], stages: Sequence[str], all_stages: Sequence[str]
) -> Plot:
    """Return a bar for every phase, its stages on top of each other."""
    most = max(sum(phase.seconds.get(stage, 0.0) for stage in stages) for phase in phases)
    length, unit = scales.time_unit(most)
    marks: list[Mark] = []
    for phase in phases:
        tops = list(accumulate((phase.seconds.get(stage, 0.0) / length for stage in stages), initial=0.0))
        for stage, (low, high) in zip(stages, pairwise(tops), strict=True):
            seconds = phase.seconds.get(stage, 0.0)
            words = [f"phase {phase.index}: {stage}", wording.duration(seconds)]
            if stage in EIGEN_STAGES:
                words.append(f"all splitting: {wording.percent(share_of_eigen_stages([phase]))} of the phase")
            marks.append(
                Box(phase.index - 0.35, phase.index + 0.35, low, high, _stage_style(stage), tuple(words), stage)
            )
    places = [phase.index for phase in phases]
    return Plot(
        name,
        scales.whole(min(places) - 0.6, max(places) + 0.6),
        scales.linear([0.0, most / length or 1.0], zero=True),
        marks,
        title=title,
        x_label="phase",
        y_label=f"time ({unit})",
        height=200,
        legend=[(stage, _stage_style(stage)) for stage in all_stages],
    )


def _stage_style(stage: str) -> Style:
    return Style(STAGE_COLOURS.get(stage, "ink"), marker="", line=False)


def training_figure(run: Run) -> Figure:
    """Draw the training loss over the epochs of all phases."""
    name, title = "training", "Training"
    losses = [epoch.loss for phase in run.phases for epoch in phase.epochs]
    known = [loss for loss in losses if loss is not None]
    if not known:
        return Figure(name, title, "Left out: no epoch has a loss.")
    (style,) = method_styles([run.method])
    style = Style(style.colour, marker="circle" if len(losses) <= 60 else "")
    marks: list[Mark] = []
    start = 0
    phases = [phase for phase in run.phases if phase.epochs]
    for place, phase in enumerate(phases):
        points = [
            None
            if epoch.loss is None
            else Point(
                start + number,
                epoch.loss,
                (f"phase {phase.index}, epoch {epoch.epoch}", f"loss {wording.decimal(epoch.loss)}"),
            )
            for number, epoch in enumerate(phase.epochs, 1)
        ]
        note = f"phase {phase.index}" if len(phases) <= 8 else str(phase.index)
        marks += [Guide(x=start + 0.5, note=note, dashed=bool(place)), Line(points, style)]
        start += len(phase.epochs)
    plot = Plot(
        name,
        scales.whole(0.5, start + 0.5),
        scales.of_losses(known),
        marks,
        x_label="epochs of all phases",
        y_label="training loss",
    )
    gaps = f"; {len(losses) - len(known)} without a finite loss are gaps" if len(known) < len(losses) else ""
    splits = "" if len(phases) == 1 else f"; dashed lines are {'splits' if run.is_grown else 'new networks'}"
    counts = f"{wording.plural(len(losses), 'epoch')} over {wording.plural(len(phases), 'phase')}"
    return Figure(name, title, f"Training loss of {counts}{splits}{gaps}.", (plot,))


def _amount(size: float, unit: str) -> str:
    return f"{wording.compact(size)} {unit.split(' of ')[0]}"
