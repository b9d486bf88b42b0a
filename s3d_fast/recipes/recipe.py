"""The Recipe class: every number of an experiment, typed and checked in one place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import nn

from s3d_fast.base import require
from s3d_fast.base.byte_counts import as_bytes
from s3d_fast.growth import schedules
from s3d_fast.growth.plateau import Plateau
from s3d_fast.growth.step_size import StepSize
from s3d_fast.splitting.new_filters import KINDS

# (name, value) -> nothing; raises an error that names the setting
Demand = Callable[[str, Any], object]
# (widths, classes) -> network
Network = Callable[[Sequence[int], int], nn.Module]
# Alternative settings for how much a step grows, and for the number of samples of a split; exactly one is given.
AMOUNTS = ("fraction", "macs", "params", "milliseconds", "growth", "top_k")
# Those that bound the cost of the network after a step.
BUDGETS = ("macs", "params", "milliseconds", "growth")
SPLIT_DATA = ("split_samples", "split_share", "split_time")


def _setting(help: str, demand: Demand, default: Any = None) -> Any:
    """Return a field that the command line offers as an option of the same name.

    `demand` raises an error on a bad value. A setting whose type allows None may be left out; it is then not checked.
    """
    return field(default=default, metadata={"help": help, "demand": demand})


def _each(demand: Demand) -> Demand:
    """Return a demand that checks every entry of a tuple by `demand`."""

    def every(name: str, values: Any) -> None:
        if not isinstance(values, (tuple, list)):
            raise ValueError(f"{name} must be a tuple, got {values!r}")
        for value in values:
            demand(name, value)

    return every


def _require_share_of_epochs(name: str, value: Any) -> None:
    require.number(name, value)
    if not 0 < value <= 1:
        raise ValueError(f"{name} must hold shares of the epochs in (0, 1], got {value!r}")


def _require_epochs(name: str, value: Any) -> None:
    for number in value if isinstance(value, (tuple, list)) and value else [value]:
        require.count(name, number)


def _require_growth(name: str, value: Any) -> None:
    require.number(name, value)
    if value <= 1:
        raise ValueError(f"{name} must be a factor > 1, got {value!r}")


def _require_samples(name: str, value: Any) -> None:
    if value != "auto":
        require.count(name, value)


def _require_truth(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def _require_eps(name: str, value: Any) -> None:
    StepSize.of(value)


def _one_of(*choices: str) -> Demand:
    return lambda name, value: require.choice(name, value, choices)


def _require_number(name: str, value: Any) -> None:
    require.count(name, value, at_least=0)


def _require_copies(name: str, value: Any) -> None:
    if value != "knapsack":
        require.copy_count(value)


def _require_bound(name: str, value: Any) -> None:
    require.weight_bound(value)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment: a network, data, training between the splits, and the splits."""

    name: str
    summary: str
    dataset: str  # a name in data.SETS
    network: Network
    splittable: str  # a regular expression: the units that may be split
    full_widths: tuple[int, ...]  # widths of the full-size network, for comparisons
    data_options: Mapping[str, int] = field(default_factory=dict)
    channels_last: bool = False
    method: str = "s3d"  # a name in `METHODS`, for runs that are not given one

    widths: tuple[int, ...] = _setting("filters of every layer of the seed network", _each(require.count))
    steps: int = _setting(
        "splitting steps; a phase of training comes before each, and one after the last", _require_number
    )
    epochs: int | tuple[int, ...] = _setting(
        "epochs per phase; or those of every phase, the last for all further ones: 1,1,1,6", _require_epochs
    )
    batch_size: int = _setting("samples per training batch", require.count)
    train_samples: int | None = _setting("training samples to use; all by default", require.count)
    test_samples: int | None = _setting("test samples to use; all by default", require.count)
    optimizer: str = _setting("optimizer: sgd or adam", _one_of("sgd", "adam"), "sgd")
    learning_rate: float = _setting("learning rate at the start of a phase", require.positive, 0.1)
    momentum: float = _setting("momentum of sgd", require.below_one, 0.9)
    weight_decay: float = _setting("weight decay of everything except BatchNorm and biases", require.not_negative, 1e-4)
    schedule: str = _setting(
        "learning rate schedule: step, cosine or constant", _one_of("step", "cosine", "constant"), "step"
    )
    schedule_over: str = _setting(
        "what the schedule spans: every phase, or the whole run", _one_of("phase", "run"), "phase"
    )
    plateau: float | None = _setting(
        "end a phase when its loss falls by less than this share of itself within 3 epochs", require.positive
    )
    gradient_plateau: float | None = _setting(
        "end a phase when the norm of the gradient, averaged over an epoch, is at most this", require.positive
    )
    decay_at: tuple[float, ...] = _setting(
        "when the step schedule decays, as shares of the epochs", _each(_require_share_of_epochs), (0.5, 0.75)
    )
    decay: float = _setting("factor of the step schedule", require.positive, 0.1)
    warmup: float = _setting(
        "epochs over which the learning rate rises from 0 at the start of a phase", require.not_negative, 0.0
    )
    label_smoothing: float = _setting("label smoothing of the training loss", require.below_one, 0.0)
    eps: float | str = _setting(
        "size of a split: a length, a share of the filter's length (relative:0.3), or search", _require_eps, 0.01
    )
    new_filters: str | None = _setting(
        "filters to add, which compete with splits: random, firefly or gradmax; none by default", _one_of(*KINDS)
    )
    curvature: str = _setting(
        "curvature of the splitting matrix: exact, or paper (first activation alone)",
        _one_of("exact", "paper"),
        "exact",
    )
    m: int | str = _setting(
        "copies that a neuron is split into: 2, 3 or 4; knapsack chooses for every neuron, within a budget",
        _require_copies,
        2,
    )
    theorem: str = _setting(
        "the gain of three copies: true, or paper (its Theorem 2, which misses a scheme)",
        _one_of("true", "paper"),
        "true",
    )
    c: float = _setting("bound on the sum of the absolute weights of the copies; 1 is S2D", _require_bound, 1.3)
    fraction: float | None = _setting("share of the filters to split per step", require.share)
    macs: tuple[int, ...] | None = _setting(
        "instead of fraction: the MACs that each step may grow to", _each(require.count)
    )
    params: tuple[int, ...] | None = _setting(
        "instead of fraction: the parameters that each step may grow to", _each(require.count)
    )
    milliseconds: tuple[float, ...] | None = _setting(
        "instead of fraction: the milliseconds that a forward pass of 16 samples may take after each step; wider "
        "networks are timed here, before each step",
        _each(require.positive),
    )
    growth: float | None = _setting(
        "instead of fraction: the factor by which the cost of the network may grow in each step", _require_growth
    )
    cost: str = _setting(
        "with growth: the cost that grows: macs, params, or time (of a forward pass of 16 samples, measured here)",
        _one_of("macs", "params", "time"),
        "macs",
    )
    top_k: int | None = _setting("instead of fraction: how many filters each step splits", require.count)
    threshold: float = _setting("a filter is split only if its gain is below minus this", require.not_negative, 0.0)
    relax: bool = _setting(
        "with a budget: the linear relaxation of the selection, as in the paper", _require_truth, False
    )
    solver: str = _setting(
        "eigensolver: auto, lanczos, exact, or rayleigh (the paper's descent)",
        _one_of("auto", "lanczos", "exact", "rayleigh"),
        "auto",
    )
    prune_to: float = _setting(
        "methods that prune: the share of the full network's MACs that is left at the end", require.share, 0.5
    )
    penalty: float = _setting(
        "methods bn and morphnet: factor of the penalty on BatchNorm scales in training", require.positive, 1e-4
    )
    width_multiplier: float = _setting(
        "methods full and those that prune: factor of the recipe's full widths", require.positive, 1.0
    )
    split_samples: int | str | None = _setting(
        "training samples for computing the splitting matrices; auto takes more until fresh data keep no more of the "
        "promised gain, within half of the time of training",
        _require_samples,
    )
    split_share: float | None = _setting("instead of split_samples: the share of the training set", require.share)
    split_time: float | None = _setting(
        "instead of split_samples: the share of an epoch's time that a split may take", require.share
    )
    split_batch: int = _setting("samples per batch for splitting", require.count, 256)
    memory_budget: str | None = _setting(
        "memory for the splitting operators, such as 4GiB; no limit by default", as_bytes
    )
    rows_per_sample: int = _setting(
        "random positions of every sample and layer that the splitting matrices are computed on; 0 takes all",
        _require_number,
        64,
    )
    tol: float | None = _setting(
        "accuracy of eigenpairs, relative to the spectral radius; by default the noise of the data decides",
        require.positive,
    )

    def __post_init__(self) -> None:
        """Check every setting, alone and together with the others.

        Raises:
            ValueError: a setting is bad; the message names it, its value and what it must be.
        """
        for one in fields(self):
            value = getattr(self, one.name)
            if "demand" in one.metadata and not (value is None and "None" in str(one.type)):
                one.metadata["demand"](one.name, value)
        self._check_together()

    def _check_together(self) -> None:
        """Raise ValueError if settings contradict each other."""
        if len(self.widths) != len(self.full_widths):
            raise ValueError(f"widths must be {len(self.full_widths)} positive integers, got {self.widths!r}")
        given = [name for name in SPLIT_DATA if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(SPLIT_DATA)}; got {', '.join(given) or 'none'}")
        if isinstance(self.split_samples, int) and self.split_samples % self.split_batch:
            raise ValueError(
                f"split_samples must be a multiple of split_batch, got {self.split_samples} and {self.split_batch}"
            )
        given = [name for name in AMOUNTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(AMOUNTS)}; got {', '.join(given) or 'none'}")
        if (self.m == "knapsack" or self.relax) and not self.has_budget:
            raise ValueError(f"m knapsack and relax need a budget: {', '.join(BUDGETS)}")
        if self.cost != "macs" and self.growth is None:
            raise ValueError(f"cost {self.cost} has no effect without growth, the factor of each step")
        self.learning_rates()
        for name in ("macs", "params", "milliseconds"):
            budgets = getattr(self, name)
            if budgets is not None and len(budgets) < self.steps:
                raise ValueError(f"{name} must have an entry for each of the {self.steps} steps, got {len(budgets)}")

    @classmethod
    def settings(cls) -> dict[str, tuple[str, str]]:
        """Return the settings that may be overridden: name -> (type, help)."""
        return {f.name: (str(f.type), f.metadata["help"]) for f in fields(cls) if "help" in f.metadata}

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """Return the recipe with some settings changed.

        Settings that are alternatives, such as fraction and macs, replace each other.

        Raises:
            ValueError: there is no such setting, or its value is bad.
        """
        changed = dict(settings)
        for name, value in changed.items():
            if name not in self.settings():
                raise ValueError(f"{name!r} is not a setting of a recipe; use one of {', '.join(self.settings())}")
            if isinstance(value, list):
                changed[name] = tuple(value)
        for alternatives in (AMOUNTS, SPLIT_DATA):
            if any(changed.get(name) is not None for name in alternatives):
                changed = dict.fromkeys(alternatives) | changed
        if self.growth is not None and changed.get("growth", self.growth) is None:
            # The cost belongs to the growth that goes.
            changed = {"cost": "macs"} | changed
        return replace(self, **changed)

    def as_settings(self) -> dict[str, Any]:
        """Return the settings as plain data, which `with_settings` accepts."""
        every = asdict(replace(self, data_options={}))
        return {name: every[name] for name in self.settings()}

    @property
    def has_budget(self) -> bool:
        """Whether the cost of the network after a step is bounded."""
        return any(getattr(self, name) is not None for name in BUDGETS)

    @property
    def is_timed(self) -> bool:
        """Whether that cost is the time of a forward pass."""
        return self.milliseconds is not None or (self.growth is not None and self.cost == "time")

    def epochs_of(self, phase: int) -> int:
        """Return the epochs of a phase."""
        return self.epochs if isinstance(self.epochs, int) else self.epochs[min(phase, len(self.epochs) - 1)]

    @property
    def all_epochs(self) -> int:
        """The epochs of all phases together."""
        return sum(map(self.epochs_of, range(self.steps + 1)))

    def learning_rates(self) -> schedules.Schedule:
        """Return the learning rate schedule of a phase, or of the whole run.

        Raises:
            ValueError: phases have different lengths, and the schedule spans one of them.
        """
        if self.schedule_over == "run":
            span = self.all_epochs
        else:
            span = self.epochs_of(0)
            if any(self.epochs_of(phase) != span for phase in range(self.steps + 1)) and self.schedule != "constant":
                raise ValueError(
                    f"schedule {self.schedule!r} spans a phase, but phases have {self.epochs!r} epochs; give "
                    "schedule_over run, or schedule constant"
                )
        plain = {
            "step": lambda: schedules.step_decay(span, self.decay_at, self.decay),
            "cosine": lambda: schedules.cosine(span),
            "constant": schedules.constant,
        }[self.schedule]()
        return schedules.warmed_up(plain, self.warmup)

    def plateaus(self) -> Plateau | None:
        """Return what ends a phase early, if anything does."""
        if self.plateau is None and self.gradient_plateau is None:
            return None
        return Plateau(self.plateau, self.gradient_plateau)

    def full(self) -> tuple[int, ...]:
        """Return the full widths times the width multiplier."""
        return tuple(max(1, round(self.width_multiplier * width)) for width in self.full_widths)

    def may_split(self, unit: str) -> bool:
        """Return whether the recipe splits a unit of this name."""
        return re.fullmatch(self.splittable, unit) is not None
