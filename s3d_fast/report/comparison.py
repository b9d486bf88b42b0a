"""Comparison of runs: runs that differ only in their seed form a group, shown by its median and range."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from s3d_fast.records.record import PhaseRecord
from s3d_fast.records.run import Run, main_metric, samples_trained, training_compute
from s3d_fast.report import scales, wording
from s3d_fast.report.figures import (
    Figure,
    draw_promises,
    method_styles,
    promised_and_measured,
)
from s3d_fast.report.plot import Band, Line, Mark, Plot, Point

# (run, phase) -> where its network stands on the x axis, or None if the record does not tell
Place = Callable[[Run, PhaseRecord], float | None]


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

    def phases(self) -> Iterator[tuple[int, list[tuple[Run, PhaseRecord]]]]:
        """Yield every phase that at least one run has finished training, with those runs and their records."""
        by_index: dict[int, list[tuple[Run, PhaseRecord]]] = {}
        for run in self.runs:
            for phase in run.phases:
                if phase.is_trained:
                    by_index.setdefault(phase.index, []).append((run, phase))
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
    """Return a table, its head first, of all phases of all groups of runs from `read_run`: medians [min, max].

    The metric is accuracy, or the first recorded metric if no run has accuracy. The column seeds counts the runs that
    finished training the phase. Epochs and "MACs x samples" are what the network of this phase was given, since the
    start of the run or, from scratch, in all: multiply-accumulates of one forward pass times the samples trained on.

    Raises:
        ValueError: two runs have the same recipe, preset, method, choices and seed.
    """
    metric = main_metric(runs)
    rows = [["method", "phase", "seeds", "params", "MACs", "epochs", "MACs x samples", metric or "metric"]]
    for group in group_runs(runs):
        for index, found in group.phases():
            values = [phase.metrics[metric] for _, phase in found if metric in phase.metrics] if metric else []
            rows.append(
                [
                    group.label,
                    str(index),
                    str(len(found)),
                    wording.spread([phase.params for _, phase in found], wording.compact),
                    wording.spread([phase.macs for _, phase in found], wording.compact),
                    _spread_of_known([epochs_given(run, phase) for run, phase in found]),
                    _spread_of_known([compute_given(run, phase) for run, phase in found]),
                    wording.spread(values),
                ]
            )
    return rows


def epochs_given(run: Run, phase: PhaseRecord) -> int | None:
    """Return the epochs that the network of a phase was trained for; None if the record does not tell."""
    so_far = [one for one in run.phases if one.index <= phase.index] if run.is_grown else [phase]
    counts = [None if samples_trained(run, one) is None else len(one.epochs) for one in so_far]
    return None if None in counts else sum(count for count in counts if count is not None)


def compute_given(run: Run, phase: PhaseRecord) -> float | None:
    """Return the MACs x samples that the network of a phase was trained with; see `training_compute`."""
    places = [one.index for one in run.phases]
    return training_compute(run)[places.index(phase.index)]


def comparison_figures(runs: Sequence[Run]) -> list[Figure]:
    """Draw all figures that overlay runs."""
    groups, metric = group_runs(runs), main_metric(runs)
    return [_costs(groups, metric), _training(groups, metric), _promises(groups)]


def _costs(groups: Sequence[Group], metric: str | None) -> Figure:
    name, shown = "compare-costs", _with_metric(groups, metric)
    if metric is None or not shown:
        return Figure(name, "Quality and size", "Left out: no run has a metric.")
    plots = [
        _overlay(f"{name}-params", shown, metric, "parameters", lambda run, phase: phase.params),
        _overlay(f"{name}-macs", shown, metric, "MACs per sample", lambda run, phase: phase.macs),
    ]
    return Figure(name, f"{wording.title(metric)} and size", _caption(metric, "its size"), tuple(plots))


def _training(groups: Sequence[Group], metric: str | None) -> Figure:
    name, shown = "compare-training", _with_metric(groups, metric)
    if metric is None or not shown:
        return Figure(name, "Quality and training", "Left out: no run has a metric.")
    title = f"{wording.title(metric)} and training"
    phases = [(run, phase) for group in shown for run in group.runs for phase in run.phases if metric in phase.metrics]
    plots, missing = [], []
    if all(compute_given(run, phase) is not None for run, phase in phases):
        plots.append(_overlay(f"{name}-compute", shown, metric, "MACs x samples of its training", compute_given))
    else:
        missing.append("some phases do not tell the samples that they were trained on")
    if all(phase.seconds for _, phase in phases):
        length, unit = scales.time_unit(max(_elapsed(run)[phase.index] for run, phase in phases))
        plots.append(
            _overlay(
                f"{name}-times",
                shown,
                metric,
                f"time to get there ({unit})",
                lambda run, phase: _elapsed(run)[phase.index] / length,
            )
        )
    else:
        missing.append("some phases have no times")
    left_out = " ".join(f"Left out: {why}." for why in missing)
    if not plots:
        return Figure(name, title, left_out)
    caption = _caption(
        metric,
        "what its network was trained with: the multiply-accumulates of one forward pass times "
        "the samples trained on, and the time of all stages so far",
    )
    caption += " A network trained from scratch counts only its own training; times compare only on one machine."
    return Figure(name, title, f"{caption} {left_out}".strip(), tuple(plots))


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


def _overlay(name: str, groups: Sequence[Group], metric: str, unit: str, place: Place) -> Plot:
    """Return each group's median metric against its median place, with the metric's range."""
    lines: list[Mark] = []
    bands: list[Mark] = []
    drawn: list[float] = []
    heights: list[float] = []
    for group, style in zip(groups, method_styles([group.method for group in groups]), strict=True):
        points: dict[int, list[tuple[float, float]]] = {}
        for run in group.runs:
            for phase in run.phases:
                at = place(run, phase) if metric in phase.metrics else None
                if at is not None:
                    points.setdefault(phase.index, []).append((at, phase.metrics[metric]))
        ordered = {index: points[index] for index in sorted(points)}
        counts = [len(found) for found in ordered.values()]
        seeds = f"n={max(counts)}" if min(counts) == max(counts) else f"n={min(counts)} to {max(counts)}"
        line, edges = [], []
        for index, found in ordered.items():
            x, values = statistics.median(at for at, _ in found), [value for _, value in found]
            words = (
                f"{group.label}, phase {index}",
                f"{metric} {wording.spread(values)}",
                f"{wording.compact(x) if x >= 1000 else scales.short(x)} {unit.split(' of ')[0]}",
            )
            line.append(Point(x, statistics.median(values), words))
            edges.append((x, min(values), max(values)))
            drawn.append(x)
            heights += values
        lines.append(Line(line, style, f"{group.label} ({seeds})"))
        if max(counts) > 1:
            bands.append(Band(edges, style))
    is_size = not unit.startswith("time")
    return Plot(
        name,
        scales.of_sizes(drawn) if is_size else scales.linear([*drawn, 0.0], zero=True),
        scales.linear(heights),
        [*bands, *lines],
        x_label=unit,
        y_label=metric,
        width=470,
        height=260,
    )


def _caption(metric: str, against: str) -> str:
    return (
        f"{wording.title(metric)} at the end of every phase against {against}. Lines are medians over seeds, bands "
        "span minimum to maximum, and n is the number of seeds."
    )


def _with_metric(groups: Sequence[Group], metric: str | None) -> list[Group]:
    return [group for group in groups if any(metric in phase.metrics for run in group.runs for phase in run.phases)]


def _spread_of_known(values: Sequence[float | None]) -> str:
    """Return the spread of the values; nothing if one is not known, since the others would not be comparable."""
    known = [value for value in values if value is not None]
    return wording.spread(known, wording.compact) if len(known) == len(values) else wording.NOTHING


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
    parts += [
        getattr(run, name)
        for name in ("preset", "recipe")
        if len({getattr(one, name) for one in firsts}) > 1 and getattr(run, name)
    ]
    return ", ".join(parts)
