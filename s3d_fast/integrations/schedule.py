"""What callbacks of all trainers share: when to grow, on which batches, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.base.world import existing
from s3d_fast.data.torch_sets import TorchSource
from s3d_fast.growth.grow_step import GrowthStep, grow_step


def moments(name: str, given: Iterable[int]) -> tuple[int, ...]:
    """Return the sorted epochs or steps at which to grow.

    Raises:
        ValueError: one is not a positive integer.
    """
    found = list(given)
    for one in found:
        require.count(name, one)
    return tuple(sorted(set(found)))


@dataclass
class Growing:
    """How a callback grows a model.

    Attributes:
        loss_fn: as for `capture`.
        batches: the batches to split on, a function that returns them, or how many to draw from the training data.
        seed: of the draw; the draw at a given time is the same in every run, and leaves the random state as it was.
        options: more arguments of `grow_step`.
        steps: what was done in this process.
    """

    loss_fn: Callable[[Any, Any], Tensor]
    batches: int | Iterable[Any] | Callable[[], Iterable[Any]]
    seed: int
    options: Mapping[str, Any]
    steps: list[GrowthStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        require.count("seed", self.seed, at_least=0)
        if isinstance(self.batches, int):
            require.count("batches", self.batches)

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loader: Any,
        moment: int,
        also: Sequence[nn.Module] = (),
    ) -> GrowthStep:
        """Grow the model at a given time of training; `loader` gives the training data."""
        with torch.random.fork_rng(devices=[]):
            done = grow_step(
                model,
                self.loss_fn,
                self._batches(loader, moment),
                optimizer,
                also=[*also, *self.options.get("also", ())],
                **{name: value for name, value in self.options.items() if name != "also"},
            )
        self.steps.append(done)
        return done

    def _batches(self, loader: Any, moment: int) -> Iterable[Any]:
        if callable(self.batches):
            return self.batches()
        if not isinstance(self.batches, int):
            return self.batches
        source = TorchSource.of(loader)
        world = existing()
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        size = min(size, len(source) // world.size)
        count = min(self.batches, len(source) // (size * world.size))
        torch.manual_seed(self.seed)
        # Another draw at every time.
        torch.manual_seed(int(torch.randint(2**31, ())) + moment)
        return [_plain(batch) for batch in source.sample(size * count * world.size, size, world.shard)]


def _plain(batch: Any) -> Any:
    """Return a batch that is some mapping as a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch
