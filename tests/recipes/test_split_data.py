"""The number of samples that a recipe computes its splits on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from s3d_fast import data
from s3d_fast.base.world import World
from s3d_fast.capture.budget import CapturePlan, UnitNeed
from s3d_fast.recipes import recipe, split_data
from s3d_fast.recipes.job import Job, make_network
from s3d_fast.recipes.recipe import Recipe
from s3d_fast.recipes.running import run
from s3d_fast.recipes.split_data import SplitData

TINY = recipe("digits").with_settings({"widths": (3, 4, 5), "split_samples": 64, "split_batch": 16})
TRAIN = data.digits().train.take(640)


def tiny(world: World | None = None, **settings: Any) -> SplitData:
    chosen = TINY.with_settings(settings)
    return SplitData(chosen, TRAIN, make_network(chosen, 10), World() if world is None else world)


def costing(
    batch: float, product: float, monkeypatch: pytest.MonkeyPatch, *, room: int = 10**9
) -> list[tuple[int, str | None]]:
    """Replace the plans: a batch takes `batch` seconds to capture, and `product` seconds for each product.

    Plans of more than `room` batches recompute them. Returns a list that collects the number of batches and the budget
    of every plan.
    """
    asked: list[tuple[int, str | None]] = []

    def plan(graph: object, x: object, n_batches: int, budget: str | None, **options: Any) -> CapturePlan:
        asked.append((n_batches, budget))
        # At this width, the solver is expected to take 24 steps at a tolerance of 1e-2.
        need = UnitNeed("a", 10, 100, 1000, 1000, 1000, 1000, 0.0, False, 2.0, product)
        place = "memory" if n_batches <= room else "recompute"
        return CapturePlan((need,), {"a": place}, None, n_batches, None, batch)

    monkeypatch.setattr(split_data, "plan_capture", plan)
    return asked


def test_split_samples_sets_the_number_of_batches() -> None:
    assert tiny().count() == 4


def test_split_share_is_a_share_of_the_training_set() -> None:
    assert tiny(split_share=0.25).count() == 10
    assert tiny(split_share=1.0).count() == 40
    assert tiny(split_share=0.001).count() == 1


def test_split_time_pays_for_capture_products_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    # 640 samples are 40 batches. Each takes a second in training, so half an epoch takes 20 seconds. In a split, a
    # batch takes a second to read and capture, 24 products of half a second, and a second for the loss: 14 seconds.
    asked = costing(0.5, 0.5, monkeypatch)
    assert tiny(split_time=0.5, tol=1e-2).count(epoch_seconds=40.0) == 20 // 14
    assert tiny(split_time=1.0, tol=1e-2).count(epoch_seconds=40.0) == 40 // 14
    # At 10 seconds of training per batch, capture and loss count 10 seconds each.
    assert tiny(split_time=0.5, tol=1e-2).count(epoch_seconds=400.0) == 200 // (10 + 12 + 10)
    assert asked[0] == (10, None)


def test_time_saved_by_a_coarse_tolerance_goes_into_images(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the noise decides, 8 products of half a second: 6 seconds for a batch.
    costing(0.5, 0.5, monkeypatch)
    assert tiny(split_time=0.5).count(epoch_seconds=40.0) == 20 // 6
    assert tiny(split_time=1.0).count(epoch_seconds=40.0) == 40 // 6


def test_split_time_pays_for_two_passes_if_products_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    costing(0.5, 0.0, monkeypatch)
    assert tiny(split_time=1.0).count(epoch_seconds=40.0) == 20
    assert tiny(split_time=0.25).count(epoch_seconds=40.0) == 5
    assert tiny(split_time=0.01).count(epoch_seconds=40.0) == 1
    # Here capture takes longer than training.
    costing(3.0, 0.0, monkeypatch)
    assert tiny(split_time=1.0).count(epoch_seconds=40.0) == 10


def test_an_epoch_of_unknown_length_counts_as_long_as_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    costing(0.5, 0.0, monkeypatch)
    assert tiny(split_time=0.5).count() == 10


def test_batches_that_fit_into_memory_are_found_if_more_would_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 batches would be recomputed at each of 24 steps, which takes too long; five batches fit into memory.
    asked = costing(1.0, 0.05, monkeypatch, room=5)
    assert tiny(split_time=1.0).count(epoch_seconds=40.0) == 5
    assert [count for count, _ in asked] == [20, 5]


def test_all_processes_get_the_same_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "same", lambda self, value: value)
    asked = costing(0.5, 0.0, monkeypatch)
    three = World(rank=1, size=3)
    # Work that takes three processes 40 / 3 seconds takes one process 40.
    assert tiny(three, split_time=0.5).count(epoch_seconds=40.0 / 3) == 9
    assert asked == [(4, None)]
    assert tiny(three, split_share=0.2).count() == 6
    assert len(tiny(three, split_share=0.2).batches()) == 2
    # 39 of 40 batches, a multiple of three.
    assert tiny(three, split_share=1.0).count() == 39


def test_real_measurements_pay_for_fewer_samples_than_training_takes() -> None:
    """A batch needs at least two passes over it, and a longer epoch pays for more batches."""
    few, many = (tiny(split_time=0.5).count(seconds) for seconds in (1e-3, 1000.0))
    assert few == 1
    # Half an epoch is the time of 20 batches; each batch of a split needs little more than two passes.
    assert many in (9, 10)
    assert 1 <= tiny(split_time=0.5).count() < 10


def test_plans_keep_the_random_state() -> None:
    """Measurements do not change which samples are drawn, so a run can be repeated by its number of samples."""
    batches = []
    for settings in ({"split_time": 0.01}, {"split_samples": 16}):
        torch.manual_seed(5)
        batches.append(list(tiny(**settings).batches()))
    assert [len(found) for found in batches] == [1, 1]
    assert torch.equal(batches[0][0][0], batches[1][0][0])


def test_the_memory_budget_is_passed_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = costing(0.5, 0.0, monkeypatch)
    tiny(split_time=0.5, memory_budget="3MB").count()
    assert asked == [(10, "3MB")]


def test_batches_are_made_at_every_pass_and_are_equal() -> None:
    torch.manual_seed(3)
    batches = tiny().batches()
    first, second = list(batches), list(batches)
    assert len(batches) == len(first) == 4
    for (x, y), (again, labels) in zip(first, second, strict=True):
        assert x is not again
        assert torch.equal(x, again)
        assert torch.equal(y, labels)
    torch.manual_seed(3)
    assert all(torch.equal(x, again) for (x, _), (again, _) in zip(first, tiny().batches(), strict=True))


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"split_samples": 656}, 1, "split_samples must be at most the 640"),
        ({"split_samples": 16}, 2, "split_samples must be at least a split_batch for each of the 2"),
        ({"split_time": 0.01, "split_batch": 641}, 1, "split_batch must leave a batch"),
        ({"split_share": 1.0, "split_batch": 400}, 2, "split_batch must leave a batch"),
    ],
)
def test_bad_numbers_of_samples_are_refused(settings: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(World(size=ranks), **settings)


def test_split_samples_share_and_time_replace_one_another() -> None:
    by_time = TINY.with_settings({"split_time": 0.01})
    assert (by_time.split_samples, by_time.split_share, by_time.split_time) == (None, None, 0.01)
    assert Recipe.with_settings(by_time, by_time.as_settings()) == by_time
    with pytest.raises(ValueError, match="give one of split_samples, split_share, split_time; got none"):
        replace(TINY, split_samples=None)
    with pytest.raises(ValueError, match="got split_samples, split_share"):
        replace(TINY, split_share=0.5)
    for value in (0.0, 1.5):
        with pytest.raises(ValueError, match="split_share"):
            TINY.with_settings({"split_share": value})


@pytest.fixture(scope="module")
def digits() -> data.Dataset:
    return data.digits()


def test_batches_are_held_back_that_the_split_has_not_seen(digits: data.Dataset) -> None:
    small = recipe("digits", "cpu").with_settings({"split_samples": 512, "split_batch": 64})
    drawn = SplitData(small, digits.train, make_network(small, 10)).batches()
    fresh = drawn.held_back()
    assert fresh is not None
    assert (len(drawn), len(fresh)) == (8, 2)
    seen, others = ({tuple(row.tolist()) for x, _ in part for row in x.flatten(1)} for part in (drawn, fresh))
    assert not seen & others
    assert drawn.larger() is None


def test_auto_doubles_the_samples(digits: data.Dataset) -> None:
    small = recipe("digits", "cpu").with_settings({"split_samples": "auto", "split_batch": 64, "train_samples": 1400})
    drawn = SplitData(small, digits.train.take(1400), make_network(small, 10)).batches()
    assert len(drawn) == 16
    larger = drawn.larger()
    assert larger is not None
    # As many as there are, without those that are held back.
    assert len(larger) == 1400 // 64 - drawn.fresh
    assert larger.larger() is None
    first = [x for x, _ in drawn]
    assert all(torch.equal(x, y) for x, (y, _) in zip(first, larger, strict=False))


def test_a_phase_takes_more_samples_while_fresh_data_keep_more(digits: data.Dataset) -> None:
    small = recipe("digits", "cpu").with_settings(
        {"split_samples": "auto", "split_batch": 32, "steps": 1, "epochs": 4, "train_samples": 1400, "test_samples": 64}
    )
    history = run(Job(small, digits, method="s2d"))
    assert history[0].kept is not None
    assert history[0].batches in (32, 1400 // 32 - 1400 // 32 // 5)
