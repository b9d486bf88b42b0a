"""A job: a recipe with its data and method; its network, optimizer, loss and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.base.batches import moved
from s3d_fast.base.random_state import seed_all
from s3d_fast.base.world import ALONE, World, existing
from s3d_fast.data.sources import Dataset, Source
from s3d_fast.growth.loggers import Logger
from s3d_fast.recipes.methods import METHODS
from s3d_fast.recipes.recipe import BUDGETS, Recipe
from s3d_fast.recipes.split_data import SplitData
from s3d_fast.records.record import Phase

# The most samples for methods that compute no eigenvalues, where the recipe gives a share.
FIRST_ORDER_SAMPLES = 4096


@dataclass(frozen=True)
class Job:
    """A recipe, its dataset and method, and how to run it.

    Attributes:
        recipe: the recipe, with its settings.
        preset: the name of the recipe's preset, for run.json; by default that of the whole experiment.
        dataset: the data to train and test on.
        method: one of `METHODS`.
        seed: determines the initial weights and all random draws.
        out: a folder for checkpoints, history and report.
        start: a saved network of the recipe to start from, instead of training the seed network.
        like: the folder of a run; `uniform` matches its number of parameters in every phase, and `scratch` has the
            widths that it ended with. By default `uniform` has as many filters as growth would have.
        scratch: how long networks of one size train: "total", as many epochs as a grown network has had by then;
            "phase"; or "compute", as many as take the MACs times samples of the run `like`.
        device: "auto", "cpu", "cuda" ...
        world: the processes that run the job together; by default those of the process group that exists, if any.
        precision: as for `EpochTrainer`.
        compile: train through torch.compile.
        progress: show progress bars.
        after_phase: called after every phase.
        loggers: follow the run, as for `Grower`.
        sync_batchnorm: as for `EpochTrainer`.
    """

    recipe: Recipe
    dataset: Dataset
    preset: str | None = None
    method: str = "s3d"
    seed: int = 0
    out: Path | None = None
    start: Path | None = None
    like: Path | None = None
    scratch: str = "total"
    device: str = "auto"
    world: World = field(default_factory=existing)
    precision: str = "auto"
    compile: bool = False
    progress: bool = False
    after_phase: Callable[[Phase], object] = lambda phase: None
    loggers: Sequence[Logger] = ()
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        require.choice("method", self.method, tuple(METHODS))
        require.choice("scratch", self.scratch, ("total", "phase", "compute"))
        require.count("seed", self.seed, at_least=0)
        self.device_of(self.device)
        trains = METHODS[self.method].kind == "train"
        if not trains and (self.like is not None or self.scratch != "total"):
            names = ", ".join(name for name, method in METHODS.items() if method.kind == "train")
            raise ValueError(f"like and scratch have no effect without one of the methods {names}")
        if METHODS[self.method].kind != "grow" and self.start is not None:
            raise ValueError(f"start is for methods that grow; {self.method!r} begins with a network of its own")
        if self.like is None and (self.method == "scratch" or self.scratch == "compute"):
            raise ValueError("method 'scratch' and scratch 'compute' need the run to compare with; give like")
        if self.method == "regrow" and not self.recipe.has_budget:
            raise ValueError(f"method 'regrow' needs a budget, one of {', '.join(BUDGETS)}")
        if self.recipe.batch_size % self.world.size:
            raise ValueError(
                f"batch_size must be a multiple of the {self.world.size} processes, got {self.recipe.batch_size}"
            )
        # Made once here to check its settings.
        self.split_data(nn.Module())

    @cached_property
    def train_set(self) -> Source:
        """The training samples that the recipe uses."""
        return first(self.dataset.train, self.recipe.train_samples)

    @cached_property
    def test_set(self) -> Source:
        """The test samples that the recipe uses."""
        return first(self.dataset.test, self.recipe.test_samples)

    def split_data(self, model: nn.Module) -> SplitData:
        """Return the data for computing the splits of a network."""
        method = METHODS[self.method]
        captures = method.kind == "grow" and self.method != "net2net" and method.options.get("splits", True)
        recipe = self.recipe
        if not captures:
            # Methods that compute no eigenvalues need no operators, and so no memory for them. Losses and gradients of
            # first order need fewer samples, and some methods evaluate the network on them a hundred times.
            share = recipe.split_share
            most = max(recipe.split_batch * self.world.size, FIRST_ORDER_SAMPLES) / max(1, len(self.train_set))
            recipe = replace(recipe, memory_budget=None, split_share=None if share is None else min(share, most))
        return SplitData(recipe, self.train_set, model, self.world)

    @property
    def torch_device(self) -> torch.device:
        """The device to run on."""
        return self.world.device if self.world.size > 1 else self.device_of(self.device)

    @staticmethod
    def device_of(name: str) -> torch.device:
        """Return the device of a name; "auto" is a GPU if there is one.

        Raises:
            ValueError: there is no such device.
        """
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=name).device
        # Which error PyTorch raises for a missing device depends on the device.
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {name!r} cannot be used: {error}") from error


def first(source: Source, count: int | None) -> Source:
    """Return `count` samples of a source; all of them if it is None or there are fewer."""
    return source if count is None or count >= len(source) else source.take(count)


def make_network(recipe: Recipe, classes: int, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Return the recipe's seed network; its initial weights depend only on the seed."""
    seed_all(seed)
    return recipe.network(recipe.widths, classes).to(device)


def make_optimizer(recipe: Recipe) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes the recipe's optimizer; BatchNorm and biases (one dimension) do not decay."""

    def make(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
        ]
        if recipe.optimizer == "adam":
            return torch.optim.Adam(groups, lr=recipe.learning_rate)
        return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum)

    return make


def make_loss(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the recipe's training loss, which splits decrease as well."""
    return lambda output, target: F.cross_entropy(output, target, label_smoothing=recipe.label_smoothing)


def evaluate(model: nn.Module, batches: Any, channels_last: bool = False, world: World = ALONE) -> dict[str, float]:
    """Return a classifier's accuracy and cross entropy, and its top-5 accuracy if there are more than 10 classes.

    With several processes, each evaluates its own batches and all return the same metrics.
    """
    device = next(model.parameters()).device
    model.eval()
    right, right5, loss, count, classes = 0.0, 0.0, 0.0, 0.0, 0
    with torch.no_grad():
        for batch in batches:
            x, y = moved(batch, device, channels_last)
            output = model(x).float()
            classes, count = output.shape[1], count + len(y)
            loss += float(F.cross_entropy(output, y, reduction="sum"))
            best = output.topk(min(5, classes), dim=1).indices == y[:, None]
            right, right5 = right + int(best[:, 0].sum()), right5 + int(best.sum())
    right, right5, loss, count = world.sum(right, right5, loss, count)
    metrics = {"accuracy": right / count, "loss": loss / count}
    return {**metrics, "top5": right5 / count} if classes > 10 else metrics
