"""The plan of a capture, made before it begins: what is kept, where, and what that costs."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from s3d_fast.base.byte_counts import as_text
from s3d_fast.base.tables import text_table
from s3d_fast.base.world import local_processes
from s3d_fast.operators import SplittingOperator
from s3d_fast.operators.cost import expected_steps, forming_products, prefers_exact

PLACES = {
    "dense": "the matrices themselves, added up batch by batch",
    "memory": "rows and coefficients in memory",
    "disk": "rows and coefficients in a scratch file, read at every step",
    "recompute": "nothing: every step captures all batches again",
}
# The tolerance for comparing the cost of forming S with Lanczos. The solver's own is not known yet.
TOL = 1e-2
# Coefficients of both signs cancel, and the rest may be as small as their rounding errors. bfloat16 is therefore used
# only if the products of the first batch change by at most this, relatively.
HALF_TOLERANCE = 1e-3
# The share of the free disk space that a scratch file may take.
DISK_SHARE = 0.9


@dataclass(frozen=True)
class UnitNeed:
    """The memory and time that the operator of a unit on one batch needs."""

    name: str
    filters: int
    width: int  # D
    rows: int | None
    evaluations: int  # per filter: samples times positions
    nbytes: int  # as it comes
    float_bytes: int  # the part of nbytes that bfloat16 would halve
    half_error: float | None  # the error of a product in bfloat16, see `half_error`; None if not measured
    wants_dense: bool
    forming: float  # the number of products that take as long as forming the matrices
    seconds: float  # per product

    @classmethod
    def of(cls, name: str, operator: SplittingOperator, batches: int) -> UnitNeed:
        """Return the need of an operator on one of `batches` batches; costs one or two products."""
        tensors = [value for value in vars(operator).values() if isinstance(value, torch.Tensor)]
        floats = sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.float32)
        dense = operator.rows is not None and prefers_exact(operator, TOL, rows=operator.rows * batches)
        V = _test_vectors(operator)
        if operator.device.type != "cpu":
            # The first product on a GPU compiles the kernels and tunes their options.
            operator.matvec(V)
        began = time.perf_counter()
        # Reading the result waits for a GPU.
        float(operator.matvec(V).sum())
        seconds = time.perf_counter() - began
        evaluations = operator.evaluations
        return cls(
            name=name,
            filters=operator.shape[0],
            width=operator.shape[1],
            rows=operator.rows,
            evaluations=evaluations,
            nbytes=operator.nbytes,
            float_bytes=floats,
            half_error=None,
            wants_dense=dense,
            forming=forming_products(operator),
            seconds=seconds,
        )

    @property
    def dense_bytes(self) -> int:
        """The bytes of all filters' matrices in float32."""
        return 4 * self.filters * self.width**2

    @property
    def forming_seconds(self) -> float:
        """The expected time of adding up the matrices of one batch."""
        return self.seconds * self.forming

    def stored_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of a batch, stored in a dtype; None means as it comes."""
        return self.nbytes - (self.float_bytes // 2 if dtype is torch.bfloat16 else 0)


def half_error(operator: SplittingOperator) -> float:
    """Return the relative change of a product when rows and coefficients are bfloat16; the worst filter counts."""
    V = _test_vectors(operator)
    product = operator.matvec(V)
    change = (operator.stored_as(torch.bfloat16).matvec(V) - product).norm(dim=-1)
    return float((change / product.norm(dim=-1).clamp(min=1e-30)).max())


def _test_vectors(operator: SplittingOperator) -> torch.Tensor:
    V = torch.randn(operator.shape, dtype=operator.dtype, generator=torch.Generator().manual_seed(0))
    return V.to(operator.device)


@dataclass(frozen=True)
class CapturePlan:
    """The plan of a capture: what it keeps of every unit, and where.

    Attributes:
        needs: the need of every unit on one batch.
        places: the place of every unit, one of `PLACES`.
        dtype: the dtype of stored rows and coefficients; None means as they come.
        batches: the number of batches.
        budget: the budget in bytes, or None.
        batch_seconds: the measured time of capturing a batch.
        part_bytes: the size of a part of the scratch file; two parts are in memory at a time.
    """

    needs: tuple[UnitNeed, ...]
    places: dict[str, str]
    dtype: torch.dtype | None
    batches: int
    budget: int | None
    batch_seconds: float
    part_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """The bytes that are kept in memory."""
        dense = sum(need.dense_bytes for need in self._at("dense"))
        batch = sum(need.stored_bytes(self.dtype) for need in self._at("recompute"))
        return dense + self.batches * self._stored("memory") + 2 * self.part_bytes + batch

    @property
    def disk_bytes(self) -> int:
        """The size of the scratch file."""
        return self.batches * self._stored("disk")

    @property
    def flops_per_step(self) -> int:
        """The flops of one product S v for all filters: 4 N D M, or 2 M D^2 where S is formed."""
        total = 0
        for need in self.needs:
            if self.places[need.name] == "dense":
                total += 2 * need.filters * need.width**2
            else:
                total += 4 * need.evaluations * self.batches * need.width * need.filters
        return total

    @property
    def capture_seconds(self) -> float:
        """The expected time of the capture, including forming matrices."""
        forming = sum(need.forming_seconds for need in self._at("dense"))
        return self.batches * (self.batch_seconds + forming)

    @property
    def step_seconds(self) -> float:
        """The expected time of one product for all filters, excluding reads from the disk."""
        stored = sum(need.seconds for need in self.needs if self.places[need.name] != "dense")
        again = self.batch_seconds if any(place == "recompute" for place in self.places.values()) else 0.0
        return self.batches * (stored + again)

    @property
    def solve_seconds(self) -> float:
        """The expected time of all steps of the solver, at a tolerance of 1e-2."""
        steps = [expected_steps(need.width, TOL) for need in self.needs if self.places[need.name] != "dense"]
        return max(steps, default=0.0) * self.step_seconds

    def _at(self, place: str) -> list[UnitNeed]:
        return [need for need in self.needs if self.places[need.name] == place]

    def _stored(self, place: str) -> int:
        return sum(need.stored_bytes(self.dtype) for need in self._at(place))

    def __str__(self) -> str:
        rows = [["unit", "M", "D", "rows", "kept", "bytes"]]
        for need in self.needs:
            place = self.places[need.name]
            amount = need.dense_bytes if place == "dense" else self.batches * need.stored_bytes(self.dtype)
            count = str(need.evaluations * self.batches)
            shown = "-" if place == "recompute" else as_text(amount)
            rows.append([need.name, str(need.filters), str(need.width), count, place, shown])
        kept = "as they come" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        budget = "no budget" if self.budget is None else f"a budget of {as_text(self.budget)}"
        lines = [
            text_table(rows),
            *(f"{place}: {PLACES[place]}" for place in PLACES if place in self.places.values()),
            f"{as_text(self.memory_bytes)} in memory of {budget}, {as_text(self.disk_bytes)} on disk; "
            f"rows and coefficients {kept}.",
            f"Expected: {self.capture_seconds:.3g} s for the capture of {self.batches} batches, "
            f"{self.flops_per_step / 1e9:.3g} GFLOP and {self.step_seconds:.3g} s for a step of the solver, "
            f"{self.solve_seconds:.3g} s for all of them.",
        ]
        return "\n".join(lines)


def decide(
    needs: Sequence[UnitNeed],
    batches: int,
    budget: int | None,
    batch_seconds: float,
    scratch: str | os.PathLike[str] | bool = True,
) -> CapturePlan:
    """Choose where rows are kept: the first that fits of memory as they come, memory in bfloat16, disk, not at all.

    Matrices that are smaller than their rows, and cheaper to form than Lanczos, are formed instead. Rows that are not
    kept are computed again at every step.

    Raises:
        ValueError: not even one batch fits into the budget.
    """
    if budget is None:
        return CapturePlan(tuple(needs), {need.name: "memory" for need in needs}, None, batches, None, batch_seconds)
    formed, left = _formed(needs, batches, budget)
    rest = [need for need in needs if need.name not in formed]
    places = {need.name: "dense" if need.name in formed else "memory" for need in needs}
    errors = [math.inf if need.half_error is None else need.half_error for need in rest]
    half = torch.bfloat16 if all(error <= HALF_TOLERANCE for error in errors) else None
    for dtype in (None, half):
        if batches * sum(need.stored_bytes(dtype) for need in rest) <= left:
            return CapturePlan(tuple(needs), places, dtype, batches, budget, batch_seconds)
    batch = sum(need.stored_bytes(half) for need in rest)
    on_disk, largest = batches * batch, max(need.stored_bytes(half) for need in rest)
    if scratch is not False and on_disk <= DISK_SHARE * free_bytes(scratch) and 2 * largest <= left:
        places = {name: "disk" if place == "memory" else place for name, place in places.items()}
        part = max(largest, min(left // 4, on_disk))
        return CapturePlan(tuple(needs), places, half, batches, budget, batch_seconds, part)
    # Nothing is stored: the operators of one batch at a time are in memory, as they come.
    batch = sum(need.stored_bytes(None) for need in rest)
    if batch > left:
        raise ValueError(
            f"memory_budget is too small: {as_text(left)} of {as_text(budget)} are left for rows, but "
            f"one batch needs {as_text(batch)}; give a larger budget, or smaller batches"
        )
    places = {name: "recompute" if place == "memory" else place for name, place in places.items()}
    return CapturePlan(tuple(needs), places, None, batches, budget, batch_seconds)


def fits_as_it_comes(needs: Sequence[UnitNeed], batches: int, budget: int | None) -> bool:
    """Return whether all rows fit into memory as they come; once this is False, more needs cannot make it True."""
    if budget is None:
        return True
    formed, left = _formed(needs, batches, budget)
    return batches * sum(need.nbytes for need in needs if need.name not in formed) <= left


def _formed(needs: Sequence[UnitNeed], batches: int, budget: int) -> tuple[set[str], int]:
    """Return the units whose matrices are formed, and the rest of the budget."""
    formed, left = set(), budget
    for need in sorted(needs, key=lambda need: need.dense_bytes):
        # At most half of the rest, so that the other units have room for parts.
        if need.wants_dense and need.dense_bytes < batches * need.nbytes and need.dense_bytes <= left // 2:
            formed.add(need.name)
            left -= need.dense_bytes
    return formed, left


def free_bytes(scratch: str | os.PathLike[str] | bool) -> int:
    """Return the disk space for a scratch file: the processes on the machine share the free space equally."""
    return shutil.disk_usage(scratch_folder(scratch)).free // local_processes()


def scratch_folder(scratch: str | os.PathLike[str] | bool) -> str:
    """Return the folder of scratch files: the one given, or the system's folder for temporary files."""
    return tempfile.gettempdir() if isinstance(scratch, bool) else os.fspath(scratch)
