"""The experiments A, B, C, E, F and G of docs/results.md at small sizes: what they record is what they say."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from benchmarks.results import clouds, convergence, point_clouds, samples, separation, stuck, text, transformer
from benchmarks.results.experiment import Run
from benchmarks.results.experiments import EXPERIMENTS
from benchmarks.results.small_images import Images
from benchmarks.results.store import Store
from s3d_fast.experiments import layer_growth


def numbers(value: Any) -> list[float]:
    """Return all numbers of a record."""
    if isinstance(value, dict):
        return [one for part in value.values() for one in numbers(part)]
    if isinstance(value, list):
        return [one for part in value for one in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


def test_a_run_of_one_layer_records_all_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stuck, "LayerSettings", lambda *a, **b: replace(layer_growth.LayerSettings(*a, **b), seeds=2, steps=5)
    )
    run = next(run for run in stuck.runs() if run.settings["rule"] == "S3D m=3 c=3")
    record = stuck.perform(run, {}, None)
    assert [len(fold) for fold in record["networks"]] == [2] * stuck.PARTS
    assert record["stages"]["neurons"] == [1, 3, 5, 7, 9]
    assert record["splits"] == 4 * 2 * stuck.PARTS
    assert all(math.isfinite(one) for one in numbers(record))
    middle = statistics.median(one for fold in record["networks"] for one in fold)
    assert stuck.quartiles(record)[1] == pytest.approx(middle, rel=0.01)
    assert stuck.lower({"networks": [[0.5, 1.0]]}, {"networks": [[0.6, 1.0]]}) == "1 of 2"
    # Outside of the main cell, medians tell the history, and the quartiles of the end are kept.
    run = next(run for run in stuck.runs() if run.settings["activation"] == "relu" and run.settings["rule"] == "S2D")
    record = stuck.perform(run, {}, None)
    assert "networks" not in record
    assert [len(one) for one in record["stages"]["loss"]] == [1] * 8 + [3]


def test_copies_part_as_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separation, "STEPS", 600)
    monkeypatch.setattr(separation, "SEEDS", 3)
    separation.trained.cache_clear()
    try:
        run = Run("x", {"eps": 1e-4, "lr": 0.2, "momentum": 0.9, "c": 1.0})
        record = separation.perform(run, {}, None)
    finally:
        separation.trained.cache_clear()
    reached = [one for one in record["reached"]["1.0"] if one is not None]
    assert len(reached) >= 3
    assert 0.7 < sorted(reached)[len(reached) // 2] < 1.2
    first = record["curves"][0]
    assert first["distance"][-1] > first["distance"][0]


def small_clouds(count: int = 96, points: int = 16) -> Images:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, points, 3, generator=draw)
    y = (x[..., 0].mean(1) > 0).long() + 2 * (x[..., 1].mean(1) > 0).long()
    return Images(x[: count // 2], y[: count // 2], x[count // 2 :], y[count // 2 :])


def test_kept_gains_are_those_of_fresh_matrices() -> None:
    data = small_clouds()
    subject = replace(
        samples.DGCNN, make=lambda seed: clouds.dgcnn((4, 4, 4, 4), seed), epochs=1, sizes=(16, 48), chunk=16
    )
    record = samples.perform(subject, Run("x", {"seed": 0}), {}, data)
    assert [one["samples"] for one in record["sizes"]] == [16, 48]
    for one in record["sizes"]:
        assert one["promised"] < 0
        # No choice is better than the one that fresh samples make themselves.
        assert one["best"] <= one["kept"] + 1e-9
        assert one["true"] == one["kept"]


def test_splits_change_what_their_matrices_say() -> None:
    model = clouds.dgcnn((4, 4, 4, 4), 0).eval()
    data = small_clouds()
    graph = s3d.trace(model, data.x[:2])
    matrices = samples._matrices(model, graph, "exact", ["edgeconvs.1", "edgeconvs.2"], data.x, data.y)
    plan = samples._plan(matrices, graph)
    assert float(samples._changes(plan, matrices).sum()) == pytest.approx(plan.gain, rel=1e-5)


def test_clouds_of_some_classes_are_numbered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        def __len__(self) -> int:
            return 5

        def batch(self, index: torch.Tensor, augmented: bool) -> tuple[torch.Tensor, torch.Tensor]:
            assert not augmented
            return torch.arange(5.0)[index, None, None].expand(-1, 4, 3), torch.tensor([8, 0, 35, 1, 8])[index]

    x, y = clouds._clouds(Source(), clouds.TEN)
    assert x[:, 0, 0].tolist() == [0, 2, 3, 4]
    assert y.tolist() == [2, 9, 0, 2]


@pytest.mark.parametrize("row", ["s2d", "new", "0.5", "pointnet2"])
def test_networks_of_point_clouds_spend_the_same_compute(monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    monkeypatch.setattr(point_clouds, "COMPUTE", 3e7)
    monkeypatch.setattr(point_clouds, "AT", (0.2,))
    monkeypatch.setattr(point_clouds, "SAMPLES", 32)
    record = point_clouds.perform(Run("x", {"row": row, "lr": 0.01, "seed": 0}), {}, small_clouds())
    assert record["compute"] == pytest.approx(3e7, rel=0.4)
    assert all(math.isfinite(one) for one in numbers(record))
    if row in ("s2d", "new"):
        (phase,) = record["phases"]
        assert sum(record["widths"]) == 16 + phase["splits"] + phase["added"]
        assert phase["added" if row == "new" else "splits"] > 0
        grown = {point_clouds.name(row, 0.01, 0): record}
        scratch = point_clouds.perform(
            Run("y", {"row": f"{row} scratch", "lr": 0.01, "seed": 0}), grown, small_clouds()
        )
        assert (scratch["widths"], scratch["params"]) == (record["widths"], record["params"])


def test_forward_times_are_relative_to_the_full_network() -> None:
    grown = {
        point_clouds.name(row.key, point_clouds.TIMED_RATE, seed): {"widths": [4, 4, 4, 5]}
        for row in point_clouds.ROWS
        if row.options
        for seed in range(point_clouds.SEEDS)
    }
    found = point_clouds.forward_times(grown, small_clouds(), rounds=1)
    assert found["relative"]["1.0"] == 1
    assert {"pointnet", "new, seed 0"} <= set(found["relative"])


def test_a_phase_ends_at_the_plateau_of_its_last_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "MOST", 30)
    monkeypatch.setattr(convergence, "PATIENCE", 2)
    monkeypatch.setattr(convergence, "IMPROVEMENT", 0.5)
    draw = torch.Generator().manual_seed(0)
    data = Images(*(torch.randn(40, 3, 8, 8, generator=draw), torch.arange(40) % 2) * 2)
    record = convergence.perform(Run("x", {"row": "net2net", "lr": 1e-3, "seed": 0, "plan": "random splits"}), {}, data)
    # At so low a rate the loss does not halve within two epochs: each rate has its first epoch and two more.
    assert [phase["epochs"] for phase in record["phases"]] == [[3, 3]] * (1 + convergence.STEPS)
    # 35% more filters in every step, rounded down.
    assert [sum(phase["widths"]) for phase in record["phases"]] == [12, 16, 22, 30]


def test_text_is_pythons_own_and_tests_are_not_trained_on() -> None:
    data = text.load(8)
    assert data.test.shape == (8, text.CONTEXT + 1)
    assert int(data.train.max()) < text.SYMBOLS
    x, y = next(data.batches(3, torch.Generator().manual_seed(0)))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert text.load(8).digest == data.digest
    # A network that knows nothing needs seven bits for one of 128 symbols.
    model = text.reader((4, 4), 0)
    nn.init.zeros_(model.head.weight)
    assert text.bits(model, data) == pytest.approx(7.0)


def test_a_reader_sees_only_what_came_before_and_its_gates_can_be_split() -> None:
    model = text.reader((4, 6), 0).eval()
    x = torch.randint(text.SYMBOLS, (2, text.CONTEXT))
    other = x.clone()
    other[:, 20:] = 0
    torch.testing.assert_close(model(x)[:, :20], model(other)[:, :20])
    assert s3d.trace(model, x).widths() == {"blocks.0.gate": 4, "blocks.1.gate": 6}


@pytest.mark.parametrize("row", ["s3d m3", "new", "firefly", "gradmax"])
def test_transformers_grow_and_spend_the_same_compute(monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    monkeypatch.setattr(transformer, "COMPUTE", 6e8)
    monkeypatch.setattr(transformer, "AT", (0.3,))
    monkeypatch.setattr(transformer, "SAMPLES", 128)
    data = text.load(16)
    record = transformer.perform(Run("x", {"row": row, "lr": 0.01, "seed": 0}), {}, data)
    # Half as many neurons more, whatever the number of copies: 3 more for new neurons, one split in three for 2 more.
    assert sum(record["widths"]) == (8 if row == "s3d m3" else 9)
    assert record["compute"] == pytest.approx(6e8, rel=0.1)
    assert 3 < record["bits"] < 7


@pytest.mark.parametrize("key", ["A", "B", "C", "C2", "F", "G"])
def test_records_are_complete(key: str) -> None:
    store = Store(EXPERIMENTS[key])
    assert [run.name for run in EXPERIMENTS[key].runs() if not store.has(run)] == []


def test_a_batch_of_the_loss_is_its_mean() -> None:
    scores = torch.randn(2, 5, text.SYMBOLS)
    following = torch.randint(text.SYMBOLS, (2, 5))
    parts = [F.cross_entropy(scores[i, j], following[i, j]) for i in range(2) for j in range(5)]
    torch.testing.assert_close(text.loss_of(scores, following), torch.stack(parts).mean())
