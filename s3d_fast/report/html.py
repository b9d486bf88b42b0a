"""Reports as self-contained HTML pages, with tables and figures; they need no library and no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from s3d_fast.base.files import write_whole
from s3d_fast.records.record import PhaseRecord
from s3d_fast.records.run import Run, eigen_share, main_metric, read_run, share_of_eigen_stages, training_compute
from s3d_fast.report import svg, wording
from s3d_fast.report.comparison import comparison_figures, comparison_table, group_runs
from s3d_fast.report.figures import Figure, run_figures
from s3d_fast.report.plot import Plot, swatch
from s3d_fast.report.split_figures import kept_figure, separation_figure

_STYLE = f"""{svg.STYLE}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 66rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .6rem; }}
.lead {{ font-size: 1.1rem; margin: .4rem 0 1rem; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(8.6rem, 1fr)); gap: .6rem; margin: 0; }}
.tiles div {{ background: var(--card); border-radius: 8px; padding: .5rem .8rem; }}
.tiles dt {{ color: var(--soft); font-size: .85rem; }} .tiles dd {{ margin: 0; font-size: 1.1rem; font-weight: 600; }}
.tiles small {{ display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }}
.figures {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 2rem;
  grid-auto-flow: dense; }}
.figures .broad {{ grid-column: 1 / -1; }}
figure {{ margin: 0; }} .plots {{ display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; }}
.plots svg {{ max-width: 100%; height: auto; display: block; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; list-style: none; padding: 0; margin: 0 0 .5rem;
  font-size: .85rem; }}
.legend svg {{ width: 22px; height: 12px; margin-right: .4rem; vertical-align: -1px; overflow: visible; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }}
th, td {{ padding: .3rem .5rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }}
th {{ font-weight: 600; }}
.numbers th, .numbers td {{ text-align: right; overflow-wrap: normal; }}
.numbers th:first-child, .numbers td:first-child, .numbers .text {{ text-align: left; overflow-wrap: anywhere; }}
.pairs th {{ font-weight: normal; color: var(--soft); width: 30%; }}
figcaption, .note {{ color: var(--soft); font-size: .9rem; max-width: 48rem; margin-top: .6rem; }}
summary {{ font-weight: 600; margin: .6rem 0; cursor: pointer; }}
@media (max-width: 60rem) {{ .figures {{ grid-template-columns: minmax(0, 1fr); }} }}
@media (max-width: 46rem) {{
  .numbers thead {{ position: absolute; clip-path: inset(50%); }}
  .numbers tr {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 1rem; padding: .5rem 0;
    border-bottom: 1px solid var(--rule); }}
  .numbers td, .numbers td:first-child {{ border: 0; padding: .1rem 0; text-align: left; overflow-wrap: anywhere; }}
  .numbers td:first-child {{ grid-column: 1 / -1; font-weight: 600; }}
  .numbers td::before {{ content: attr(data-name) " "; color: var(--soft); font-weight: 400; }}
}}
"""


def write_report(folder: str | Path) -> Path:
    """Write report.html and figures/*.svg into the folder of a run; return the path of the page.

    Everything is drawn before anything is written, and every file is written whole or not at all.

    Raises:
        FileNotFoundError, ValueError: as `read_run`.
    """
    run = read_run(folder)
    if not run.phases:
        raise ValueError(f"{run.folder / 'history.jsonl'} must hold at least one phase, but is empty")
    figures = [*run_figures(run), kept_figure(run), separation_figure(run)]
    command = " ".join(map(str, run.about["command"]))
    body = [
        f"<h1>{_text(f'{run.title}: {run.label}')}</h1>",
        f'<p class="lead">{_text(_result(run))}</p>',
        _tiles(_main_numbers(run)),
        *(f'<p class="note">{_text(note)}</p>' for note in _state(run)),
        _sections(figures),
        "<h2>Phases</h2>",
        _table(_phase_rows(run)),
        "<h2>Splits</h2>",
        _table(_split_rows(run)),
        '<p class="note">Predicted and measured change: of the loss, on the batches used for splitting. Negative: '
        "splits with a copy of negative weight. Unconverged: filters whose eigenvalues did not reach the tolerance. "
        "Eigen share: the part of the time spent on capture, solve, select, split and measuring the loss after it.</p>",
        _pairs("Settings", {"method": run.method, "seed": run.seed, **run.settings}),
        _pairs("Environment", {**run.about["environment"], "command": command}),
    ]
    return _publish(run.folder, "report.html", f"{run.title}: {run.label}", body, figures)


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write compare.html and figures/compare-*.svg into the folder `out`; return the path of the page.

    Runs that differ only in their seed form a group, shown by its median and range.

    Raises:
        FileNotFoundError, ValueError: as `read_run`; or no folder is given, or two runs do not differ at all.
    """
    if not folders:
        raise ValueError("folders must name at least one run, got none")
    runs = [read_run(folder) for folder in dict.fromkeys(Path(folder).resolve() for folder in folders)]
    figures = comparison_figures(runs)
    recipes = list(dict.fromkeys(run.title for run in runs))
    title = f"{', '.join(recipes)}: {wording.plural(len(runs), 'run')}"
    notes = [f"{run.label}: {note}" for run in runs for note in _state(run) if note != _ENDED]
    if len(recipes) > 1:
        notes.insert(0, "The runs are of different recipes or presets: their numbers are not for the same task.")
    if any(run.starts_trained for run in runs):
        notes.append("Runs that started from a trained network do not count the training of that network.")
    rows = comparison_table(runs)
    body = [
        f"<h1>{_text(title)}</h1>",
        "<h2>At the end</h2>",
        _table(_last_rows(rows)),
        *(f'<p class="note">{_text(note)}</p>' for note in notes),
        _sections(figures),
        "<h2>Phases</h2>",
        _table(rows),
        '<p class="note">Median [minimum, maximum] over the seeds whose run finished training the phase. Epochs and '
        "MACs x samples are what the network of the phase was given: in all phases so far or, from scratch, in its "
        "own. MACs x samples: the multiply-accumulates of one forward pass times the samples trained on.</p>",
        "<h2>Runs</h2>",
        _table(_run_rows(runs)),
    ]
    return _publish(Path(out), "compare.html", title, body, figures)


_ENDED = "The run ended with its last phase."


def _state(run: Run) -> list[str]:
    """Return sentences about how the run ended and about problems with its files."""
    if not run.phases:
        return [*run.notes, "No phase is recorded."]
    last = run.phases[-1]
    if not last.is_trained:
        how = f"Phase {last.index} was in progress, with {wording.plural(len(last.epochs), 'epoch')} recorded."
    elif last.is_split:
        how = f"The run was not over: it had split after phase {last.index}, and the next phase is not recorded."
    elif "select" in last.seconds:
        how = f"The run ended because phase {last.index} found no neuron to split."
    elif len(run.phases) <= (steps := _steps(run)):
        how = f"The run is under way: {len(run.phases)} of {steps + 1} phases are finished."
    else:
        how = _ENDED
    return [how, *run.notes]


def _steps(run: Run) -> int:
    """Return how many splits the run was to have; 0 if its settings do not tell."""
    steps = run.settings.get("steps", 0)
    return steps if isinstance(steps, int) else 0


def _result(run: Run) -> str:
    """Return the result in one sentence."""
    first, last = run.phases[0], run.phases[-1]
    metric = main_metric([run])
    measured = [phase for phase in run.phases if metric in phase.metrics]
    if first is last or not measured:
        value = f", {metric} {wording.decimal(measured[-1].metrics[metric])}" if metric and measured else ""
        return f"One network with {wording.whole(last.params)} parameters{value}."
    start, end = measured[0], measured[-1]
    values = f"{metric} went from {wording.decimal(start.metrics[metric or ''])} to " + wording.decimal(
        end.metrics[metric or ""]
    )
    how = f"in {wording.plural(sum(phase.is_split for phase in run.phases), 'split')}" if run.is_grown else "by size"
    return (
        f"{wording.title(values)} while the network went from {wording.whole(start.params)} to "
        f"{wording.whole(end.params)} parameters, {how}."
    )


def _main_numbers(run: Run) -> list[tuple[str, str, str]]:
    """Return (name, value, what it was at first) for the tiles on top of the page."""
    first, last = run.phases[0], run.phases[-1]
    metric = main_metric([run])
    tiles = []
    measured = [phase for phase in run.phases if metric in phase.metrics]
    if metric and measured:
        before = f"from {wording.decimal(measured[0].metrics[metric])}" if len(measured) > 1 else ""
        tiles.append((metric, wording.decimal(measured[-1].metrics[metric]), before))
    for name, value, past in (
        ("parameters", last.params, first.params),
        ("MACs per sample", last.macs, first.macs),
        ("filters", sum(last.widths.values()), sum(first.widths.values())),
    ):
        tiles.append((name, wording.compact(value), f"from {wording.compact(past)}" if first is not last else ""))
    compute = training_compute(run)[-1]
    if compute:
        tiles.append(("MACs x samples", wording.compact(compute), f"{_epochs(run)} of training"))
    share = wording.percent(eigen_share(run))
    tiles.append(("time", _time(run.phases), f"{share} for splitting" if share != wording.NOTHING else ""))
    return tiles


def _epochs(run: Run) -> str:
    phases = run.phases if run.is_grown else run.phases[-1:]
    return wording.plural(sum(len(phase.epochs) for phase in phases), "epoch")


def _phase_rows(run: Run) -> list[list[str]]:
    metrics = list(dict.fromkeys(name for phase in run.phases for name in phase.metrics))
    first = main_metric([run])
    metrics.sort(key=lambda name: name != first)
    rows = [
        [
            f"{phase.index}{'' if phase.is_trained else ' (in progress)'}",
            wording.whole(sum(phase.widths.values())),
            wording.whole(phase.params),
            wording.whole(phase.macs),
            *(wording.decimal(phase.metrics.get(name)) for name in metrics),
            str(len(phase.epochs)) if phase.epochs else wording.NOTHING,
            _time([phase]),
            wording.percent(share_of_eigen_stages([phase])),
        ]
        for phase in run.phases
    ]
    return [["phase", "width", "params", "MACs", *metrics, "epochs", "time", "eigen share"], *rows]


def _split_rows(run: Run) -> list[list[str]]:
    head = ["after phase", "predicted change", "measured change", "new filters", "splits (negative)", "unconverged"]
    after = {phase.index - 1: phase.apart for phase in run.phases}
    # Columns that some runs have: what is new, what is gone, what fresh data keep, how far copies part.
    others: dict[str, Callable[[PhaseRecord], str]] = {
        "new, not split": lambda phase: str(phase.added) if phase.added else "",
        "removed": lambda phase: str(phase.removed) if phase.removed else "",
        "gain kept on fresh data": lambda phase: "" if phase.kept is None else wording.percent(phase.kept),
        "copies apart one phase later": lambda phase: (
            "" if after.get(phase.index) is None else wording.percent(float(after[phase.index] or 0))
        ),
        "steps to part, by formula": lambda phase: (
            "" if phase.steps_to_part is None else wording.whole(round(phase.steps_to_part))
        ),
    }
    shown = {name: show for name, show in others.items() if any(show(phase) for phase in run.phases)}
    rows = [
        [
            str(phase.index),
            wording.change(phase.predicted),
            wording.change(phase.measured),
            wording.whole(sum(phase.new_filters.values())),
            f"{phase.splits} ({phase.negative})",
            wording.whole(phase.unconverged),
            *(show(phase) or wording.NOTHING for show in shown.values()),
        ]
        for phase in run.phases
        if "solve" in phase.seconds or phase.is_split
    ]
    return [[*head, *shown], *rows]


def _last_rows(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the last phase of every group of a comparison table; the metric stands beside the name."""
    last = {row[0]: row for row in rows[1:]}
    return [[row[0], row[-1], *row[3:-1], row[1], row[2]] for row in (rows[0], *last.values())]


def _run_rows(runs: Sequence[Run]) -> list[list[str]]:
    metric = main_metric(runs)
    rows = [["method", "seed", "phases", f"last {metric or 'metric'}", "time", "eigen share", "folder"]]
    for group in group_runs(runs):
        for run in group.runs:
            trained = [phase for phase in run.phases if phase.is_trained]
            last = trained[-1].metrics.get(metric) if trained and metric else None
            share = wording.percent(eigen_share(run))
            times = [str(len(trained)), wording.decimal(last), _time(run.phases), share]
            rows.append([group.label, str(run.seed), *times, str(run.folder)])
    return rows


def _time(phases: Sequence[PhaseRecord]) -> str:
    if not any(phase.seconds for phase in phases):
        return wording.NOTHING
    return wording.duration(sum(sum(phase.seconds.values()) for phase in phases))


def _text(content: str) -> str:
    """Return text that is only text: names in a record may hold anything."""
    return escape(svg.clean(content))


def _tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _pairs(title: str, mapping: Mapping[str, Any]) -> str:
    """Return a table of names and values that is folded until the reader opens it."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in mapping.items()}
    rows = "".join(f"<tr><th scope=row>{_text(name)}</th><td>{_text(text)}</td></tr>" for name, text in texts.items())
    table = f'<table class="pairs">{rows}</table>' if rows else "<p>None recorded.</p>"
    return f"<details><summary>{title}</summary>{table}</details>"


def _sections(figures: Sequence[Figure]) -> str:
    return f'<div class="figures">{"".join(map(_section, figures))}</div>'


def _section(figure: Figure) -> str:
    caption = _text(figure.caption)
    broad = ' class="broad"' if len(figure.plots) > 1 else ""
    head = f'<section id="{_text(figure.name)}"{broad}><h2>{_text(figure.title)}</h2>'
    if not figure.plots:
        return f'{head}<p class="note">{caption}</p></section>'
    plots = "".join(plot.draw() for plot in figure.plots)
    return (
        f'{head}<figure>{_legend(figure.plots)}<div class="plots">{plots}</div>'
        f"<figcaption>{caption}</figcaption></figure></section>"
    )


def _legend(plots: Sequence[Plot]) -> str:
    entries = dict(entry for plot in plots for entry in plot.entries())
    items = "".join(
        f'<li><svg class="plot" viewBox="0 0 22 12">{swatch(style)}</svg>{_text(name)}</li>'
        for name, style in entries.items()
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row is the head. On narrow screens, every row becomes a block of names and values."""
    names = rows[0]
    if len(rows) == 1:
        return '<p class="note">None.</p>'
    head = "".join(f"<th scope=col>{_text(name)}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{_text(name)}"{_kind(name)}>{_text(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in rows[1:]
    )
    return f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _kind(name: str) -> str:
    return ' class="text"' if name == "folder" else ""


def _publish(folder: Path, name: str, title: str, body: Sequence[str], figures: Sequence[Figure]) -> Path:
    """Write the figures, then the page; remove the figures of an earlier report that this one leaves out."""
    page = "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )
    files = {f"{plot.name}.svg": plot.draw(alone=True) for figure in figures for plot in figure.plots}
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures:
        # Earlier versions drew figures as PNG.
        for pattern in (f"{figure.name}.png", f"{figure.name}.svg", f"{figure.name}-*.svg"):
            for path in (folder / "figures").glob(pattern):
                if path.name not in files:
                    path.unlink(missing_ok=True)
    for file, drawn in files.items():
        write_whole(folder / "figures" / file, drawn.encode())
    write_whole(folder / name, page.encode())
    return folder / name
