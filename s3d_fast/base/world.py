"""The processes of one run, as torchrun starts them. A single process has the same methods."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Value = TypeVar("Value")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """All processes of a run, seen from one of them.

    Attributes:
        rank: the rank of this process, from 0.
        size: the number of processes.
        device: where this process computes, and where numbers are summed over the processes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """The shard of the data that this process reads: (rank, size)."""
        return self.rank, self.size

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to train: its gradients are averaged over all processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)

    def level(self, model: nn.Module) -> None:
        """Copy the first process's buffers to all processes.

        Running statistics differ between processes, since each trains on its own samples.
        """
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each number over all processes."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def agree(self, number: int) -> bool:
        """Return whether a number is the same in all processes."""
        total, squares = self.sum(number, number * number)
        return self.size * squares == total * total

    def same(self, value: Value) -> Value:
        """Return the first process's value, in all processes."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, 0)
        return held[0]

    def wait(self) -> None:
        """Return once all processes have called this."""
        if self.size > 1:
            dist.barrier()


ALONE = World()


@contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun has started: NCCL on GPUs, gloo on CPUs. Without torchrun, yield one process.

    If a process ends with an error, the others wait until torchrun ends them.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()


def local_processes() -> int:
    """Return how many processes of this run share the machine: torchrun's LOCAL_WORLD_SIZE, or 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
