"""Forward time as a cost: the fit recovers a known law, selection keeps to it, and records give it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import s3d_fast as s3d
from s3d_fast.network.forward_time import ForwardTime
from s3d_fast.network.graph import Graph
from s3d_fast.recipes.baselines import _random_spectrum
from s3d_fast.splitting import forward_cost as module
from s3d_fast.splitting.forward_cost import ForwardCost, forward_cost


def network(widths: Sequence[int] = (3, 4, 5)) -> tuple[nn.Module, Graph]:
    layers: list[nn.Module] = []
    for fan_in, width in zip((2, *widths[:-1]), widths, strict=True):
        layers += [nn.Conv2d(fan_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 3))
    return model, s3d.trace(model, torch.zeros(2, 2, 6, 6))


LAW = {"0": 4e-6, "3": 0.0, "6": 7e-6}


def law(fixed: float = 1e-4, per_mac: float = 2e-10, noise: float = 0.0) -> Callable[..., list[ForwardTime]]:
    """Return what takes the place of the clock: seconds by a law in the widths, with the same noise in every call."""

    def timed(networks: Sequence[tuple[nn.Module, Any]], repeats: int, warmup: int) -> list[ForwardTime]:
        generator, found = torch.Generator().manual_seed(0), []
        for model, x in networks:
            assert not model.training
            macs = s3d.count(s3d.trace(model, x[:2], prove=False)).macs
            own = sum(LAW[name] * model.get_submodule(name).out_channels for name in LAW)
            seconds = (fixed + per_mac * macs + own) * (1 + noise * float(torch.rand((), generator=generator)))
            found.append(ForwardTime((2 * seconds, seconds), (1.0, 1.0)))
        return found

    return timed


def test_the_fit_recovers_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time_in_turns", law())
    model, graph = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = forward_cost(model, graph, torch.zeros(16, 2, 6, 6))
    assert found.batch == 16
    assert found.fixed == pytest.approx(1e-4, rel=1e-6)
    assert found.per_mac == pytest.approx(2e-10, rel=1e-6)
    for name, seconds in LAW.items():
        assert found.per_channel[name] == pytest.approx(seconds, rel=1e-6, abs=1e-11)
    assert found.error(graph) < 1e-6
    # A network that was not measured.
    wide, _ = network((9, 4, 30))
    (there,) = law()([(wide.eval(), torch.zeros(16, 2, 6, 6))], 1, 0)
    assert found.at(graph, {"0": 9, "6": 30}) == pytest.approx(min(there.seconds), rel=1e-6)
    # The price of a filter is the difference.
    for name, price in found.marginal(graph).items():
        more = found.at(graph, {name: graph.units[name].width + 1})
        assert price == pytest.approx(more - found.at(graph), rel=1e-6)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert ForwardCost.of_record(found.as_record()) == found


def test_noise_leaves_every_price_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time_in_turns", law(per_mac=0.0, noise=0.05))
    model, graph = network()
    prices = forward_cost(model, graph, torch.zeros(16, 2, 6, 6)).marginal(graph)
    assert min(prices.values()) > 0


def test_a_time_that_does_not_rise_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(networks: Sequence[Any], repeats: int, warmup: int) -> list[ForwardTime]:
        return [ForwardTime((1e-3,), (1.0,)) for _ in networks]

    monkeypatch.setattr(module, "time_in_turns", constant)
    model, graph = network()
    with pytest.raises(ValueError, match="time says nothing about widths here"):
        forward_cost(model, graph, torch.zeros(16, 2, 6, 6))


def test_selection_within_seconds_is_the_best_of_all() -> None:
    _, graph = network((2, 2, 2))
    torch.manual_seed(0)
    spectra = {name: _random_spectrum(unit) for name, unit in graph.units.items()}
    cost = ForwardCost(16, 1e-4, 2e-10, {"0": 4e-6, "3": 1e-6, "6": 7e-6})
    gains = [
        (name, float(value)) for name, spectrum in spectra.items() for value in spectrum.lambda_min
    ]  # c = 1: the gain is the eigenvalue
    for budget in (2e-6, 8e-6, 1.6e-5):
        plan = s3d.select(spectra, graph, c=1.0, budget=budget, cost=cost)
        best = 0.0
        for chosen in product((0, 1), repeat=len(gains)):
            widths = graph.widths()
            for take, (name, _) in zip(chosen, gains, strict=True):
                widths[name] += take
            if cost.at(graph, widths) - cost.at(graph) <= budget:
                best = min(best, sum(gain for take, (_, gain) in zip(chosen, gains, strict=True) if take))
        assert cost.at(graph, plan.widths()) - cost.at(graph) <= budget * (1 + 1e-9)
        assert plan.gain == pytest.approx(best, rel=1e-6)


def test_a_real_clock() -> None:
    model, graph = network((16, 16, 16))
    found = forward_cost(model, graph, torch.zeros(16, 2, 24, 24), units=["0", "3"], repeats=5)
    assert set(found.per_channel) == {"0", "3"}
    assert found.at(graph, {"0": 64, "3": 64}) > found.at(graph) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [({"units": ["7"]}, "is not a unit"), ({"units": []}, "at least one"), ({"repeats": 0}, "repeats")],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    model, graph = network()
    with pytest.raises(ValueError, match=words):
        forward_cost(model, graph, torch.zeros(16, 2, 6, 6), **options)


def test_bad_records() -> None:
    with pytest.raises(ValueError, match="must have batch, fixed"):
        ForwardCost.of_record({"batch": 16})
    with pytest.raises(ValueError, match="per_mac must be > 0"):
        ForwardCost(16, 0.0, 0.0, {})
