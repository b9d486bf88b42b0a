"""Changes that are undone: dicts and lists of a model hold what they held, whatever their class allows."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.network.undo import AllOrNothing


class FrozenDict(OrderedDict[str, Any]):
    """A configuration that can be read only, as model libraries have it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.__frozen = True

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(self, "_FrozenDict__frozen"):
            raise RuntimeError(f"{name} cannot be set")
        super().__setitem__(name, value)

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("the configuration cannot be changed")

    clear = pop = update  # type: ignore[assignment]


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = FrozenDict({"width": 5, "act": "silu"})
        self.seen: list[int] = []
        self.counts: dict[str, int] = {"calls": 0}
        self.first, self.second = nn.Linear(3, self.config["width"]), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        self.counts["calls"] += 1
        return self.second(nn.functional.silu(self.first(x)))


def test_a_model_with_a_frozen_configuration_is_traced_and_keeps_it() -> None:
    model = Configured()
    config, seen = model.config, model.seen
    graph = s3d.trace(model, torch.randn(4, 3))
    assert list(graph.units) == ["first"]
    assert model.config is config
    assert list(config.items()) == [("width", 5), ("act", "silu")]
    assert model.seen is seen
    assert (seen, model.counts) == ([], {"calls": 0})


def test_an_error_restores_dicts_of_any_class_in_their_order() -> None:
    model = Configured()
    model.table = OrderedDict(b=1, a=2)

    def change_and_fail() -> None:
        with AllOrNothing([model]):
            OrderedDict.__setitem__(model.config, "width", 6)
            OrderedDict.__setitem__(model.config, "more", 7)
            model.table.move_to_end("b")
            model.seen += [1, 2]
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    assert list(model.config.items()) == [("width", 5), ("act", "silu")]
    assert list(model.table) == ["b", "a"]
    assert model.seen == []
