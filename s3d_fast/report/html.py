"""Reports as self-contained HTML pages, with tables and embedded figures."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from s3d_fast.base.files import write_whole
from s3d_fast.records.record import PhaseRecord
from s3d_fast.records.run import Run, eigen_share, main_metric, read_run, share_of_eigen_stages
from s3d_fast.report import wording
from s3d_fast.report.comparison import comparison_figures, comparison_table, group_runs
from s3d_fast.report.drawing import require_matplotlib
from s3d_fast.report.figures import Figure, run_figures

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --soft: #5a5a5a; --rule: #d5d5d5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181b; --soft: #a8a8a8; --rule: #3a3d42; } }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { font-weight: 600; }
.numbers th, .numbers td { white-space: nowrap; text-align: right; }
.numbers th:first-child, .numbers td:first-child { text-align: left; }
.pairs th { font-weight: normal; color: var(--soft); white-space: nowrap; }
figure { margin: 0; } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
@media (max-width: 40rem) { figure img { max-width: none; width: 40rem; } }
figcaption, .note { color: var(--soft); font-size: .9rem; max-width: 48rem; }
summary { font-weight: 600; margin: .6rem 0; cursor: pointer; }
"""


def write_report(folder: str | Path) -> Path:
    """Write report.html and figures/*.png into the folder of a run; return the path of the page.

    Everything is drawn before anything is written, and every file is written whole or not at all.

    Raises:
        FileNotFoundError, ValueError: as `read_run`.
        RuntimeError: matplotlib is not installed.
    """
    require_matplotlib()
    run = read_run(folder)
    if not run.phases:
        raise ValueError(f"{run.folder / 'history.jsonl'} must hold at least one phase, but is empty")
    figures = run_figures(run)
    command = " ".join(map(str, run.about["command"]))
    body = [
        f"<h1>{escape(f'{run.recipe} ({run.preset}): {run.label}')}</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in _state(run)),
        _pairs("Settings", {"method": run.method, "seed": run.seed, **run.settings}, shown=True),
        _pairs("Environment", {**run.about["environment"], "command": command}, shown=False),
        "<h2>Phases</h2>",
        _table(_phase_rows(run)),
        '<p class="note">Predicted and measured change: of the loss, on the batches used for splitting. Negative: '
        "splits with a copy of negative weight. Unconverged: filters whose eigenvalues did not reach the tolerance. "
        "Eigen share: the part of the time spent on capture, solve, select, split and measuring the loss after it.</p>",
        *(_section(figure) for figure in figures),
    ]
    return _publish(run.folder, "report.html", f"{run.recipe}: {run.label}", body, figures)


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write compare.html and figures/compare-*.png into the folder `out`; return the path of the page.

    Runs that differ only in their seed form a group, shown by its median and range.

    Raises:
        FileNotFoundError, ValueError: as `read_run`; or no folder is given, or two runs do not differ at all.
        RuntimeError: matplotlib is not installed.
    """
    require_matplotlib()
    if not folders:
        raise ValueError("folders must name at least one run, got none")
    runs = [read_run(folder) for folder in dict.fromkeys(Path(folder).resolve() for folder in folders)]
    figures = comparison_figures(runs)
    recipes = list(dict.fromkeys(f"{run.recipe} ({run.preset})" for run in runs))
    title = f"{', '.join(recipes)}: {wording.plural(len(runs), 'run')}"
    notes = [f"{run.label}: {note}" for run in runs for note in _state(run) if note != _ENDED]
    if len(recipes) > 1:
        notes.insert(0, "The runs are of different recipes or presets: their numbers are not for the same task.")
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        *(_section(figure) for figure in figures),
        "<h2>Phases</h2>",
        _table(comparison_table(runs)),
        '<p class="note">Median [minimum, maximum] over the seeds whose run finished training the phase.</p>',
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
    elif len(run.phases) <= run.settings.get("steps", 0):
        how = f"The run is under way: {len(run.phases)} of {run.settings['steps'] + 1} phases are finished."
    else:
        how = _ENDED
    return [how, *run.notes]


def _phase_rows(run: Run) -> list[list[str]]:
    metrics = list(dict.fromkeys(name for phase in run.phases for name in phase.metrics))
    first = main_metric([run])
    metrics.sort(key=lambda name: name != first)
    head = ["phase", "width", "params", "MACs", *metrics, "predicted change", "measured change"]
    rows = [[*head, "new filters", "splits (negative)", "unconverged", "time", "eigen share"]]
    for phase in run.phases:
        solved = "solve" in phase.seconds or phase.is_split
        rows.append(
            [
                f"{phase.index}{'' if phase.is_trained else ' (in progress)'}",
                wording.whole(sum(phase.widths.values())),
                wording.whole(phase.params),
                wording.whole(phase.macs),
                *(wording.decimal(phase.metrics.get(name)) for name in metrics),
                wording.change(phase.predicted),
                wording.change(phase.measured),
                wording.whole(sum(phase.new_filters.values())) if solved else wording.NOTHING,
                f"{phase.splits} ({phase.negative})" if solved else wording.NOTHING,
                wording.whole(phase.unconverged) if solved else wording.NOTHING,
                _time([phase]),
                wording.percent(share_of_eigen_stages([phase])),
            ]
        )
    return rows


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


def _pairs(title: str, mapping: Mapping[str, Any], shown: bool) -> str:
    """Return a table of names and values that the reader can fold."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in mapping.items()}
    rows = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in texts.items())
    table = f'<div class="wide"><table class="pairs">{rows}</table></div>' if rows else "<p>None recorded.</p>"
    return f"<details{' open' if shown else ''}><summary>{title}</summary>{table}</details>"


def _section(figure: Figure) -> str:
    caption = escape(figure.caption)
    head = f'<section id="{escape(figure.name)}"><h2>{escape(figure.title)}</h2>'
    if figure.image is None:
        return f'{head}<p class="note">{caption}</p></section>'
    data = base64.b64encode(figure.image).decode()
    image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f'{head}<figure><div class="wide">{image}</div><figcaption>{caption}</figcaption></figure></section>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row is the head."""
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _publish(folder: Path, name: str, title: str, body: Sequence[str], figures: Sequence[Figure]) -> Path:
    """Write the figures, then the page; remove the figures of an earlier report that this one leaves out."""
    page = "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures:
        path = folder / "figures" / f"{figure.name}.png"
        if figure.image is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, figure.image)
    # JSON can hold lone surrogates, which UTF-8 cannot encode.
    write_whole(folder / name, page.encode(errors="replace"))
    return folder / name
