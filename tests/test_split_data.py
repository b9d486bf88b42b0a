"""How many samples a recipe computes its splits on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from s3d_fast import data
from s3d_fast.capture_plan import CapturePlan
from s3d_fast.distributed import World
from s3d_fast.recipes import recipe, split_data
from s3d_fast.recipes.recipe import Recipe
from s3d_fast.recipes.running import make_network
from s3d_fast.recipes.split_data import SplitData

TINY = recipe("digits").with_settings({"widths": (3, 4, 5), "split_samples": 64, "split_batch": 16})
TRAIN = data.digits().train.take(640)


def tiny(world: World | None = None, **settings: Any) -> SplitData:
    chosen = TINY.with_settings(settings)
    return SplitData(chosen, TRAIN, make_network(chosen, 10), World() if world is None else world)


def costing(seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every batch take so long to capture; return the numbers of batches that plans will be asked for."""
    asked: list[int] = []

    def plan(graph: object, batch: object, n_batches: int, *rest: Any, **options: Any) -> CapturePlan:
        asked.append(n_batches)
        return CapturePlan((), {}, None, n_batches, None, seconds)

    monkeypatch.setattr(split_data, "plan_capture", plan)
    return asked


def test_a_number_of_samples_is_taken_as_it_is() -> None:
    assert tiny().count() == 4


def test_a_share_is_one_of_the_training_set() -> None:
    assert tiny(split_share=0.25).count() == 10
    assert tiny(split_share=1.0).count() == 40
    assert tiny(split_share=0.001).count() == 1


def test_time_pays_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = costing(0.5, monkeypatch)
    # An epoch of 40 seconds, of which 10 % pay for 8 batches of half a second.
    assert tiny(split_time=0.1).count(epoch_seconds=40.0) == 8
    assert tiny(split_time=0.1).count(epoch_seconds=1000.0) == 40
    assert tiny(split_time=0.1).count(epoch_seconds=1.0) == 1
    # Plans are made for no more than could be paid for if solving took no time.
    assert asked == [4, 4, 4]


def test_an_unknown_epoch_is_thought_to_take_as_long_as_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    costing(0.5, monkeypatch)
    assert tiny(split_time=0.1).count() == 4


def test_processes_get_as_many_batches_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "same", lambda self, value: value)
    costing(0.5, monkeypatch)
    three = World(rank=1, size=3)
    # What takes one process 20 seconds is done by three at once.
    assert tiny(three, split_time=0.1).count(epoch_seconds=20.0) == 12
    assert tiny(three, split_share=0.2).count() == 6
    assert len(tiny(three, split_share=0.2).batches()) == 2


def test_real_measurements_pay_for_fewer_samples_than_training_takes() -> None:
    """Capture and solver cost more per sample than training does, and a longer epoch pays for more."""
    few, many = (tiny(split_time=0.5).count(seconds) for seconds in (1e-3, 10.0))
    assert few < many == 40
    assert 1 <= tiny(split_time=0.5).count() <= 20


def test_batches_are_made_anew_and_are_the_same() -> None:
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
def test_bad_amounts_are_refused(settings: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(World(size=ranks), **settings)


def test_one_amount_replaces_another() -> None:
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
