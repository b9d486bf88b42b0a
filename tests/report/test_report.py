"""The report of a run and the comparison of runs: their numbers and figures, and how they treat broken files."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

from s3d_fast.base.tables import text_table
from s3d_fast.records.run_folder import read_spectra
from s3d_fast.report import (
    comparison,
    comparison_table,
    eigen_share,
    figures,
    read_run,
    wording,
    write_comparison,
    write_report,
)
from s3d_fast.report.scales import symlog_threshold
from s3d_fast.report.svg import shortened

ENDS = ("lambda_min", "lambda_max")
FILES = (
    *("costs-params", "costs-macs", "costs-compute", "widths", "training", "spectra-00", "spectra-01"),
    *("times-all", "times-splitting", "promises"),
)


def phase(index: int, accuracy: float = 0.5, *, split: bool = True, **changes: Any) -> dict[str, Any]:
    """Return the record of a phase in history.jsonl; widths double from phase to phase."""
    record = {
        "index": index,
        "widths": {"conv1": 8 << index, "conv2": 16 << index},
        "params": 1000 << index,
        "macs": 50_000 << index,
        "metrics": {"loss": 1.25, "accuracy": accuracy},
        "loss": None,
        "split_loss": None,
        "predicted_change": 0.0,
        "gains": {},
        "new_filters": {},
        "unconverged": 0,
        "matvecs": 0,
        "memory": 0,
        "seconds": {"train": 90.0, "evaluate": 4.0},
        "epochs": [
            {"epoch": epoch, "loss": 2.0 / (index + epoch + 1), "learning_rate": 0.1, "seconds": 30.0, "samples": 64}
            for epoch in range(3)
        ],
    }
    if split:
        record |= {
            "loss": 1.5,
            "split_loss": 1.4875,
            "predicted_change": -0.0134,
            "gains": {"conv1": -2.0, "conv2": -1.0},
            "new_filters": {"conv1": 8 << index, "conv2": 16 << index},
            "splits": 24 << index,
            "negative": 5,
            "unconverged": 2,
            "seconds": {"train": 90.0, "evaluate": 4.0, "capture": 1.0, "solve": 3.5, "select": 0.5, "split": 1.0},
        }
    return record | changes


def about(method: str = "s3d", seed: int = 0, **settings: Any) -> dict[str, Any]:
    return {
        "recipe": "digits",
        "preset": "quick",
        "method": method,
        "seed": seed,
        "settings": {"c": 1.3, "m": 2, "fraction": 0.35, **settings},
        "environment": {"torch": "2.13.0", "device": "cpu"},
        "command": ["s3d-fast", "grow", "digits"],
    }


def write_run(folder: Path, run: dict[str, Any], phases: list[dict[str, Any]], spectra: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in phases))
    for record in phases:
        if spectra and record["gains"]:
            tensors = {}
            for unit, width in record["widths"].items():
                values = np.geomspace(1e-4, 1.0, width, dtype=np.float32)
                tensors |= {f"{unit}/lambda_min": -values, f"{unit}/lambda_max": values / 2}
            save_file(tensors, folder / f"spectra-{record['index']:03d}.safetensors")
    return folder


def three_phases(*accuracies: float) -> list[dict[str, Any]]:
    first, second, third = accuracies or (0.31, 0.52, 0.64)
    return [phase(0, first), phase(1, second), phase(2, third, split=False)]


class Page(HTMLParser):
    """A parsed page: tags with attributes, tables as lists of rows, and all text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.in_cell = False
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.tables[-1][-1][-1] += data

    def table(self, first: str) -> list[dict[str, str]]:
        """Return the rows of the first table whose first column has this name."""
        head, *rows = next(table for table in self.tables if table[0][0] == first)
        return [dict(zip(head, row, strict=True)) for row in rows]

    def plots(self) -> list[str]:
        """Return the SVG of every plot, without the samples of legends."""
        return re.findall(r'<svg class="plot" xmlns.*?</svg>', self.source, re.DOTALL)


def drawn(svg: str) -> ElementTree.Element:
    """Return the root of a plot that is well-formed XML and has marks, scales and values on hover."""
    root = ElementTree.fromstring(svg)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert {"path", "text"} <= set(names)
    assert 'class="spot"' in svg
    return root


def assert_self_contained(page: Page) -> None:
    names = {name for tag, attributes in page.tags for name in attributes}
    assert not names & {"href", "xlink:href", "src", "srcset", "action", "background"}
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "img"}
    assert not any(name.startswith("on") for name in names)
    # The name of SVG's namespace is not an address that anything loads.
    source = page.source.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in source
    assert "url(" not in source
    assert "@import" not in source


def test_report_has_the_numbers_of_every_phase_and_all_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", about(), three_phases())
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path)
    first, second, third = page.table("phase")
    assert first == {
        "phase": "0",
        "width": "24",
        "params": "1,000",
        "MACs": "50,000",
        "accuracy": "0.3100",
        "loss": "1.2500",
        "epochs": "3",
        "time": "1 min 40 s",
        # Capture, solve, select and split took 6 of 100 seconds.
        "eigen share": "6.0 %",
    }
    assert (second["params"], second["accuracy"], second["width"]) == ("2,000", "0.5200", "48")
    assert third["eigen share"] == "0.0 %"
    split, _ = page.table("after phase")
    assert split == {
        "after phase": "0",
        "predicted change": "−0.0134",
        "measured change": "−0.0125",
        "new filters": "24",
        "splits (negative)": "24 (5)",
        "unconverged": "2",
    }
    assert "digits (quick): s3d c=1.3, seed 0" in page.text
    assert ["fraction", "0.35"] in page.tables[2]
    # The result comes first; settings are folded away.
    first_words = page.source[page.source.index("<body>") :]
    assert first_words.index("Accuracy went from 0.3100 to 0.6400") < first_words.index("<svg")
    assert [attributes for tag, attributes in page.tags if tag == "details"] == [{}, {}]
    assert "from 0.3100 with 1,000 parameters to 0.6400 with 4,000" in page.text
    # For both splits, measured / predicted is 0.0125 / 0.0134.
    assert "the median of measured / predicted is 0.93" in page.text
    # Splitting took 12 of 294 seconds.
    assert "4 min 54 s in all, of which splitting (capture, solve, select, split) took 4.1 %" in page.text
    # These records tell nothing of fresh data and of copies.
    assert page.text.count("Left out") == 2

    assert_self_contained(page)
    assert len(page.plots()) == len(FILES)
    for svg in page.plots():
        drawn(svg)
    assert {path.stem for path in (folder / "figures").iterdir()} == set(FILES)
    for name in FILES:
        # A file of its own holds the same plot, with the colours of both modes.
        alone = (folder / "figures" / f"{name}.svg").read_text()
        drawn(alone)
        assert "prefers-color-scheme: dark" in alone


def test_values_are_shown_on_hover(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", about(), three_phases())))
    shown = [str(attributes["aria-label"]) for _, attributes in page.tags if attributes.get("class") == "spot"]
    assert "phase 1, accuracy 0.5200, 2,000 parameters" in shown
    # Three epochs of 64 samples at 50,000 MACs, then three at 100,000.
    assert "phase 1, accuracy 0.5200, 28.80M MACs x samples" in shown
    assert "conv1, phase 2: 32 (+16)" in shown
    assert "phase 0: solve, 3.5 s, all splitting: 6.0 % of the phase" in shown
    assert "phase 0, predicted −0.0134, measured −0.0125" in shown
    assert "phase 0, epoch 1, loss 1.0000" in shown
    assert any(label.startswith("λ min after phase 1, median −0.0") for label in shown)


def test_layers_without_a_name_are_shown_with_their_kind(tmp_path: Path) -> None:
    layers = {"0": {"kind": "conv"}, "features.3": {"kind": "linear"}, "head": {"kind": "linear"}, "5": "nonsense"}
    widths = dict.fromkeys([*layers, "7"], 4)
    folder = write_run(tmp_path / "run", about() | {"layers": layers}, [phase(0, split=False, widths=widths)])
    run = read_run(folder)
    assert [run.layer_name(unit) for unit in widths] == ["0 conv", "features.3 linear", "head", "5", "7"]
    assert "0 conv" in Page(write_report(folder)).text


def test_a_figure_is_the_same_when_it_is_drawn_again(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", about(), three_phases()))
    assert figures.widths_figure(run) == figures.widths_figure(run)


def test_the_eigen_share_is_a_share_of_all_seconds(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", about(), three_phases()))
    assert eigen_share(run) == pytest.approx(12 / 294)
    bare = [phase(0, split=False, seconds={})]
    assert math.isnan(eigen_share(read_run(write_run(tmp_path / "bare", about(), bare))))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (about(), "s3d c=1.3, seed 0"),
        (about(seed=3, m=4), "s3d c=1.3 m=4, seed 3"),
        (about("s2d", c=1.0), "s2d, seed 0"),
        (about("net2net"), "net2net, seed 0"),
    ],
)
def test_a_label_names_method_settings_and_seed(tmp_path: Path, run: dict[str, Any], expected: str) -> None:
    assert read_run(write_run(tmp_path / "run", run, three_phases())).label == expected


def test_the_report_of_a_single_phase_leaves_out_figures_of_splits(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", about("uniform"), [phase(0, 0.4, split=False)])
    (folder / "figures").mkdir()
    (folder / "figures" / "promises.png").write_bytes(b"of an earlier report")
    page = Page(write_report(folder))
    assert [row["accuracy"] for row in page.table("phase")] == ["0.4000"]
    assert "Left out: no split has both a predicted and a measured change of the loss." in page.text
    assert "Left out: no split has recorded eigenvalues." in page.text
    assert "The run ended with its last phase." in page.text
    expected = {"costs-params", "costs-macs", "costs-compute", "widths", "times-all", "training"}
    assert {path.stem for path in (folder / "figures").iterdir()} == expected
    for svg in page.plots():
        drawn(svg)


def test_the_report_shows_that_a_run_is_in_progress(tmp_path: Path) -> None:
    now = phase(2, split=False, metrics={}, seconds={})
    now["epochs"] = now["epochs"][:2]
    folder = write_run(tmp_path / "run", about(), [*three_phases()[:2], now])
    page = Page(write_report(folder))
    last = page.table("phase")[-1]
    assert (last["phase"], last["accuracy"], last["time"], last["eigen share"]) == ("2 (in progress)", "–", "–", "–")
    assert "Phase 2 was in progress, with 2 epochs recorded." in page.text
    assert "Training loss of 8 epochs over 3 phases" in page.text
    assert len(page.plots()) == len(FILES)
    rows = comparison_table([read_run(folder)])
    assert [row[1] for row in rows[1:]] == ["0", "1"]


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", about(), three_phases()[:2])
    history = folder / "history.jsonl"
    whole = history.read_bytes()
    line = json.dumps(phase(2, split=False, widths={"größe": 4}), ensure_ascii=False).encode()
    # One of the cuts is in the middle of a character.
    for cut in (1, line.index(b"\xc3") + 1, len(line) - 1):
        history.write_bytes(whole + line[:cut])
        run = read_run(folder)
        assert [record.index for record in run.phases] == [0, 1]
        assert "not written to its end" in run.notes[0]
    page = Page(write_report(folder))
    assert "not written to its end" in page.text
    assert "had split after phase 1, and the next phase is not recorded" in page.text
    history.write_bytes(whole + line)
    assert len(read_run(folder).phases) == 3


def test_the_last_record_of_a_phase_counts(tmp_path: Path) -> None:
    phases = [phase(0, metrics={}, seconds={}, split=False), phase(0, 0.75), phase(1, 0.8, split=False)]
    run = read_run(write_run(tmp_path / "run", about(), phases))
    assert [record.metrics["accuracy"] for record in run.phases] == [0.75, 0.8]


def test_nulls_and_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    diverged = phase(1, metrics={"accuracy": None, "loss": float("nan")}, split_loss=float("inf"))
    diverged["epochs"][1]["loss"] = None
    # Python's json writes NaN and Infinity, which are not JSON, and reads 1e999 as infinity.
    folder = write_run(tmp_path / "run", about(), [phase(0, 0.3), diverged, phase(2, 0.4, split=False)])
    history = folder / "history.jsonl"
    history.write_text(history.read_text().replace('"memory": 0', '"memory": null, "loss_scale": 1e999'))
    values = np.array([np.nan, -1, -2, np.inf], dtype=np.float32)
    save_file({"conv1/lambda_min": values, "conv1/lambda_max": values}, folder / "spectra-001.safetensors")
    page = Page(write_report(folder))
    _, row, _ = page.table("phase")
    assert (row["accuracy"], row["loss"]) == ("–", "–")
    assert page.table("after phase")[1]["predicted change"] == "−0.0134"
    assert page.table("after phase")[1]["measured change"] == "–"
    assert "4 values that are not finite are left out" in page.text
    assert "1 without a finite loss are gaps" in page.text
    assert len(page.plots()) == len(FILES)
    assert not re.search(r"\b(nan|inf|None)\b", page.text)


def test_figures_without_data_are_left_out_with_a_reason(tmp_path: Path) -> None:
    phases = [phase(index, metrics={}, epochs=[], split=False, seconds={}, macs=0) for index in range(2)]
    page = Page(write_report(write_run(tmp_path / "run", about(), phases)))
    assert len(page.plots()) == 1
    for why in ("no phase has a metric", "no phase has times", "no epoch has a loss", "no split has recorded"):
        assert f"Left out: {why}" in page.text


def test_another_metric_replaces_accuracy(tmp_path: Path) -> None:
    phases = [phase(index, metrics={"perplexity": 320.5 - index, "bits": 0.0}, split=index < 1) for index in range(2)]
    folder = write_run(tmp_path / "run", about(), phases)
    page = Page(write_report(folder))
    assert page.table("phase")[0]["perplexity"] == "320.5"
    assert "Perplexity and size" in page.text
    assert wording.title("mIoU") == "mIoU"
    assert comparison_table([read_run(folder)])[0][-1] == "perplexity"


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    names = [evil, r"$\frac{", "_hidden", "重み\n\ud800", "x" * 300]
    phases = three_phases()
    for record in phases:
        record |= {"widths": dict(zip(names, range(4, 9), strict=True)), "metrics": {evil: 0.5}, "extra": evil}
        record["seconds"] = {**record["seconds"], r"_$\bad": 1.0}
    run = about(evil, **{evil: evil}) | {
        "recipe": evil,
        "preset": r"$\x",
        "environment": {evil: evil},
        "command": [evil],
    }
    folder = write_run(tmp_path / "run", run, phases, spectra=False)
    values = np.ones(3, dtype=np.float32)
    save_file({f"{name}/{end}": values for name in names[:3] for end in ENDS}, folder / "spectra-000.safetensors")
    page = Page(write_report(folder))
    assert page.text.count(evil) >= 6
    assert_self_contained(page)
    assert len(page.plots()) == 11
    for path in (folder / "figures").iterdir():
        assert not [one for one in ElementTree.parse(path).iter() if "script" in one.tag]
    compared = Page(write_comparison([folder], tmp_path / "out"))
    assert evil in compared.text
    assert_self_contained(compared)


def test_labels_for_figures_are_plain_and_short() -> None:
    assert shortened("layer1.conv") == "layer1.conv"
    assert shortened("重\n\x00é\ud800") == "重??é?"
    assert shortened("x" * 300) == "x" * 15 + "…" + "x" * 14


def test_missing_and_broken_spectra_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", about(), three_phases())
    run = read_run(folder)
    (folder / "spectra-000.safetensors").unlink()
    figure = figures.spectra_figure(run)
    assert figure.caption.endswith("Not shown: spectra-000.safetensors is missing.")
    assert figure.plots
    (folder / "spectra-001.safetensors").write_bytes(b"nonsense")
    figure = figures.spectra_figure(run)
    assert not figure.plots
    assert "spectra-000.safetensors is missing; spectra-001.safetensors must be a safetensors file" in figure.caption
    save_file({"conv1/lambda_min": np.ones(3, dtype=np.float32)}, folder / "spectra-001.safetensors")
    with pytest.raises(ValueError, match="must hold vectors lambda_min and lambda_max for 'conv1'"):
        read_spectra(folder, 1)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", None, "has no file run.json"),
        ("history.jsonl", None, "has no file history.jsonl"),
        ("run.json", "{", "run.json must be JSON"),
        ("run.json", "[1]", r"run.json must be a JSON object, got \[1\]"),
        ("run.json", "{}", "recipe must be a string, got nothing"),
        ("run.json", json.dumps(about() | {"seed": "x"}), "seed must be an integer, got 'x'"),
        ("run.json", json.dumps(about() | {"settings": None}), "settings must be an object, got None"),
        ("history.jsonl", "{}\n", "line 1: index must be an integer >= 0, got nothing"),
        ("history.jsonl", json.dumps(phase(0)) + "\n{\n", "line 2 must be JSON"),
        ("history.jsonl", json.dumps(phase(0, params=-1)) + "\n", "params must be an integer >= 0, got -1"),
        ("history.jsonl", json.dumps(phase(0, widths=None)) + "\n", "widths must be a JSON object, got nothing"),
        ("history.jsonl", json.dumps(phase(0, widths={"a": "b"})) + "\n", "widths: a must be an integer >= 0, got 'b'"),
        ("history.jsonl", json.dumps(phase(0, metrics={"a": []})) + "\n", r"a must be a number or null, got \[]"),
        ("history.jsonl", json.dumps(phase(0, loss=True)) + "\n", "loss must be a number or null, got True"),
        ("history.jsonl", json.dumps(phase(0, epochs=3)) + "\n", "epochs must be a list, got 3"),
        ("history.jsonl", json.dumps(phase(0, epochs=[3])) + "\n", "epochs must be a JSON object, got 3"),
        ("history.jsonl", "[" * 100_000 + "\n", "line 1 must be JSON"),
        ("history.jsonl", "", "must hold at least one phase"),
    ],
)  # fmt: skip
def test_broken_files_are_named(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    folder = write_run(tmp_path / "run", about(), three_phases())
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(FileNotFoundError if text is None else ValueError, match=message):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be the folder of a run, and does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="folders must name at least one run"):
        write_comparison([], tmp_path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = write_run(tmp_path / "run", about(), [phase(0, split=False)])
    before = write_report(folder).read_bytes()
    files = sorted(path.name for path in folder.rglob("*"))
    (folder / "history.jsonl").write_text(json.dumps(phase(0, 0.9, split=False)) + "\n")

    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="no space left"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert sorted(path.name for path in folder.rglob("*")) == files


@pytest.fixture
def compared(tmp_path: Path) -> list[Path]:
    """Return runs of two methods: s3d with three seeds, one of them interrupted, and s2d with two."""
    curves = {
        ("s3d", 0): (0.30, 0.50, 0.70),
        ("s3d", 1): (0.36, 0.51, 0.60),
        ("s3d", 2): (0.31, 0.58, 0.65),
        ("s2d", 0): (0.20, 0.40, 0.50),
        ("s2d", 1): (0.30, 0.41, 0.52),
    }
    folders = []
    for (method, seed), accuracies in curves.items():
        phases = three_phases(*accuracies)
        phases[1]["params"] += 10 * seed
        if (method, seed) == ("s3d", 2):
            del phases[2]
        run = about(method, seed)
        # A recipe may have the seed among its settings; runs that differ only in it stay in one group.
        run["settings"]["seed"] = seed
        folders.append(write_run(tmp_path / f"{method}-{seed}", run, phases, spectra=False))
    return folders


def test_comparison_table_has_medians_and_ranges_over_seeds(compared: list[Path]) -> None:
    # The order of the folders affects only the order of the groups.
    runs = [read_run(folder) for folder in compared[::-1]]
    rows = comparison_table(runs)
    assert rows == [
        ["method", "phase", "seeds", "params", "MACs", "epochs", "MACs x samples", "accuracy"],
        ["s2d", "0", "2", "1,000", "50.00k", "3", "9.600M", "0.2500 [0.2000, 0.3000]"],
        ["s2d", "1", "2", "2,005 [2,000, 2,010]", "100.0k", "6", "28.80M", "0.4050 [0.4000, 0.4100]"],
        ["s2d", "2", "2", "4,000", "200.0k", "9", "67.20M", "0.5100 [0.5000, 0.5200]"],
        ["s3d c=1.3", "0", "3", "1,000", "50.00k", "3", "9.600M", "0.3100 [0.3000, 0.3600]"],
        ["s3d c=1.3", "1", "3", "2,010 [2,000, 2,020]", "100.0k", "6", "28.80M", "0.5100 [0.5000, 0.5800]"],
        ["s3d c=1.3", "2", "2", "4,000", "200.0k", "9", "67.20M", "0.6500 [0.6000, 0.7000]"],
    ]
    assert "0.6500 [0.6000, 0.7000]" in text_table(rows)


def test_the_comparison_page_has_the_tables_and_figures_of_all_runs(compared: list[Path], tmp_path: Path) -> None:
    # A folder that is given twice counts once.
    path = write_comparison([*compared, compared[0]], tmp_path / "new" / "out")
    assert path == tmp_path / "new" / "out" / "compare.html"
    page = Page(path)
    assert_self_contained(page)
    assert "digits (quick): 5 runs" in page.text
    end, phases, runs = page.tables
    assert end == [
        ["method", "accuracy", "params", "MACs", "epochs", "MACs x samples", "phase", "seeds"],
        ["s3d c=1.3", "0.6500 [0.6000, 0.7000]", "4,000", "200.0k", "9", "67.20M", "2", "2"],
        ["s2d", "0.5100 [0.5000, 0.5200]", "4,000", "200.0k", "9", "67.20M", "2", "2"],
    ]
    assert phases == comparison_table([read_run(folder) for folder in compared])
    assert [row[:4] for row in runs[1:]] == [
        ["s3d c=1.3", "0", "3", "0.7000"],
        ["s3d c=1.3", "1", "3", "0.6000"],
        ["s3d c=1.3", "2", "2", "0.5800"],
        ["s2d", "0", "3", "0.5000"],
        ["s2d", "1", "3", "0.5200"],
    ]
    assert "s3d c=1.3, seed 2: The run was not over" in page.text
    assert "s2d, seed 0: " not in page.text
    files = sorted(path.parent.joinpath("figures").iterdir())
    expected = ("costs-macs", "costs-params", "promises", "training-compute", "training-times")
    assert [file.name for file in files] == [f"compare-{name}.svg" for name in expected]
    assert len(page.plots()) == len(files)
    for svg in [*page.plots(), *(file.read_text() for file in files)]:
        drawn(svg)


def test_a_comparison_says_what_each_method_was_given(tmp_path: Path) -> None:
    runs = {
        "grown": (about(), three_phases()),
        "scratch": (about("uniform"), three_phases()),
        "started": (about("s2d") | {"start": "/somewhere"}, [phase(0, epochs=[]), phase(1), phase(2, split=False)]),
        "own loop": (about("net2net"), [phase(0, epochs=[]), phase(1, epochs=[], split=False)]),
    }
    folders = [write_run(tmp_path / name, *run) for name, run in runs.items()]
    rows = comparison_table([read_run(folder) for folder in folders])
    given = {(row[0], row[1]): (row[5], row[6]) for row in rows[1:]}
    # Phases have 3 epochs of 64 samples, at 50,000, 100,000 and 200,000 MACs.
    assert given["s3d c=1.3", "2"] == ("9", "67.20M")
    assert given["uniform", "2"] == ("3", "38.40M")
    assert given["s2d", "2"] == ("6", "57.60M")
    assert given["net2net", "1"] == ("–", "–")
    page = Page(write_comparison(folders, tmp_path / "out"))
    assert "do not count the training of that network" in page.text
    assert "Left out: some phases do not tell the samples that they were trained on." in page.text


def test_runs_are_grouped_by_their_settings_and_labels_name_the_differences(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {"c": 3.0}, {"c": 3}, {"fraction": 0.5}, {"m": 4, "fraction": 0.5}]
    runs = [
        read_run(write_run(tmp_path / str(seed), about(seed=seed, **settings), three_phases()))
        for seed, settings in enumerate(variants)
    ]
    labels = [row[0] for row in comparison_table(runs)[1::3]]
    assert labels == [
        "s3d c=1.3, m=2, fraction=0.35",
        "s3d c=3.0, m=2, fraction=0.35",
        "s3d c=1.3, m=2, fraction=0.5",
        "s3d c=1.3 m=4, fraction=0.5",
    ]
    # 3 and 3.0 are the same c.
    assert [row[2] for row in comparison_table(runs)[1::3]] == ["1", "2", "1", "1"]


def test_runs_are_grouped_by_choices_outside_the_settings(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / scratch, about("uniform") | {"scratch": scratch, "start": scratch}, [phase(0)]))
        for scratch in ("total", "phase")
    ]
    assert [row[0] for row in comparison_table(runs)[1:]] == ["uniform, scratch=total", "uniform, scratch=phase"]


@pytest.mark.parametrize(("method", "expected"), [("s3d", [94.0, 194.0, 294.0]), ("uniform", [94.0, 94.0, 94.0])])
def test_the_time_of_a_network_from_scratch_excludes_earlier_phases(
    tmp_path: Path, method: str, expected: list[float]
) -> None:
    run = read_run(write_run(tmp_path / "run", about(method), three_phases()))
    assert list(comparison._elapsed(run).values()) == pytest.approx(expected)


def test_a_split_without_gains_has_no_prediction(tmp_path: Path) -> None:
    blind = {"predicted_change": None, "gains": {"conv1": None}}
    phases = [phase(0, **blind), phase(1, predicted_change=0.0, gains={"conv1": 0.0}), phase(2)]
    run = read_run(write_run(tmp_path / "run", about("net2net"), phases, spectra=False))
    assert [record.predicted for record in run.phases] == [None, None, -0.0134]
    assert [record.measured for record in run.phases] == pytest.approx([-0.0125] * 3)
    assert len(figures.promised_and_measured(run.phases)) == 1


def test_a_comparison_reports_different_recipes(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / recipe, about() | {"recipe": recipe}, [phase(0, split=False, seconds={})])
        for recipe in ("digits", "letters")
    ]
    page = Page(write_comparison(folders, tmp_path))
    assert "The runs are of different recipes or presets" in page.text
    assert [row["method"] for row in page.table("method")] == ["s3d c=1.3, digits", "s3d c=1.3, letters"]
    assert "Left out: some phases have no times." in page.text


def test_equal_runs_are_not_counted_as_two_seeds(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, about(), three_phases()) for name in ("a", "b")]
    with pytest.raises(ValueError, match=r"a and .*b are both s3d c=1.3, seed 0; give one of them"):
        comparison_table([read_run(folder) for folder in folders])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (9999, "9,999"), (10_000, "10.00k"), (999_960, "1.000M"), (2_633_270, "2.633M"), (5e8, "500.0M")],
)
def test_large_numbers_are_written_compactly(value: float, expected: str) -> None:
    assert wording.compact(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "0 s"), (1.234, "1.23 s"), (93.5, "1 min 34 s"), (3599.7, "1 h 00 min"), (7380.0, "2 h 03 min")],
)
def test_durations_are_written_in_readable_units(seconds: float, expected: str) -> None:
    assert wording.duration(seconds) == expected


def test_only_values_of_many_sizes_get_a_logarithmic_scale() -> None:
    assert symlog_threshold([-1.0, 0.0, 2.0, 5.0]) is None
    assert symlog_threshold([0.0, 0.0]) is None
    assert symlog_threshold([-1e-5, 1e-4, 1.0, -3.0]) == pytest.approx(1e-5)
    # A value that is practically zero does not stretch the scale.
    assert symlog_threshold([1e-30, 1e-4, 1.0, -3.0]) == pytest.approx(1e-6)


def test_runs_that_start_from_a_saved_network_are_a_separate_group(tmp_path: Path) -> None:
    started = about() | {"start": "/somewhere/network-000.safetensors"}
    folders = [
        write_run(tmp_path / "whole", about(), three_phases()),
        write_run(tmp_path / "started", started, three_phases()),
    ]
    table = comparison_table([read_run(folder) for folder in folders])
    assert len({row[0] for row in table[1:]}) == 2


def test_an_unfinished_run_from_scratch_is_reported_as_under_way(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", about("uniform", steps=2), [phase(0, split=False)])
    assert "The run is under way: 1 of 3 phases are finished." in Page(write_report(folder)).text


def test_the_report_draws_what_fresh_data_keep_and_how_far_copies_part(tmp_path: Path) -> None:
    first = phase(0, kept=0.21, batches=8, steps_to_part=900.0, eps=0.3, relative=True)
    second = phase(1, kept=-0.04, steps_to_part=12.5, apart=0.15)
    folder = write_run(tmp_path / "run", about(batch_size=16), [first, second, phase(2, split=False, apart=0.65)])
    page = Page(write_report(folder))
    more = {"kept", "separation-distance", "separation-steps"}
    assert {path.stem for path in (folder / "figures").iterdir()} == {*FILES, *more}
    shown = [str(attributes["aria-label"]) for _, attributes in page.tags if attributes.get("class") == "spot"]
    assert "split after phase 0, kept 21.0 %, batches of the split: 8" in shown
    assert "split after phase 1, kept -4.0 %" in shown
    assert "end of phase 2, copies are 65.0 % apart" in shown
    assert "split after phase 0, 900 steps to part, by the formula" in shown
    # Three epochs of 64 samples in batches of 16.
    assert "split after phase 0, 12 steps of training" in shown
    assert "-4.0 % to 21.0 %" in page.text
    for svg in page.plots():
        drawn(svg)
    without = Page(write_report(write_run(tmp_path / "bare", about(), three_phases())))
    assert "Left out: no split was measured on fresh data." in without.text
    assert "Left out: no copies were compared." in without.text
