"""Figures of what splits promise and what becomes of them: the gain that fresh data keep, and how far copies part."""

from __future__ import annotations

from s3d_fast.records.run import Run, steps_trained
from s3d_fast.report import scales, wording
from s3d_fast.report.figures import Figure, method_styles
from s3d_fast.report.plot import Box, Guide, Line, Mark, Plot, Point, Style

_KEPT = Style("green", marker="", line=False)
_FORMULA, _TRAINED = Style("blue", marker="circle"), Style("grey", "7 3", marker="square")


def kept_figure(run: Run) -> Figure:
    """Draw the share of the promised gain that fresh data keep, for every split."""
    name, title = "kept", "Gain on fresh data"
    found = [(phase, phase.kept) for phase in run.phases if phase.kept is not None]
    if not found:
        return Figure(name, title, "Left out: no split was measured on fresh data.")
    marks: list[Mark] = [Guide(y=0.0, dashed=False), Guide(y=1.0, label="all of the promised gain")]
    for phase, kept in found:
        words = [f"split after phase {phase.index}", f"kept {wording.percent(kept)}"]
        words += [f"batches of the split: {phase.batches}"] if phase.batches else []
        low, high = min(0.0, kept), max(0.0, kept)
        marks.append(Box(phase.index - 0.3, phase.index + 0.3, low, high, _KEPT, tuple(words)))
    places = [phase.index for phase, _ in found]
    plot = Plot(
        name,
        scales.whole(min(places) - 0.6, max(places) + 0.6),
        scales.linear([0.0, 1.0, *(kept for _, kept in found)], zero=True, word=lambda share: f"{100 * share:.0f} %"),
        marks,
        x_label="split after phase",
        y_label="share of the promised gain",
        width=400,
        height=190,
    )
    least, most = (bound(kept for _, kept in found) for bound in (min, max))
    span = wording.percent(least) if len(found) == 1 else f"{wording.percent(least)} to {wording.percent(most)}"
    caption = (
        f"What splits gain on samples that they were not computed on, relative to the gain on those that they were: "
        f"{span}. Below zero, splits raise the loss there. More samples per split raise the share (--split-samples)."
    )
    return Figure(name, title, caption, (plot,))


def separation_figure(run: Run) -> Figure:
    """Draw how far apart copies are one phase after their split, and the steps that parting takes by the formula."""
    name, title = "separation", "Separation of copies"
    apart = [(phase.index, phase.apart) for phase in run.phases if phase.apart is not None]
    steps = [(phase.index, phase.steps_to_part) for phase in run.phases if phase.steps_to_part is not None]
    (style,) = method_styles([run.method])
    plots = []
    if apart:
        points = [
            Point(index, value, (f"end of phase {index}", f"copies are {wording.percent(value)} apart"))
            for index, value in apart
        ]
        plots.append(
            Plot(
                f"{name}-distance",
                _phases([index for index, _ in apart]),
                scales.linear([0.0, *(value for _, value in apart)], zero=True, word=lambda one: f"{100 * one:.3g} %"),
                [Line(points, style)],
                x_label="end of phase",
                y_label="distance of copies",
                width=310,
                height=190,
            )
        )
    if steps:
        trained = [(index, made) for index, _ in steps if (made := _steps_after(run, index)) is not None]
        marks: list[Mark] = []
        for found, look, label in ((steps, _FORMULA, "to part, by the formula"), (trained, _TRAINED, "of training")):
            words = [
                Point(index, value, (f"split after phase {index}", f"{wording.compact(value)} steps {label}"))
                for index, value in found
            ]
            marks += [Line(words, look, f"steps {label}")] if found else []
        every = [value for _, value in (*steps, *trained)]
        plots.append(
            Plot(
                f"{name}-steps",
                _phases([index for index, _ in steps]),
                scales.of_sizes(every),
                marks,
                x_label="split after phase",
                y_label="steps of training",
                width=310,
                height=190,
            )
        )
    if not plots:
        return Figure(name, title, "Left out: no copies were compared.")
    caption = (
        "Distance: the median over split neurons of the largest distance between copies, relative to the length of "
        "their filter (behind a BatchNorm, of directions), at the end of the phase after the split."
    )
    if steps:
        caption += (
            " Steps to part: until copies are as far apart as their filter is long, if their distance grows like "
            "exp(lr / (1 - momentum) |w| |lambda| t); the median."
        )
    return Figure(name, title, caption, tuple(plots))


def _phases(places: list[int]) -> scales.Scale:
    return scales.whole(min(places) - 0.6, max(places) + 0.6)


def _steps_after(run: Run, index: int) -> float | None:
    """Return the steps of training in the phase after a split; None if the record does not tell."""
    after = next((phase for phase in run.phases if phase.index == index + 1), None)
    return None if after is None else steps_trained(run, after)
