"""What a recipe is: every number of an experiment, typed, checked and said in one place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import nn

from s3d_fast import checks, memory, schedules

# (widths, classes) -> network
Network = Callable[[Sequence[int], int], nn.Module]
# The settings that say how many samples a split is computed on; one of them is given.
SPLIT_DATA = ("split_samples", "split_share", "split_time")


def _setting(help: str, default: Any = None) -> Any:
    """Return a field that the command line offers as an option of the same name."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment: a network, data, training between the splits, and the splits."""

    name: str
    summary: str
    dataset: str  # a name in data.SETS
    network: Network
    splittable: str  # a regular expression: the units that may be split
    full_widths: tuple[int, ...]  # the network that is grown towards, for comparisons
    data_options: Mapping[str, int] = field(default_factory=dict)
    channels_last: bool = False

    widths: tuple[int, ...] = _setting("filters of every layer of the seed network")
    steps: int = _setting("splitting steps; there is a phase of training before each, and one after the last")
    epochs: int = _setting("epochs of a phase")
    batch_size: int = _setting("samples of a training batch")
    train_samples: int | None = _setting("samples of the training set that are used; all by default")
    test_samples: int | None = _setting("samples of the test set that are used; all by default")
    optimizer: str = _setting("sgd or adam", "sgd")
    learning_rate: float = _setting("at the start of a phase", 0.1)
    momentum: float = _setting("of sgd", 0.9)
    weight_decay: float = _setting("of everything but BatchNorm and biases", 1e-4)
    schedule: str = _setting("of the learning rate in a phase: step, cosine or constant", "step")
    decay_at: tuple[float, ...] = _setting("shares of the epochs at which the step schedule decays", (0.5, 0.75))
    decay: float = _setting("factor of the step schedule", 0.1)
    warmup: float = _setting("epochs at the start of a phase in which the learning rate rises from 0", 0.0)
    label_smoothing: float = _setting("of the training loss", 0.0)
    eps: float = _setting("size of a split", 0.01)
    m: int = _setting("copies that a neuron is split into: 2, 3 or 4", 2)
    c: float = _setting("bound on the sum of the absolute weights of the copies; 1 is S2D", 1.3)
    fraction: float | None = _setting("share of the filters that is split in a step")
    macs: tuple[int, ...] | None = _setting("in place of fraction: the MACs that each step may grow to")
    split_samples: int | None = _setting("training samples that the splitting matrices are computed on")
    split_share: float | None = _setting("in place of split_samples: the share of the training set")
    split_time: float | None = _setting("in place of split_samples: the share of an epoch's time that a split may take")
    split_batch: int = _setting("samples of a batch of those", 256)
    memory_budget: str | None = _setting("bytes that splitting operators may take, such as 4GiB; no limit by default")
    tol: float = _setting("accuracy of eigenpairs, relative to the spectral radius", 1e-2)

    def __post_init__(self) -> None:
        """Check every number.

        Raises:
            ValueError: names the setting, what it is and what it must be.
        """
        for name in ("steps", "warmup", "momentum", "weight_decay", "label_smoothing"):
            checks.is_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        for name in ("epochs", "batch_size", "split_batch"):
            checks.is_count(name, getattr(self, name))
        for name in ("learning_rate", "decay", "eps", "tol"):
            checks.is_positive(name, getattr(self, name))
        for name in ("train_samples", "test_samples", "split_samples"):
            if getattr(self, name) is not None:
                checks.is_count(name, getattr(self, name))
        checks.is_count("steps", self.steps, at_least=0)
        for name in ("momentum", "label_smoothing"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)!r}")
        for share in self.decay_at:
            checks.is_number("decay_at", share)
            if not 0 < share <= 1:
                raise ValueError(f"decay_at must hold shares of the epochs in (0, 1], got {share!r}")
        checks.is_choice("optimizer", self.optimizer, ("sgd", "adam"))
        checks.is_choice("schedule", self.schedule, ("step", "cosine", "constant"))
        if self.memory_budget is not None:
            memory.as_bytes("memory_budget", self.memory_budget)
        checks.is_copy_count(self.m)
        checks.is_weight_bound(self.c)
        given = [name for name in SPLIT_DATA if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(SPLIT_DATA)}; got {', '.join(given) or 'none'}")
        for name in ("split_share", "split_time", "fraction"):
            if getattr(self, name) is not None:
                checks.is_positive(name, getattr(self, name))
                if getattr(self, name) > 1:
                    raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)!r}")
        if self.split_samples is not None and self.split_samples % self.split_batch:
            raise ValueError(
                f"split_samples must be a multiple of split_batch, got {self.split_samples} and {self.split_batch}"
            )
        if not isinstance(self.widths, tuple) or len(self.widths) != len(self.full_widths):
            raise ValueError(f"widths must be {len(self.full_widths)} positive integers, got {self.widths!r}")
        for name in ("widths", "macs"):
            for value in getattr(self, name) or ():
                checks.is_count(name, value)
        if (self.fraction is None) == (self.macs is None):
            raise ValueError("give one of fraction and macs")
        if self.macs is not None and len(self.macs) < self.steps:
            raise ValueError(f"macs must have an entry for each of the {self.steps} steps, got {len(self.macs)}")

    @classmethod
    def settings(cls) -> dict[str, tuple[str, str]]:
        """Return the settings that may be overridden: name -> (type, what it means)."""
        return {f.name: (str(f.type), f.metadata["help"]) for f in fields(cls) if "help" in f.metadata}

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """Return the recipe with some settings changed; of those that stand for one another, the new one replaces.

        Raises:
            ValueError: there is no such setting, or its value is bad.
        """
        changed = dict(settings)
        for name, value in changed.items():
            if name not in self.settings():
                raise ValueError(f"{name!r} is not a setting of a recipe; there are {', '.join(self.settings())}")
            if isinstance(value, list):
                changed[name] = tuple(value)
        for alternatives in (("fraction", "macs"), SPLIT_DATA):
            if any(changed.get(name) is not None for name in alternatives):
                changed = dict.fromkeys(alternatives) | changed
        return replace(self, **changed)

    def as_settings(self) -> dict[str, Any]:
        """Return the settings as plain data, which `with_settings` takes back."""
        every = asdict(replace(self, data_options={}))
        return {name: every[name] for name in self.settings()}

    def learning_rates(self) -> schedules.Schedule:
        """Return the schedule of a phase."""
        plain = {
            "step": lambda: schedules.step_decay(self.epochs, self.decay_at, self.decay),
            "cosine": lambda: schedules.cosine(self.epochs),
            "constant": schedules.constant,
        }[self.schedule]()
        return schedules.warmed_up(plain, self.warmup)

    def may_split(self, unit: str) -> bool:
        """Return whether the recipe splits a unit of this name."""
        return re.fullmatch(self.splittable, unit) is not None
