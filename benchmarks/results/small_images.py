"""CIFAR-100 at 16 x 16 with 20 coarse classes, a small MobileNet for it, and training within a budget of compute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from s3d_fast import data
from s3d_fast.models import MobileNetV1

CLASSES = 20
STRIDES = (1, 2, 1, 2)
# The coarse class of every fine class, as published with the data.
COARSE = (
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """Training and test images in memory, normalised, with channels innermost."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    def drawn(self, count: int, seed: int, size: int = 256) -> list[Batch]:
        """Return batches of training images, drawn without replacement."""
        chosen = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))[:count]
        return [(self.x[index], self.y[index]) for index in chosen.split(size)]

    def first(self, count: int) -> Images:
        """Return the images with only the first training images; classes come in turn."""
        return Images(self.x[:count], self.y[:count], self.x_test, self.y_test)


def load(path: str, train: int = 8000, test: int = 5000) -> Images:
    """Return the first images of every fine class, averaged over 2 x 2 pixels, with their coarse classes.

    Args:
        path: as for `s3d_fast.data.cifar100`.
        train: training images, a multiple of 100.
        test: test images, a multiple of 100.
    """
    dataset = data.cifar100(path)
    x, y = _first_of_each(dataset.train, train)
    x_test, y_test = _first_of_each(dataset.test, test)
    return Images(x, y, x_test, y_test)


def _first_of_each(source: Any, count: int) -> Batch:
    labels = source.labels
    places = torch.stack([(labels == label).nonzero().flatten()[: count // 100] for label in range(100)], 1).flatten()
    x, y = source.batch(places, augmented=False)
    x = F.avg_pool2d(x, 2).contiguous(memory_format=torch.channels_last)
    return x, torch.tensor(COARSE)[y]


def network(widths: Sequence[int], seed: int) -> MobileNetV1:
    """Return the MobileNet of five layers with given widths (stem first) and the random weights of a seed."""
    torch.manual_seed(seed)
    model = MobileNetV1(widths, CLASSES, stem_stride=2, strides=STRIDES)
    return model.to(memory_format=torch.channels_last)


class Trainer:
    """Trains a network, perhaps in several phases while it grows, until a budget of compute is spent.

    Compute is multiply-accumulates of a forward pass x samples. The order of the data depends on the seed alone.

    Attributes:
        spent: the compute so far.
        samples: trained on so far.
        seconds: of the CPU, in training.
        loss: the mean training loss of the last 100 steps.
    """

    def __init__(self, images: Images, seed: int, rate: float, total: float, batch: int) -> None:
        self.images, self.rate, self.total, self.batch = images, rate, total, batch
        self.spent, self.samples, self.seconds = 0.0, 0, 0.0
        self._order = self._orders(torch.Generator().manual_seed(seed))
        self._losses: list[Tensor] = []

    def _orders(self, generator: torch.Generator) -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(self.images.x), generator=generator).split(self.batch)

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        macs: int,
        until: float,
        *,
        since: float = 0.0,
        over: float | None = None,
        extra: Callable[[], Tensor] | None = None,
    ) -> None:
        """Train until the compute spent reaches `until`, along a cosine from `since` to `over` (the whole budget).

        Raises:
            Diverged: the loss is not finite.
        """
        began = time.process_time()
        model.train()
        over = self.total if over is None else over
        while self.spent + macs * self.batch / 2 < until:
            share = min(1.0, (self.spent - since) / (over - since))
            for group in optimizer.param_groups:
                group["lr"] = self.rate * 0.5 * (1 + math.cos(math.pi * share))
            index = next(self._order)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(self.images.x[index]), self.images.y[index])
            (loss if extra is None else loss + extra()).backward()
            optimizer.step()
            self._losses.append(loss.detach())
            self.spent += macs * len(index)
            self.samples += len(index)
        self.seconds += time.process_time() - began
        if not math.isfinite(self.loss):
            raise Diverged

    @property
    def loss(self) -> float:
        """The mean training loss of the last 100 steps."""
        return float(torch.stack(self._losses[-100:]).mean()) if self._losses else math.nan


class Diverged(ArithmeticError):
    """The loss of a run is not finite."""


@torch.no_grad()
def evaluate(model: nn.Module, images: Images) -> dict[str, float]:
    """Return accuracy in percent and loss on the test images."""
    model.eval()
    outputs = torch.cat([model(x) for x in images.x_test.split(500)])
    right = (outputs.argmax(1) == images.y_test).double().mean()
    return {"accuracy": 100 * float(right), "loss": float(F.cross_entropy(outputs, images.y_test))}


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Let every BatchNorm take the mean of the batches' statistics for its running ones."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    for x, _ in batches:
        model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
