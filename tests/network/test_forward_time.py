"""Forward times: networks take turns, warm-up does not count, ratios compare the same rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from s3d_fast.network import forward_time
from s3d_fast.network.forward_time import ForwardTime, time_in_turns


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, ""

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """Takes the given seconds, one entry for every call."""

    def __init__(self, name: str, seconds: list[float], clock: Clock) -> None:
        super().__init__()
        self.name, self.seconds, self.clock = name, seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        assert torch.is_inference_mode_enabled()
        self.clock.calls += self.name
        self.clock.now += self.seconds[self.clock.calls.count(self.name) - 1]
        return x


def test_networks_take_turns_and_ratios_compare_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(forward_time, "time", clock)
    # The machine is slow in the second of three rounds that count; both networks see it.
    models = [Slow("a", [50, 1, 9, 2], clock), Slow("b", [90, 2, 27, 4], clock)]
    first, second = time_in_turns([(model, torch.zeros(1)) for model in models], repeats=3, warmup=1)
    assert clock.calls == "abababab"
    assert (first.seconds, second.seconds) == ((1, 9, 2), (2, 27, 4))
    assert (first.median, second.median) == (2, 4)
    assert first.ratios == (1, 1, 1)
    assert second.ratios == (2, 3, 2)
    assert second.ratio == 2
    assert second.quartiles == (3, 15.5)


def test_one_round_has_no_spread() -> None:
    time = ForwardTime((2.0,), (1.0,))
    assert (time.median, time.quartiles, time.ratio) == (2.0, (2.0, 2.0), 1.0)
