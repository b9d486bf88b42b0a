"""The harness of docs/results.md: its statistics, its files, its queue; and the page shows the records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import s3d_fast as s3d
from benchmarks.results import growing, page, small_images
from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.experiments import EXPERIMENTS
from benchmarks.results.methods import selected
from benchmarks.results.queue import perform_all, waiting
from benchmarks.results.rows import Row, mean_of, minus, minus_scratch, ranked, rate_of, rows_table
from benchmarks.results.statistics import best_rate, difference, interval
from benchmarks.results.store import Store
from benchmarks.results.tables import by_rate_and_seed, table


def test_an_interval_is_that_of_the_t_distribution() -> None:
    # 1, 2, 3, 4: mean 2.5, s = 1.29099, t(0.975, 3) = 3.18245.
    found = interval({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})
    assert found.mean == 2.5
    assert found.half == pytest.approx(3.18245 * 1.29099 / 2, rel=1e-5)
    assert (found.count, found.above, found.excludes_zero) == (4, 4, True)
    assert str(found) == "2.50 ± 2.05"


def test_one_seed_has_no_interval() -> None:
    found = interval({3: 1.5})
    assert math.isinf(found.half)
    assert not found.excludes_zero
    assert found.signed == "+1.50"
    with pytest.raises(ValueError, match="at least one seed"):
        interval({})


def test_differences_are_paired_by_seed() -> None:
    # Seeds differ by far more than the two rows do.
    first = {0: 10.0, 1: 50.0, 2: 90.0, 7: 3.0}
    second = {0: 9.0, 1: 48.0, 2: 89.0, 8: 1000.0}
    found = difference(first, second)
    assert found.mean == pytest.approx(4 / 3)
    assert found.half < 1.5
    assert (found.count, found.above) == (3, 3)


def test_the_best_learning_rate_is_that_of_common_seeds() -> None:
    # The seed that only one rate has would turn the order.
    assert best_rate({0.1: {0: 5.0, 1: 6.0}, 0.2: {0: 4.0, 1: 6.5, 2: 99.0}}) == 0.1
    assert best_rate({0.2: {0: 5.0}, 0.1: {0: 5.0}}) == 0.1
    with pytest.raises(ValueError, match="every learning rate"):
        best_rate({0.1: {0: 5.0}, 0.2: {1: 4.0}})


def test_values_are_found_by_row_rate_and_seed() -> None:
    settings = [("a", 0.1, 0), ("a", 0.2, 0), ("b", 0.1, 3)]
    records = {
        str(place): {"settings": {"row": row, "lr": rate, "seed": seed}, "accuracy": float(place)}
        for place, (row, rate, seed) in enumerate(settings)
    }
    found = by_rate_and_seed(records, lambda record: record["accuracy"])
    assert found == {"a": {0.1: {0: 0.0}, 0.2: {0: 1.0}}, "b": {0.1: {3: 2.0}}}


def record(row: str, rate: float, seed: int, value: float) -> tuple[str, Record]:
    return f"{row} {rate} {seed}", {"settings": {"row": row, "lr": rate, "seed": seed}, "value": value}


def test_rows_compare_at_their_best_rates_on_complete_seeds() -> None:
    grown = [record("a", 0.1, 0, 5.0), record("a", 0.2, 0, 7.0), record("a", 0.1, 1, 6.0), record("a", 0.2, 1, 7.0)]
    other = [record("b", 0.1, 0, 4.0), record("b", 0.2, 0, 3.0), record("b", 0.1, 1, 5.0), record("b", 0.2, 1, 1.0)]
    # Seed 2 of b is not complete: it lacks a rate. Seed 3 of a has nothing to be paired with.
    partial = [record("b", 0.1, 2, 50.0), record("a", 0.1, 3, 5.0), record("a", 0.2, 3, 9.0)]
    records = dict([*grown, *other, *partial])
    found = Comparison.of(records, ["a", "b"], [0.1, 0.2], lambda one: one["value"])
    assert (found.seeds("a"), found.seeds("b")) == ([0, 1, 3], [0, 1])
    assert (found.rate("a"), found.rate("b")) == (0.2, 0.1)
    assert (found.minus("a", "b").mean, found.minus("a", "b").count) == (2.5, 2)
    assert [one["value"] for one in found.of_row("b")] == [4.0, 5.0]
    assert found.minus_at("a", "b", 0.1).mean == 1.0
    # Means over the rates: 6 and 6.5 for a, 3.5 and 3 for b.
    assert found.minus_over_rates("a", "b").mean == 3.0
    lower = Comparison.of(records, ["a", "b"], [0.1, 0.2], lambda one: one["value"], lower=True)
    assert (lower.rate("a"), lower.rate("b")) == (0.1, 0.2)
    with pytest.raises(ValueError, match="no seed"):
        Comparison.of(records, ["a", "c"], [0.1], lambda one: one["value"])


def test_rows_are_ranked_and_beside_scratch_of_their_widths() -> None:
    rows = (Row("a", "grown", {"m": 2}), Row("b", "scratch", like="a"), Row("c", "other"))
    values = {"a": (3.0, 4.0), "b": (1.0, 2.5), "c": (9.0, 9.5)}
    records = dict(record(key, 0.1, seed, own[seed]) for key, own in values.items() for seed in (0, 1))
    found = Comparison.of(records, list(values), [0.1], lambda one: one["value"])
    columns = {"own": minus_scratch(rows), "from c": minus("c"), "lr": rate_of, "mean": mean_of("value", 1, grown=True)}
    lines = [line.strip("| ").split(" | ") for line in rows_table(found, rows, "value", columns).splitlines()]
    assert lines[0] == ["method", "value", "own", "from c", "lr", "mean"]
    assert [line[0] for line in lines[2:]] == ["other", "grown", "scratch"]
    # 3 - 1 and 4 - 2.5: a mean of 1.75 and t(0.975, 1) 0.354 / sqrt(2). Bold differences exclude zero.
    assert lines[3] == ["grown", "3.50 ± 6.35", "+1.75 ± 3.18", "**-5.75 ± 3.18**", "0.1", "3.5"]
    # The lower, the better.
    lower = Comparison.of(records, list(values), [0.1], lambda one: one["value"], lower=True)
    assert [row.key for row in ranked(lower, rows)] == ["b", "a", "c"]


def test_a_page_is_filled_by_parts_and_values(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("A <!-- x -->old<!-- end --> b.\n\n<!-- T -->\nold\n<!-- end -->\n| <!-- y -->0<!-- end --> |\n")
    text = page.filled(path, {"T": "| new |\n"}, {"x": "1.5", "y": "+2"})
    assert text == (
        "A <!-- x -->1.5<!-- end --> b.\n\n<!-- T -->\n| new |\n<!-- end -->\n| <!-- y -->+2<!-- end --> |\n"
    )
    with pytest.raises(ValueError, match="no place for 'U'"):
        page.filled(path, {"U": ""}, {"x": "", "y": ""})
    with pytest.raises(ValueError, match="asks for 'y'"):
        page.filled(path, {}, {"x": ""})


def test_a_table_of_markdown() -> None:
    assert table([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"


def runs() -> list[Run]:
    return [
        Run("later", {"seed": 1}, rank=1),
        Run("twice", {"seed": 0}, needs=("once",)),
        Run("once", {"seed": 0}),
        Run("bad", {"seed": 2}, rank=2),
        Run("after bad", {"seed": 2}, rank=2, needs=("bad",)),
    ]


def load(path: str) -> int:
    return len(path)


def perform(run: Run, records: Records, data: Any) -> Record:
    if run.name == "bad":
        raise RuntimeError("this run fails")
    return {"value": data * (1 + run.settings["seed"]) + sum(record["value"] for record in records.values())}


EXPERIMENT = Experiment("T", "a test", runs, perform, {"size": (1, 2)}, "cifar100", load)


def test_runs_are_performed_in_order_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(EXPERIMENT, tmp_path)
    assert [run.name for _, run in waiting([EXPERIMENT], {"T": store})] == [
        "twice",
        "once",
        "later",
        "bad",
        "after bad",
    ]
    failed = perform_all([EXPERIMENT], {"T": store}, {"cifar100": "12345"}, jobs=1)
    assert failed == ["T/bad", "T/after bad"]
    assert "this run fails" in capsys.readouterr().out
    # A run waits for those that it needs; a failed one does not stop the others.
    assert list(store.records) == ["once", "twice", "later"]
    assert [record["value"] for record in store.records.values()] == [5, 10, 10]
    again = Store(EXPERIMENT, tmp_path)
    assert again.records == store.records
    assert [run.name for _, run in waiting([EXPERIMENT], {"T": again})] == ["bad", "after bad"]


def test_a_file_holds_one_run_a_line_and_no_other_conditions(tmp_path: Path) -> None:
    store = Store(EXPERIMENT, tmp_path)
    store.add(Run("a", {"lr": 0.1}), {"value": 1.0})
    store.add(Run("b", {"lr": 0.1}), {"value": 2.0})
    text = (tmp_path / "T.json").read_text()
    assert json.loads(text)["runs"]["b"] == {"settings": {"lr": 0.1}, "value": 2.0}
    assert sum(line.startswith('"') and '"value"' in line for line in text.splitlines()) == 2
    # Other settings make another run.
    assert store.has(Run("a", {"lr": 0.1}))
    assert not store.has(Run("a", {"lr": 0.2}))
    other = Experiment("T", "a test", runs, perform, {"size": (1, 3)})
    with pytest.raises(ValueError, match="delete the file"):
        Store(other, tmp_path)
    # A number that JSON does not have is never written.
    with pytest.raises(ValueError, match="JSON"):
        store.add(Run("c", {}), {"value": math.nan})
    assert (tmp_path / "T.json").read_text() == text


@pytest.mark.parametrize("key", EXPERIMENTS)
def test_runs_have_names_of_their_own_and_needs_that_exist(key: str) -> None:
    names = {one: {run.name for run in experiment.runs()} for one, experiment in EXPERIMENTS.items()}
    listed = EXPERIMENTS[key].runs()
    assert len(names[key]) == len(listed)
    for run in listed:
        for need in run.needs:
            other, slash, own = need.partition("/")
            assert (own in names[other]) if slash else (need in names[key])


def test_the_pages_and_figures_show_the_records() -> None:
    for path, text in page.files().items():
        assert path.read_text() == text, f"{path.name}: run python -m benchmarks.results page"


def images() -> small_images.Images:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 3, 16, 16, generator=generator)
    y = torch.randint(small_images.CLASSES, (320,), generator=generator)
    return small_images.Images(x[:256], y[:256], x[256:], y[256:])


def test_a_grown_run_and_scratch_of_its_widths_spend_the_same_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "COMPUTE", 2.5e8)
    monkeypatch.setattr(growing, "SAMPLES", 64)
    data = images()
    settings = {"row": "net2net", "lr": 0.1, "seed": 3, "plan": "random splits", **selected()}
    grown = growing.Growing(settings, data).perform()
    control = growing.scratch(settings, grown["widths"], data)
    for one in (grown, control):
        # Whole batches: at most half a batch too much or too little.
        assert abs(one["compute"] - 2.5e8) <= one["macs"] * growing.BATCH / 2
    assert control["macs"] == grown["macs"]
    assert control["params"] == grown["params"]
    assert control["samples"] < grown["samples"]
    # Three steps of half as many filters more, and the stem stays.
    filters = [sum(phase["widths"][1:]) for phase in grown["phases"]]
    assert filters == [48, 72, 108, 162]
    assert grown["widths"][0] == growing.FIRST
    # The same settings give the same run.
    assert growing.Growing(settings, data).perform()["accuracy"] == grown["accuracy"]


def test_methods_of_a_seed_share_the_first_network_and_the_order_of_the_data() -> None:
    data = images()
    first, second = (small_images.Trainer(data, 5, rate, 1.0, 64) for rate in (0.1, 0.4))
    assert all(torch.equal(next(first._order), next(second._order)) for _ in range(9))
    models = [small_images.network(growing.uniform(12), 5) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_a_loss_that_is_not_finite_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "COMPUTE", 1e8)
    found = growing.scratch({"lr": 1e30, "seed": 0}, growing.uniform(12), images())
    assert found["diverged"]
    assert "loss" not in found


def test_shapes_have_equal_macs() -> None:
    wide = growing.doubling(growing.uniform(growing.LAST))
    counts = [
        s3d.count(s3d.trace(small_images.network(widths, 0), torch.zeros(2, 3, 16, 16))).macs
        for widths in (wide, growing.uniform(growing.LAST))
    ]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)
