"""Operators whose data are not in memory: every product reads them from a scratch file, or computes them again."""

from __future__ import annotations

import copy
import itertools
import mmap
import os
import tempfile
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from s3d_fast.operators.operator import Provider, SplittingOperator
from s3d_fast.operators.together import matvec_all, moments_of

# Tensors in the file begin at multiples of this, so that vector loads are aligned.
ALIGNMENT = 64
# The dtype in the file, where it differs; indices of points never need 64 bits.
STORED = {torch.int64: torch.int32}

UnitOperators = list[tuple[str, SplittingOperator]]  # operators of some units on one batch each


def shell(operator: SplittingOperator) -> SplittingOperator:
    """Return an operator without its tensors; its shape and settings remain."""
    empty = copy.copy(operator)
    for name, value in vars(operator).items():
        if isinstance(value, Tensor):
            setattr(empty, name, None)
    return empty


class StreamedOperator(SplittingOperator):
    """The splitting matrices of a unit's filters on all batches of a stream."""

    def __init__(
        self, stream: Stream, unit: str, like: SplittingOperator, rows: int | None, size: Tensor | None = None
    ) -> None:
        self.provider, self.unit, self.rows, self.size = stream, unit, rows, size
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.filters: Tensor | None = None

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        return matvec_all([self], [V], backend)[0]

    def restrict(self, filters: Tensor) -> StreamedOperator:
        rest = copy.copy(self)
        rest.filters = filters if self.filters is None else self.filters[filters]
        rest.shape = (len(filters), self.shape[1])
        rest.size = None if self.size is None else self.size[filters]
        return rest

    def magnitude(self) -> Tensor | None:
        return self.size

    def dense(self, backend: str = "auto") -> Tensor:
        assert self.provider is not None
        return self.provider.dense_all([self], backend)[0]

    @property
    def nbytes(self) -> int:
        """Zero: the stream holds the data."""
        return 0


class Stream(Provider):
    """The operators of several units on several batches of equal weight, available one part at a time.

    Attributes:
        batches: the number of batches.
        passes: the number of passes over all batches so far.
        seconds: the time spent waiting for parts.
    """

    def __init__(self) -> None:
        self.batches, self.passes, self.seconds = 0, 0, 0.0

    @property
    def nbytes(self) -> int:
        """The bytes that the stream holds in memory."""
        return 0

    @abstractmethod
    def parts(self, units: Collection[str]) -> Iterator[UnitOperators]:
        """Yield the operators of these units on every batch. A part is valid until the next one is requested."""

    def matvec_all(
        self, operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str
    ) -> list[Tensor]:
        results = [torch.zeros_like(V) for V in vectors]
        for places, terms in self._terms(operators):
            products = matvec_all(terms, [vectors[place] for place in places], backend)
            for place, product in zip(places, products, strict=True):
                results[place].add_(product, alpha=1 / self.batches)
        return results

    def dense_all(self, operators: Sequence[SplittingOperator], backend: str) -> list[Tensor]:
        results = [
            torch.zeros(*operator.shape, operator.shape[1], dtype=operator.dtype, device=operator.device)
            for operator in operators
        ]
        for places, terms in self._terms(operators):
            for place, term in zip(places, terms, strict=True):
                term.add_dense(results[place], 1 / self.batches, backend)
        return results

    def moments_all(
        self, operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str
    ) -> list[Tensor]:
        results = [torch.zeros(3, len(V), dtype=torch.float64, device=V.device) for V in vectors]
        for places, terms in self._terms(operators):
            products = matvec_all(terms, [vectors[place] for place in places], backend)
            for place, product in zip(places, products, strict=True):
                results[place] += moments_of([(vectors[place] * product).sum(-1)])
        return results

    def _terms(self, operators: Sequence[SplittingOperator]) -> Iterator[tuple[list[int], list[SplittingOperator]]]:
        """Yield for every part its operators, restricted to their filters, and their places in `operators`."""
        asked: dict[str, list[tuple[int, Tensor | None]]] = {}
        for place, operator in enumerate(operators):
            assert isinstance(operator, StreamedOperator)
            asked.setdefault(operator.unit, []).append((place, operator.filters))
        parts = self.parts(asked)
        self.passes += 1
        while True:
            began = time.perf_counter()
            part = next(parts, None)
            self.seconds += time.perf_counter() - began
            if part is None:
                return
            chosen = [(place, term, filters) for unit, term in part for place, filters in asked[unit]]
            yield (
                [place for place, _, _ in chosen],
                [term if filters is None else term.restrict(filters) for _, term, filters in chosen],
            )


class RecomputedStream(Stream):
    """Every pass captures all batches again, with a forward and a backward pass per batch."""

    def __init__(self, recapture: Callable[[Collection[str]], Iterator[UnitOperators]], batches: int) -> None:
        super().__init__()
        self.recapture, self.batches = recapture, batches

    def parts(self, units: Collection[str]) -> Iterator[UnitOperators]:
        return self.recapture(units)


@dataclass(frozen=True)
class _Record:
    """Where the tensors of one operator are in the file, and the operator without them."""

    unit: str
    shell: SplittingOperator
    offset: int
    nbytes: int
    tensors: list[tuple[str, int, tuple[int, ...], torch.dtype]]  # attribute, place in the record, shape, dtype


class DiskStream(Stream):
    """Operators in a scratch file that is mapped into memory. A thread reads the next part while one is in use.

    The file has no name, so it vanishes with the process, however that ends. At most two parts are in memory at a time:
    the pages of a part are released when the next part is requested.

    Args:
        folder: the folder of the file.
        part_bytes: the size of a part. A larger operator gets a part of its own.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, part_bytes: int) -> None:
        super().__init__()
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the stream
        weakref.finalize(self, self.file.close)
        self.part_bytes, self.size, self.largest = part_bytes, 0, 0
        self.records: list[_Record] = []
        self.device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """The bytes of two parts of the largest size so far."""
        return 2 * self.largest

    def append(self, unit: str, operator: SplittingOperator) -> None:
        """Write the operator of a unit on one batch to the end of the file.

        Raises:
            OSError: the disk is full.
        """
        offset, tensors = self.size, []
        for name, value in vars(operator).items():
            if isinstance(value, Tensor):
                stored = value.to("cpu", STORED.get(value.dtype, value.dtype)).contiguous()
                tensors.append((name, self.size - offset, tuple(value.shape), value.dtype))
                self._write(stored.flatten().view(torch.uint8))
        # Pad the file to the alignment: the mapping covers all of `size`.
        os.ftruncate(self.file.fileno(), self.size)
        self.device = operator.device
        self.records.append(_Record(unit, shell(operator), offset, self.size - offset, tensors))

    def _write(self, data: Tensor) -> None:
        view, place = memoryview(data.numpy()), self.size  # type: ignore[arg-type]
        while view:
            written = os.pwrite(self.file.fileno(), view, place)
            view, place = view[written:], place + written
        self.size = place + -place % ALIGNMENT

    def parts(self, units: Collection[str]) -> Iterator[UnitOperators]:
        chunks = self._chunks([record for record in self.records if record.unit in units])
        if not chunks:
            return
        self.largest = max(self.largest, *(sum(record.nbytes for record in chunk) for chunk in chunks))
        mapping = mmap.mmap(self.file.fileno(), self.size, access=mmap.ACCESS_COPY)
        mapping.madvise(mmap.MADV_SEQUENTIAL)
        data = torch.frombuffer(mapping, dtype=torch.uint8)
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._read, chunks[0], data)
            for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
                operators = ahead.result()
                if following is not None:
                    ahead = reader.submit(self._read, following, data)
                for record, operator in zip(chunk, operators, strict=True):
                    for name, _, _, dtype in record.tensors:
                        setattr(operator, name, getattr(operator, name).to(self.device, dtype))
                yield [(record.unit, operator) for record, operator in zip(chunk, operators, strict=True)]
                first = chunk[0].offset // mmap.PAGESIZE * mmap.PAGESIZE
                mapping.madvise(mmap.MADV_DONTNEED, first, chunk[-1].offset + chunk[-1].nbytes - first)

    def _chunks(self, records: Sequence[_Record]) -> list[list[_Record]]:
        """Return the records in groups that fit into a part."""
        chunks: list[list[_Record]] = []
        room = 0
        for record in records:
            if record.nbytes > room or not chunks:
                chunks.append([])
                room = self.part_bytes
            chunks[-1].append(record)
            room -= record.nbytes
        return chunks

    def _read(self, chunk: Sequence[_Record], data: Tensor) -> list[SplittingOperator]:
        """Load the pages of a chunk into memory; return its operators with their tensors as stored."""
        operators = []
        for record in chunk:
            operator = copy.copy(record.shell)
            for name, place, shape, dtype in record.tensors:
                stored = STORED.get(dtype, dtype)
                begin = record.offset + place
                own = data[begin : begin + torch.Size(shape).numel() * stored.itemsize]
                if self.device.type == "cuda":
                    own = own.pin_memory()
                else:
                    # Touching a page loads it.
                    own[:: mmap.PAGESIZE].sum()
                setattr(operator, name, own.view(stored).view(shape))
            operators.append(operator)
        return operators
