"""Operators whose data are spread over processes: one all-reduce sums the products of all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from s3d_fast.base.world import World
from s3d_fast.capture.all_batches import Captured
from s3d_fast.operators import Provider, SplittingOperator, dense_all, matvec_all, moments_all


class ShardedOperator(SplittingOperator):
    """The splitting matrices of a unit's filters on the data of all processes; each process holds a part."""

    def __init__(
        self, local: SplittingOperator, provider: AllReduce, rows: int | None, size: Tensor | None = None
    ) -> None:
        self.local, self.provider, self.rows, self.size = local, provider, rows, size
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        return matvec_all([self], [V], backend)[0]

    def restrict(self, filters: Tensor) -> ShardedOperator:
        assert isinstance(self.provider, AllReduce)
        size = None if self.size is None else self.size[filters]
        return ShardedOperator(self.local.restrict(filters), self.provider, self.rows, size)

    def magnitude(self) -> Tensor | None:
        return self.size

    def dense(self, backend: str = "auto") -> Tensor:
        return next(dense_all([self], backend))

    @property
    def nbytes(self) -> int:
        """The bytes that this process's part holds in memory."""
        return self.local.nbytes


class AllReduce(Provider):
    """Sums the results of all processes of a group, each weighted by its share of the data."""

    def __init__(self, share: float, group: dist.ProcessGroup | None = None) -> None:
        self.share, self.group = share, group

    def matvec_all(
        self, operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str
    ) -> list[Tensor]:
        return self.sum(matvec_all(_locals(operators), vectors, backend))

    def dense_all(self, operators: Sequence[SplittingOperator], backend: str) -> list[Tensor]:
        # One layer at a time: all matrices together may be large.
        return [self.sum([matrices.clone()])[0] for matrices in dense_all(_locals(operators), backend)]

    def moments_all(
        self, operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str
    ) -> list[Tensor]:
        # Sums over all batches, whatever the share of a process.
        own = moments_all(_locals(operators), vectors, backend)
        return self.sum([moments / self.share for moments in own])

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the weighted sums over the processes, with one all-reduce per dtype."""
        results: list[Tensor] = [torch.empty(0)] * len(parts)
        for dtype in dict.fromkeys(part.dtype for part in parts):
            places = [place for place, part in enumerate(parts) if part.dtype == dtype]
            flat = torch.cat([parts[place].flatten() for place in places]).mul_(self.share)
            dist.all_reduce(flat, group=self.group)
            for place, piece in zip(places, flat.split([parts[place].numel() for place in places]), strict=True):
                results[place] = piece.view_as(parts[place])
        return results


def sharded(captured: Captured, batches: int, group: dist.ProcessGroup | None = None) -> Captured:
    """Return operators on the data of all processes, each of which has captured a part.

    Every process must call this, and afterwards the solver, with the units of the same model in the same order. One
    all-reduce then sums each product of all layers. All processes get the same numbers, bit for bit, and make the same
    decisions.

    Args:
        captured: the operators on this process's batches.
        batches: the number of these batches; all batches of all processes have the same weight.
        group: the group of processes; all by default.

    Raises:
        ValueError: the processes have captured different units, or units of different shapes.
    """
    shapes = [(name, operator.shape) for name, operator in captured.items()]
    rows = [operator.rows for operator in captured.values()]
    parts = {name: part for name, operator in captured.items() if (part := operator.magnitude()) is not None}
    everyone: list[tuple[object, int, float, list[int | None], set[str]]] = [None] * dist.get_world_size(group)  # type: ignore[list-item]
    dist.all_gather_object(everyone, (shapes, batches, captured.loss, rows, set(parts)), group)
    for rank, (theirs, *_) in enumerate(everyone):
        if theirs != shapes:
            raise ValueError(f"captured must hold the same units in every process, but rank {rank} has others")
    total = sum(count for _, count, *_ in everyone)
    provider = AllReduce(batches / total, group)
    # One process may have formed the matrices of a unit while another has kept its rows.
    shared = [name for name in captured if all(name in theirs for *_, theirs in everyone)]
    sizes = dict(zip(shared, provider.sum([parts[name] for name in shared]), strict=True))
    result = Captured()
    for index, (name, operator) in enumerate(captured.items()):
        counts = [theirs[index] for *_, theirs, _ in everyone]
        all_rows = None if None in counts else sum(count for count in counts if count is not None)
        result[name] = ShardedOperator(operator, provider, all_rows, sizes.get(name))
    result.loss = sum(count * loss for _, count, loss, *_ in everyone) / total
    result.plan, result.stream, result.layers = captured.plan, captured.stream, captured.layers
    return result


def of_all_processes(captured: Captured, batches: int, world: World) -> Captured:
    """Return `sharded` operators; with a single process, the given ones."""
    return captured if world.size == 1 else sharded(captured, batches)


def _locals(operators: Sequence[SplittingOperator]) -> list[SplittingOperator]:
    return [operator.local for operator in operators if isinstance(operator, ShardedOperator)]
