"""The time of forward passes of several networks, which take turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from s3d_fast.network.wrapping import arguments_of


@dataclass(frozen=True)
class ForwardTime:
    """The seconds of a network's forward passes, one for every round.

    Attributes:
        seconds: of every round.
        ratios: the same, relative to the first network in the same round.
    """

    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of the seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)


def time_in_turns(networks: Sequence[tuple[nn.Module, Any]], repeats: int = 15, warmup: int = 2) -> list[ForwardTime]:
    """Time forward passes in eval mode; the networks take turns, so that all see the same noise of the machine.

    Args:
        networks: networks and their inputs, each as `trace` takes it, on the same device.
        repeats: rounds that count.
        warmup: rounds before these.
    """
    seconds: list[list[float]] = [[] for _ in networks]
    for model, _ in networks:
        model.eval()
    calls = [(model, *arguments_of(model, given), _device(given)) for model, given in networks]
    with torch.inference_mode():
        for _ in range(warmup + repeats):
            for (model, arguments, keywords, device), taken in zip(calls, seconds, strict=True):
                _wait_for(device)
                began = time.perf_counter()
                model(*arguments, **keywords)
                _wait_for(device)
                taken.append(time.perf_counter() - began)
    counted = [tuple(taken[warmup:]) for taken in seconds]
    return [
        ForwardTime(taken, tuple(one / base for one, base in zip(taken, counted[0], strict=True))) for taken in counted
    ]


def _device(given: Any) -> torch.device:
    """Return where an input is; without tensors, the CPU."""
    return next((leaf.device for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), torch.device("cpu"))


def _wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
