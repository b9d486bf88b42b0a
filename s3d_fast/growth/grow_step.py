"""One step of growth for any training loop: trace, capture, solve, select and split in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from s3d_fast.base.batches import OnDevice, are_the_same, length_of
from s3d_fast.base.losses import takes_model
from s3d_fast.base.world import World, existing
from s3d_fast.growth.split_step import SplitStep
from s3d_fast.growth.step_size import DEFAULT
from s3d_fast.network import costs
from s3d_fast.network.sharding import whole
from s3d_fast.network.tracing import trace
from s3d_fast.network.wrapping import inside, require_rewrappable, rewrap
from s3d_fast.records.record import Phase
from s3d_fast.splitting.optimizers import check_optimizer, unwrap_optimizer
from s3d_fast.splitting.plan import SplitPlan


@dataclass(frozen=True)
class GrowthStep:
    """What `grow_step` did. Print it to read it; it is true if any neuron was split.

    Attributes:
        plan: the splits, with the graph of the model before them.
        loss: the loss on the batches of all processes before the split.
        predicted_change: the predicted change of this loss.
        seconds: the seconds of each stage.
    """

    plan: SplitPlan
    loss: float
    predicted_change: float
    seconds: Mapping[str, float]

    def __bool__(self) -> bool:
        return len(self.plan) > 0

    def __str__(self) -> str:
        taken = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in self.seconds.items())
        return f"{self.plan}\nLoss {self.loss:.4g}, predicted change {self.predicted_change:.3g} ({taken})."


def grow_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example_input: Any = None,
    also: Sequence[nn.Module] = (),
    units: Sequence[str] | None = None,
    eps: float | str = DEFAULT,
    splits: bool = True,
    new_filters: Mapping[str, Any] | None = None,
    curvature: str = "exact",
    solver: Mapping[str, Any] | None = None,
    rows_per_sample: int | None = 64,
    memory_budget: int | str | None = None,
    world: World | None = None,
    progress: bool = False,
    **selection: Any,
) -> GrowthStep:
    """Split the neurons of a model that gain the most, in place, and carry its optimizer along.

    It is `trace`, `capture`, `extremal_eigenpairs`, `select` and `apply_splits`, one after the other. Afterwards train
    on: with the same model, the same optimizer, the same DistributedDataParallel (made anew, see `rewrap`). A model
    that `fully_shard` has divided is gathered meanwhile, and divided again as it was.

    In several processes, every process calls this with batches of its own. All of them make the same splits, which
    are those of all batches together.

    Args:
        model: any model that `trace` takes, also inside DistributedDataParallel, torch.compile and the like.
        loss_fn: as for `capture`.
        batches: some batches of equal size, such as `itertools.islice(loader, 8)`. They are iterated several times and
            kept in memory meanwhile, except objects with a length and `same_every_pass = True`. They are moved to the
            device of the model.
        optimizer: of the model's parameters, also inside Accelerate's wrapper.
        example_input: as for `trace`; by default the input of the first batch.
        also: other models that must grow alike, such as an exponential moving average of the weights.
        units: names of the units that may be split; all by default.
        eps: the size of a split, as for `Grower`.
        splits: whether to split neurons.
        new_filters: add new filters, which compete with splits; options for `propose_filters`.
        curvature: as for `capture`.
        solver: options for `extremal_eigenpairs`; without a tolerance, the noise of the data decides, as in `Grower`.
        rows_per_sample: as for `capture`; None keeps all.
        memory_budget: as for `capture`.
        world: the processes that take part; by default those of the process group that exists, if there is one.
        progress: show bars.
        **selection: options for `select`; by default m=2, c=1.3 and, without `top_k` and `budget`, fraction=0.35.

    Raises:
        ValueError, TypeError: as the five functions do. Model, optimizer and the models in `also` are then as before.
    """
    world = existing() if world is None else world
    if not any(name in selection for name in ("top_k", "fraction", "budget")):
        selection["fraction"] = 0.35
    inner = inside(model)
    require_rewrappable(model)
    optimizer = None if optimizer is None else unwrap_optimizer(optimizer)
    device = next((parameter.device for parameter in inner.parameters()), torch.device("cpu"))
    held: Any = batches if are_the_same(batches) and length_of(batches) is not None else list(batches)
    step = SplitStep(
        loss_fn=loss_fn,
        batches=OnDevice(held, device),
        eps=eps,
        curvature=curvature,
        selection={"m": 2, "c": 1.3, **selection},
        solver={} if solver is None else solver,
        rows_per_sample=rows_per_sample,
        memory_budget=memory_budget,
        units=units,
        plan=None,
        world=world,
        progress=progress and world.is_first,
        also=also,
        measure=False,
        splits=splits,
        new_filters=new_filters,
    )
    with whole(inner, optimizer):
        check_optimizer(optimizer, inner)
        if example_input is None:
            example_input = world.together(lambda: _input_of(step.batches, loss_fn))
        graph = world.together(lambda: trace(inner, example_input))
        step.check(graph)
        params = sum(parameter.numel() for parameter in inner.parameters())
        phase = Phase(0, graph.widths(), params, costs.count(graph).macs)
        plan = step(phase, inner, optimizer, graph, None)
    if len(plan):
        for one in (model, *also):
            rewrap(one)
    return GrowthStep(plan, phase.loss, phase.predicted_change, phase.seconds)


def _input_of(batches: Any, loss_fn: Callable[[Any, Any], Tensor]) -> Any:
    """Return what the model is called with on the first batch.

    Raises:
        ValueError: there is no batch, or a batch does not tell.
    """
    batch = next(iter(batches), None)
    if batch is None:
        raise ValueError("batches must hold at least one batch, got none")
    if isinstance(batch, Mapping) and takes_model(loss_fn):
        return dict(batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return tuple(batch[0]) if isinstance(batch[0], (tuple, list)) else batch[0]
    if isinstance(batch, Tensor):
        return batch
    raise ValueError(
        f"batches must hold pairs (input, target), dicts or tensors, got {type(batch).__name__}; give example_input"
    )
