"""Splitting 35% of all filters of a full-size MobileNetV1 with its optimizer's state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture

import s3d_fast as s3d
from benchmarks.compare import clone_bandwidth, compare, copy_bandwidth, plain_pytorch
from benchmarks.device import BACKEND, DEVICE
from s3d_fast.backends import operations
from s3d_fast.maths.reference import Widening
from s3d_fast.models import MobileNetV1
from s3d_fast.splitting import surgery

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def trained() -> Trained:
    """Return a MobileNetV1 1.0x and an Adam with state for all of its parameters."""
    torch.manual_seed(0)
    model = MobileNetV1().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(2, 3, 64, 64, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    return model, optimizer


def random_plan(model: torch.nn.Module, fraction: float) -> s3d.SplitPlan:
    """Return a plan that splits a fraction of the filters of every unit in two, along random directions."""
    graph = s3d.trace(model, torch.randn(2, 3, 64, 64, device=DEVICE))
    splits = []
    for unit in graph:
        for neuron in torch.randperm(unit.width)[: round(fraction * unit.width)].tolist():
            direction = F.normalize(torch.randn(unit.fan_in), dim=0)
            weights = torch.tensor([0.5, 0.5])
            splits.append(s3d.NeuronSplit(unit.name, neuron, weights, torch.stack([direction, -direction]), -1.0))
    return s3d.SplitPlan(graph, splits)


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters, buffers and optimizer state."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach() for tensor in tensors]


def test_apply_splits(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "surgery"
    model, optimizer = trained()
    plan = random_plan(model, 0.35)
    # Splitting changes the model: every call gets a copy, made before the clock starts.
    fresh: list[Trained] = []

    def supply(count: int) -> None:
        while len(fresh) < count:
            fresh.append(copy.deepcopy((model, optimizer)))

    def apply(backend: str) -> Trained:
        pair = fresh.pop()
        with plain_pytorch() if backend == "reference" else contextlib.nullcontext():
            s3d.apply_splits(pair[0], plan, 0.01, pair[1])
        return pair

    supply(2)
    plain, ours = apply("reference"), apply(BACKEND)
    for expected, found in zip(plain[0].state_dict().values(), ours[0].state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    before, after = tensors_of(model, optimizer), tensors_of(*ours)
    work = sum(tensor.nbytes for tensor in before + after)
    del plain
    rounds = 9
    supply(2 * (rounds + 2))
    compare(
        benchmark,
        lambda: apply(BACKEND),
        {"reference": lambda: apply("reference")},
        limits=[copy_bandwidth(), clone_bandwidth(after)],
        work=work,
        aims={"reference": 3.0, "copy": 0.5},
        rounds=rounds,
    )


def test_all_tensors(benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core of the same surgery: computing the new weights and optimizer state of all layers."""
    benchmark.group = "surgery"
    model, optimizer = trained()
    plan = random_plan(model, 0.35)
    growths: list[Widening] = []

    def record(all_growths: Sequence[Widening]) -> list[torch.Tensor]:
        growths.extend(all_growths)
        return operations.grow_weights(all_growths)

    monkeypatch.setattr(surgery, "grow_weights", record)
    s3d.apply_splits(model, plan, 0.01, optimizer)

    def grow(backend: str) -> list[torch.Tensor]:
        with torch.no_grad():
            return operations.grow_weights(growths, backend=backend)

    after = grow(BACKEND)
    for expected, found in zip(grow("reference"), after, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    compare(
        benchmark,
        lambda: grow(BACKEND),
        {"reference": lambda: grow("reference")},
        limits=[copy_bandwidth(), clone_bandwidth(after)],
        work=sum(tensor.nbytes for tensor in [*after, *[growth.weight for growth in growths]]),
        aims={"reference": 3.0, "copy": 0.5},
        rounds=9,
    )
