"""Tables on the device that describe the tensors of many layers, and where one launch finds its layer in them.

A table holds addresses, shapes and strides, as int64; each layer is one row. It is made once for the same tensors, and
every step of a solver uses it again, on any stream.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

# Kernels are compiled for at least this many layers.
LEAST_LAYERS = 32
MOST_TABLES = 64


@triton.jit
def layer_of(table, index, layers, COLUMN: tl.constexpr, ROW: tl.constexpr, LAYERS: tl.constexpr):
    """The table row of the layer that work item `index` belongs to; COLUMN holds the first item of each layer."""
    i = tl.arange(0, LAYERS)
    first = tl.load(table + i * ROW + COLUMN, mask=i < layers, other=index + 1)
    return table + (tl.sum((first <= index).to(tl.int32), 0) - 1) * ROW


def padded_layers(layers: int) -> int:
    """Return the number of layers that a kernel is compiled for."""
    return max(LEAST_LAYERS, triton.next_power_of_2(layers))


class HasEntries(Protocol):
    """A table on the device, and whatever else a launch needs."""

    @property
    def entries(self) -> Tensor: ...


T = TypeVar("T", bound=HasEntries)


class Tables(Generic[T]):
    """The tables that were used last, and those that a CUDA graph reads.

    Nobody tells us when a graph is gone, so its tables stay.
    """

    def __init__(self) -> None:
        self.recent: OrderedDict[Hashable, T] = OrderedDict()
        self.captured: dict[Hashable, T] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable, where: torch.device, make: Callable[[], T]) -> T:
        """Return the table with this key, made if it is not there.

        Raises:
            RuntimeError: it is not there, and a CUDA graph is being captured: copying a table has to be waited for.
        """
        is_captured = where.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            if key in self.captured:
                return self.captured[key]
            if key in self.recent:
                self.recent.move_to_end(key)
                if is_captured:
                    self.captured[key] = self.recent.pop(key)
                    return self.captured[key]
            elif is_captured:
                raise RuntimeError("make this call once with these tensors before a CUDA graph captures it")
            else:
                self.recent[key] = make()
            if len(self.recent) > MOST_TABLES:
                self.recent.popitem(last=False)
            table = self.recent[key]
        if where.type == "cuda":
            # Once the table is evicted, its memory is not used again before this stream has read it.
            table.entries.record_stream(torch.cuda.current_stream(where))
        return table


def on_device(rows: list[list[int]], where: torch.device) -> Tensor:
    """Return rows that any stream of the device may read from now on, without waiting for work on the device."""
    table = torch.tensor(rows, dtype=torch.int64)
    if where.type != "cuda":
        return table if where.type == "cpu" else table.to(where)
    stream = torch.cuda.Stream(where)
    with torch.cuda.stream(stream):
        copy = table.pin_memory().to(where, non_blocking=True)
    # Only the copy is on this stream.
    stream.synchronize()
    return copy
