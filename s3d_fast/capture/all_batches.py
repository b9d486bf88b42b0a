"""Capture: one forward and backward pass per batch gives the splitting operators of all units."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from s3d_fast.base import byte_counts, require
from s3d_fast.base.batches import length_of
from s3d_fast.capture.budget import CapturePlan, UnitNeed, decide, fits_as_it_comes, half_error, scratch_folder
from s3d_fast.capture.curvature import FLOOR, Curvature
from s3d_fast.capture.one_batch import BatchCapture, Capturer
from s3d_fast.capture.sampling import Sampling
from s3d_fast.network.graph import Graph, Unit, stored_tensors
from s3d_fast.network.sharding import gather_into, is_sharded
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.network.wrapping import inside
from s3d_fast.operators import DenseOperator, SplittingOperator, averaged
from s3d_fast.operators.operator import LayerShape
from s3d_fast.operators.streamed import DiskStream, RecomputedStream, Stream, StreamedOperator, UnitOperators, shell

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Captured(dict[str, SplittingOperator]):
    """The splitting operator of every captured unit, by name.

    Attributes:
        loss: the average loss over the batches.
        plan: what is kept of every unit, and where; None without a budget.
        stream: reads units again at every step; None if all units are in memory.
        layers: the shape of each unit's weight, and whether it has a bias; not for units of several weights.
    """

    loss: float = float("nan")
    plan: CapturePlan | None = None
    stream: Stream | None = None
    layers: Mapping[str, LayerShape] = {}

    def memory(self) -> dict[str, int]:
        """Return the bytes that each unit's operator holds in memory."""
        return {name: operator.nbytes for name, operator in self.items()}

    @property
    def nbytes(self) -> int:
        """The bytes that all operators hold in memory, including the loaded parts of a scratch file."""
        return sum(self.memory().values()) + (0 if self.stream is None else self.stream.nbytes)

    def report(self) -> str:
        """Return a text with the plan, and with what its passes over the data have cost so far."""
        if self.plan is None:
            return f"Everything is in memory: {byte_counts.as_text(self.nbytes)}."
        lines = [str(self.plan)]
        if self.stream is not None:
            passes = f"{self.stream.passes} passes over {self.stream.batches} batches"
            lines.append(f"So far: {passes}, {self.stream.seconds:.3g} s of waiting for them.")
        return "\n".join(lines)


def capture(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    graph: Graph,
    *,
    units: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    curvature: str = "exact",
    eps: float = 0.01,
    relative: bool = False,
    floor: float = FLOOR,
    sharpness: float | None = None,
    rows_per_sample: int | None = None,
    memory_budget: int | str | None = None,
    scratch: str | os.PathLike[str] | bool = True,
    progress: bool = False,
) -> Captured:
    """Return the splitting operators of a model's units on some data, averaged over the batches.

    Every batch costs one forward pass and the part of a backward pass that reaches the units; no gradient of a
    parameter is formed. The model is in eval mode meanwhile. Afterwards it is exactly as before, even after an error:
    modes, gradients, buffers, hooks, random state.

    Args:
        model: the model that was traced. If `fully_shard` has divided it, every process must call this: the values are
            gathered into the graph's whole copy.
        loss_fn: either `loss_fn(model, batch)`, which must call the model it is given; or `loss_fn(output, target)`,
            where a batch is a pair (input, target) and the input is a tensor or a tuple or list of arguments. The name
            of the first parameter decides: "model", "net", "network" or "module" mean the former.
        batches: batches of equal size, since all have the same weight.
        graph: the graph of the model as it is now, from `trace`.
        units: names of the units to capture; all by default.
        dtype: the dtype in which rows and coefficients are kept: float32, float64 or bfloat16. By default they are kept
            as they come.
        curvature: "exact" counts every activation and maximum between a unit's filters and the layers that read its
            channels, with kinks at the scale of the step. "paper" counts the first activation alone, and a softplus of
            sharpness 3 stands in for kinks.
        eps: the step that `apply_splits` will make. Kinks, as of a ReLU, and ties of maxima have curvature only at the
            scale of a step; smooth activations do not depend on it.
        relative: whether eps is relative to the length of the filter.
        floor: the least bandwidth of kinks and ties, in units of the filter's length. The default predicts the loss on
            these very batches best; 0.02, which `Grower` uses, chooses splits that gain more on fresh data.
        sharpness: the sharpness of the softplus that stands in for kinks, in place of the scale of the step.
        rows_per_sample: keep so many random positions of every sample and layer, weighted such that the expectation of
            S stays the same; None keeps all. 64, which `Grower` uses, lose little and save most of the time on large
            maps: more samples are worth more than more positions. Behind depthwise layers and pools, positions are
            drawn in tiles. EdgeConv layers, maxima over whole maps or with padding, and general chains keep all.
        memory_budget: the bytes that the operators may hold in memory, as a number or as a string such as "4GiB". Small
            matrices are formed. The other units keep their rows and coefficients as they come, in bfloat16, in a
            scratch file, or not at all: the first of these that fits. `Captured.report()` shows the choice. With a
            budget, the batches must have a length, and be the same in every pass.
        scratch: the folder of the scratch file, by default the system's folder for temporary files, which on some
            machines is in memory. False forbids a scratch file.
        progress: show a bar over the batches.

    Raises:
        ValueError: no batches, an unknown unit, a stale graph, a budget that is too small for one batch, or a loss or
            gradient that is not finite; the message names the batch and the unit.
    """
    model = inside(model)
    if is_sharded(model):
        if graph.model is None:
            raise ValueError("graph must come from `trace`")
        gather_into(graph.model, model)
        model = graph.model
    chosen = _choose(graph, units)
    graph.check_same(model)
    if graph.module.meta.get("lost_regions"):
        raise ValueError(
            "the model writes into views of tensors, and switches gradients off in parts of its code; torch.export "
            "loses where. Write one of the two differently, or use capture_layers"
        )
    if graph.module.meta.get("functions"):
        raise ValueError(
            f"the model uses {', '.join(graph.module.meta['functions'])}, whose backward pass torch.export loses; use "
            "capture_layers"
        )
    sampling = None if rows_per_sample is None else Sampling(rows_per_sample)
    capturer = BatchCapture(model, loss_fn, graph, Curvature(curvature, eps, relative, sharpness, floor), sampling)
    captured = capture_with(capturer, chosen, batches, dtype, memory_budget, scratch, progress)
    stored = stored_tensors(model)
    alone = [unit for unit in chosen if len(unit.filters) == 1]
    captured.layers = {unit.name: _layer_shape(stored[unit.weight], unit) for unit in alone}
    return captured


def _layer_shape(weight: Tensor, unit: Unit) -> LayerShape:
    return LayerShape(tuple(weight.shape), unit.row_axis, unit.bias is not None)


def capture_with(
    capturer: Capturer,
    chosen: Sequence[Any],
    batches: Iterable[Any],
    dtype: torch.dtype | None,
    memory_budget: int | str | None,
    scratch: str | os.PathLike[str] | bool,
    progress: bool,
) -> Captured:
    """Return the operators that a capturer of single batches makes of all batches; see `capture`."""
    model = capturer.model
    if dtype is not None:
        require.choice("dtype", dtype, DTYPES)
    keeper, budget = _Keeper(), None
    if memory_budget is not None:
        budget = byte_counts.as_bytes("memory_budget", memory_budget)
        if dtype is not None:
            raise ValueError("dtype and memory_budget cannot be given together: the budget decides on the dtype")
        count = _count(batches)
    losses: list[float] = []
    # tqdm would begin a pass over the batches when it is made, and another one when it is used.
    once = (batch for batch in batches)
    bar = tqdm(once, desc="capture", total=length_of(batches), unit="batch", disable=not progress)
    with undisturbed(model):
        for index, batch in enumerate(bar):
            if budget is not None and index == 0:
                first = _measured(capturer, batch, chosen, count, budget)
                plan = decide(first.needs, count, budget, first.seconds, scratch)
                keeper = _Keeper(plan, scratch, _recapture(capturer, batches, chosen))
                if first.operators:
                    losses.append(first.loss)
                    while first.operators:
                        keeper.keep(*first.operators.popitem())
                    continue
            losses.append(capturer(batch, index, chosen, keeper.keep, dtype))
    if not losses:
        raise ValueError("batches must hold at least one batch, got none")
    if keeper.plan is not None and len(losses) != keeper.plan.batches:
        raise ValueError(f"batches have a length of {keeper.plan.batches}, and there were {len(losses)}")
    captured = Captured({unit.name: keeper.operator(unit.name, len(losses)) for unit in chosen})
    captured.loss = sum(losses) / len(losses)
    captured.plan, captured.stream = keeper.plan, keeper.stream
    return captured


def plan_capture(
    graph: Graph,
    batch: Any,
    n_batches: int,
    memory_budget: int | str | None = None,
    *,
    units: Sequence[str] | None = None,
    curvature: str = "exact",
    eps: float = 0.01,
    rows_per_sample: int | None = None,
    scratch: str | os.PathLike[str] | bool = True,
) -> CapturePlan:
    """Return the plan of a capture of `n_batches` batches like this one: what is kept, where, and the expected time.

    It captures this one batch, with a substitute for the loss, and measures time and memory. Print the plan to read it.

    Args:
        graph: from `trace`.
        batch: (input, target), as for `capture`, or the input alone.
        n_batches: the number of such batches.
        memory_budget: as for `capture`.
        units: names of the units to capture; all by default.
        curvature, eps, rows_per_sample, scratch: as for `capture`.

    Raises:
        ValueError: an unknown unit, or a budget that is too small for one batch.
    """
    require.count("n_batches", n_batches)
    budget = None if memory_budget is None else byte_counts.as_bytes("memory_budget", memory_budget)
    pair = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
    if graph.model is None:
        raise ValueError("graph must come from `trace`")
    sampling = None if rows_per_sample is None else Sampling(rows_per_sample)
    capturer = BatchCapture(graph.model, _stand_in_loss, graph, Curvature(curvature, eps), sampling)
    first = _measured(capturer, pair, _choose(graph, units), n_batches, budget)
    return decide(first.needs, n_batches, budget, first.seconds, scratch)


def _stand_in_loss(output: Any, target: Any) -> Tensor:
    loss: Tensor = output.float().square().mean()
    return loss


class _Keeper:
    """Keeps the operators of all batches according to a plan."""

    def __init__(
        self,
        plan: CapturePlan | None = None,
        scratch: str | os.PathLike[str] | bool = False,
        recapture: Callable[[Collection[str]], Iterator[UnitOperators]] | None = None,
    ) -> None:
        self.plan = plan
        self.terms: dict[str, list[SplittingOperator]] = {}
        self.sums: dict[str, Tensor] = {}
        self.like: dict[str, SplittingOperator] = {}
        self.sizes: dict[str, Tensor] = {}
        self.stream: Stream | None = None
        places = set() if plan is None else set(plan.places.values())
        if plan is not None and "disk" in places:
            self.stream = DiskStream(scratch_folder(scratch), plan.part_bytes)
        elif plan is not None and recapture is not None and "recompute" in places:
            self.stream = RecomputedStream(recapture, plan.batches)

    def keep(self, name: str, operator: SplittingOperator) -> None:
        """Keep the operator of a unit on one batch."""
        if self.plan is None:
            self.terms.setdefault(name, []).append(operator)
            return
        place = self.plan.places[name]
        size = operator.magnitude() if place != "memory" else None
        if size is not None:
            # Added up in place: many small tensors between large ones would fragment the memory.
            self.sizes.setdefault(name, torch.zeros_like(size)).add_(size)
        if place == "dense":
            if name not in self.sums:
                shape = (*operator.shape, operator.shape[1])
                self.sums[name] = torch.zeros(shape, dtype=operator.dtype, device=operator.device)
            operator.add_dense(self.sums[name], 1 / self.plan.batches)
            return
        stored = operator.stored_as(self.plan.dtype)
        if place == "memory":
            self.terms.setdefault(name, []).append(stored)
            return
        self.like.setdefault(name, shell(stored))
        if isinstance(self.stream, DiskStream):
            self.stream.append(name, stored)

    def operator(self, name: str, batches: int) -> SplittingOperator:
        """Return the operator of a unit, averaged over the batches."""
        size = self.sizes[name] / batches if name in self.sizes else None
        if name in self.sums:
            return DenseOperator(self.sums[name], size)
        if name in self.terms:
            # Free the batches one unit at a time: stacking copies them.
            return averaged(self.terms.pop(name))
        assert self.stream is not None
        self.stream.batches = batches
        like = self.like[name]
        rows = None if like.rows is None else like.rows * batches
        return StreamedOperator(self.stream, name, like, rows, size)


def _recapture(
    capturer: Capturer, batches: Iterable[Any], units: Sequence[Any]
) -> Callable[[Collection[str]], Iterator[UnitOperators]]:
    """Return a function that captures given units on all batches again; it raises if the model has changed."""
    state = [*capturer.model.parameters(), *capturer.model.buffers()]
    versions = [tensor._version for tensor in state]

    def recapture(names: Collection[str]) -> Iterator[UnitOperators]:
        capturer.check()
        if [tensor._version for tensor in state] != versions:
            raise ValueError("the model has changed since it was captured; capture it again")
        chosen = [unit for unit in units if unit.name in names]
        for index, batch in enumerate(batches):
            operators: dict[str, SplittingOperator] = {}
            with undisturbed(capturer.model):
                capturer(batch, index, chosen, operators.__setitem__)
            yield list(operators.items())

    return recapture


def _count(batches: Iterable[Any]) -> int:
    count = length_of(batches)
    if count is None or isinstance(batches, Iterator):
        raise ValueError("batches must have a length and be iterable more than once with memory_budget, as a list is")
    return count


@dataclass
class _Measured:
    """A batch that was captured in order to plan: the needs of its units, the seconds it took, its loss.

    `operators` is empty unless the operators of all batches fit into the budget as they come.
    """

    needs: list[UnitNeed]
    seconds: float
    loss: float
    operators: dict[str, SplittingOperator]


def _measured(capturer: Capturer, batch: Any, units: Sequence[Any], batches: int, budget: int | None) -> _Measured:
    needs: list[UnitNeed] = []
    operators: dict[str, SplittingOperator] = {}
    timed = 0.0

    def measure(name: str, operator: SplittingOperator) -> None:
        nonlocal timed
        began = time.perf_counter()
        with torch.no_grad():
            needs.append(UnitNeed.of(name, operator, batches))
            operators[name] = operator
            if not fits_as_it_comes(needs, batches, budget):
                # Measure the units before this one too. Each is measured once: its operator is then dropped.
                for index, need in enumerate(needs):
                    if need.name in operators:
                        needs[index] = replace(need, half_error=half_error(operators.pop(need.name)))
        timed += time.perf_counter() - began

    began = time.perf_counter()
    with undisturbed(capturer.model):
        loss = capturer(batch, 0, units, measure)
    return _Measured(needs[::-1], time.perf_counter() - began - timed, loss, operators)


def _choose(graph: Graph, units: Sequence[str] | None) -> list[Unit]:
    """Return the units to capture: those that are named, or all whose splitting matrices can be computed.

    Raises:
        ValueError: a name is no unit, its matrices cannot be computed, or nothing is left.
    """
    if units is None:
        chosen = graph.captured()
    else:
        for name in units:
            if name not in graph.units:
                raise ValueError(f"units: {name!r} is not a unit of this graph, which has {', '.join(graph.units)}")
            if graph.units[name].uncaptured:
                raise ValueError(f"units: {name!r} cannot be captured: {graph.units[name].uncaptured}")
        chosen = [graph.units[name] for name in dict.fromkeys(units)]
    if not chosen and units is None:
        raise ValueError("the model has nothing to split that could be captured; print(graph.explain()) says why")
    return chosen
