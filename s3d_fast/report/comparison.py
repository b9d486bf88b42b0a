"""Comparison of runs: runs that differ only in their seed form a group, shown by its median and range."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from s3d_fast.records.record import PhaseRecord
from s3d_fast.records.run import Run, main_metric
from s3d_fast.report import drawing, wording
from s3d_fast.report.drawing import canvas, label, png
from s3d_fast.report.figures import Figure, draw_promises, promised_and_measured


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes:
        label: distinguishes the group from the others, such as "s3d c=1.3".
        method: the method of all its runs.
        runs: the runs, ordered by seed.
    """

    label: str
    method: str
    runs: list[Run]

    def phases(self) -> Iterator[tuple[int, list[PhaseRecord]]]:
        """Yield every phase that at least one run has finished training, with the records of those runs."""
        by_index: dict[int, list[PhaseRecord]] = {}
        for run in self.runs:
            for phase in run.phases:
                if phase.is_trained:
                    by_index.setdefault(phase.index, []).append(phase)
        yield from sorted(by_index.items())


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs of the same recipe, preset, method and choices, in the order in which they first occur.

    Raises:
        ValueError: two runs of a group have the same seed and would count twice.
    """
    groups: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.recipe, run.preset, run.method, _choices_key(run)), []).append(run)
    for members in groups.values():
        members.sort(key=lambda run: run.seed)
        for one, other in pairwise(members):
            if one.seed == other.seed:
                raise ValueError(f"{one.folder} and {other.folder} are both {one.label}; give one of them")
    firsts = [members[0] for members in groups.values()]
    return [Group(_group_label(members[0], firsts), members[0].method, members) for members in groups.values()]


def comparison_table(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table, its head first, of all phases of all groups: counts and metric as median [min, max].

    The metric is accuracy, or the first recorded metric if no run has accuracy. The column seeds counts the runs that
    finished training the phase.

    Raises:
        ValueError: two runs have the same recipe, preset, method, choices and seed.
    """
    metric = main_metric(runs)
    rows = [["method", "phase", "seeds", "params", "MACs", metric or "metric"]]
    for group in group_runs(runs):
        for index, records in group.phases():
            values = [record.metrics[metric] for record in records if metric in record.metrics] if metric else []
            rows.append(
                [
                    group.label,
                    str(index),
                    str(len(records)),
                    wording.spread([record.params for record in records], wording.compact),
                    wording.spread([record.macs for record in records], wording.compact),
                    wording.spread(values),
                ]
            )
    return rows


def comparison_figures(runs: Sequence[Run]) -> list[Figure]:
    """Draw all figures that overlay runs."""
    groups, metric = group_runs(runs), main_metric(runs)
    return [_costs(groups, metric), _times(groups, metric), _promises(groups)]


def _costs(groups: Sequence[Group], metric: str | None) -> Figure:
    name, shown = "compare-costs", _with_metric(groups, metric)
    if metric is None or not shown:
        return Figure(name, "Quality and size", "Left out: no run has a metric.")
    with canvas(1, 2, (9.5, 4.4), sharey=True) as (figure, axes):
        for axis, unit, size in (
            (axes[0, 0], "parameters", lambda run, phase: phase.params),
            (axes[0, 1], "MACs per sample", lambda run, phase: phase.macs),
        ):
            x = _overlay(axis, shown, metric, size)
            drawing.cost_axis(axis, x)
            axis.set_xlabel(unit)
        axes[0, 0].set_ylabel(label(metric))
        _legend(figure, axes[0, 0])
        image = png(figure)
    return Figure(
        name, f"{wording.title(metric)} and size", _caption(metric, "parameters and multiply-accumulates"), image
    )


def _times(groups: Sequence[Group], metric: str | None) -> Figure:
    name, shown = "compare-times", _with_metric(groups, metric)
    if metric is None or not shown:
        return Figure(name, "Quality and time", "Left out: no run has a metric.")
    title = f"{wording.title(metric)} and time"
    if not all(
        phase.seconds for group in shown for run in group.runs for phase in run.phases if metric in phase.metrics
    ):
        return Figure(name, title, "Left out: some phases have no times.")
    length, unit = drawing.time_unit(max(max(_elapsed(run).values()) for group in shown for run in group.runs))
    with canvas(1, 1, (6.5, 4.4)) as (figure, axes):
        _overlay(axes[0, 0], shown, metric, lambda run, phase: _elapsed(run)[phase.index] / length)
        axes[0, 0].set(xlabel=f"time to get there ({unit})", ylabel=label(metric))
        axes[0, 0].set_xlim(left=0)
        _legend(figure, axes[0, 0])
        image = png(figure)
    caption = _caption(
        metric,
        "the time of all stages so far (for a network trained from scratch, only its own; times compare only on one "
        "machine)",
    )
    return Figure(name, title, caption, image)


def _promises(groups: Sequence[Group]) -> Figure:
    points = {
        group.label: (group.method, [point for run in group.runs for point in promised_and_measured(run.phases)])
        for group in groups
    }
    known = {name: (method, found) for name, (method, found) in points.items() if found}
    if known:
        return draw_promises("compare-promises", known)
    why = "no split has both a predicted and a measured change of the loss."
    return Figure("compare-promises", "Predicted and measured change of the loss", f"Left out: {why}")


def _overlay(
    axis: Any, groups: Sequence[Group], metric: str, place: Callable[[Run, PhaseRecord], float]
) -> list[float]:
    """Draw each group's median metric against its median `place`, with the metric's range; return the places."""
    drawn: list[float] = []
    styles = drawing.line_styles([group.method for group in groups])
    for group, style in zip(groups, styles, strict=True):
        points: dict[int, list[tuple[float, float]]] = {}
        for run in group.runs:
            for phase in run.phases:
                if metric in phase.metrics:
                    points.setdefault(phase.index, []).append((place(run, phase), phase.metrics[metric]))
        ordered = [points[index] for index in sorted(points)]
        x = [statistics.median(at for at, _ in found) for found in ordered]
        middle = [statistics.median(value for _, value in found) for found in ordered]
        fewest, most = min(map(len, ordered)), max(map(len, ordered))
        seeds = f"n={most}" if fewest == most else f"n={fewest} to {most}"
        axis.plot(x, middle, **style, label=f"{label(group.label)} ({seeds})")
        if most > 1:
            low = [min(value for _, value in found) for found in ordered]
            high = [max(value for _, value in found) for found in ordered]
            if len(x) > 1:
                axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
            else:
                axis.vlines(x, low, high, color=style["color"], alpha=0.4, linewidth=4)
        drawn += x
    axis.margins(0.06)
    return drawn


def _legend(figure: Any, axis: Any) -> None:
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=3)


def _caption(metric: str, against: str) -> str:
    return (
        f"{wording.title(metric)} at the end of every phase against {against}. Lines are medians over seeds, bands "
        "span minimum to maximum, and n is the number of seeds."
    )


def _with_metric(groups: Sequence[Group], metric: str | None) -> list[Group]:
    return [group for group in groups if any(metric in phase.metrics for run in group.runs for phase in run.phases)]


def _elapsed(run: Run) -> dict[int, float]:
    """Return the seconds that each phase's network took: since the start of the run, or its own if not grown."""
    before = accumulate((sum(phase.seconds.values()) for phase in run.phases), initial=0.0)
    return {
        phase.index: start * run.is_grown + sum(phase.seconds.get(stage, 0.0) for stage in ("train", "evaluate"))
        for phase, start in zip(run.phases, before, strict=False)
    }


def _choices_key(run: Run) -> str:
    return json.dumps({name: _same(value) for name, value in run.choices.items()}, sort_keys=True)


def _same(value: Any) -> Any:
    """Return 2 as 2.0: they are equal, but JSON writes them differently."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _group_label(run: Run, firsts: Sequence[Run]) -> str:
    """Return the run's variant and whatever else distinguishes its group from the others."""
    parts = [run.variant]
    alike = [
        other for other in firsts if (other.recipe, other.preset, other.method) == (run.recipe, run.preset, run.method)
    ]
    for name in dict.fromkeys(name for other in alike for name in other.choices):
        values = {json.dumps(_same(other.choices.get(name)), sort_keys=True) for other in alike}
        if len(values) > 1 and f" {name}=" not in run.variant:
            parts.append(f"{name}={run.choices.get(name)}")
    parts += [getattr(run, name) for name in ("preset", "recipe") if len({getattr(one, name) for one in firsts}) > 1]
    return ", ".join(parts)
