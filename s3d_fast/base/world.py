"""The processes of one run, as torchrun starts them. A single process has the same methods."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
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

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; it must have the same shape in each."""
        if self.size == 1:
            return tensor
        total = tensor.detach().to(self.device).clone()
        dist.all_reduce(total)
        return total.to(tensor.device)

    def agree(self, number: int) -> bool:
        """Return whether a number is the same in all processes."""
        total, squares = self.sum(number, number * number)
        return self.size * squares == total * total

    def same(self, value: Value, source: int = 0) -> Value:
        """Return the value of the process with rank `source`, in all processes."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, source)
        return held[0]

    def same_tensors(self, tensors: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
        """Return the tensors of the process with rank `source`, in all processes and on the CPU."""
        if self.size == 1:
            return dict(tensors)
        layout = self.same([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()], source)
        found = {}
        for name, shape, dtype in layout:
            mine = tensors[name].cpu() if self.rank == source else torch.empty(shape, dtype=dtype)
            # As bytes: a backend need not know every dtype.
            sent = mine.contiguous().reshape(-1).view(torch.uint8).to(self.device)
            if sent.numel():
                dist.broadcast(sent, source)
            found[name] = sent.cpu().view(dtype).reshape(shape)
        return found

    def everyone(self, value: Value) -> list[Value]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, make: Callable[[], Value]) -> Value:
        """Return what `make` returns in this process; an error in any process is raised in all of them.

        Without this, the others would wait for a process that has failed.
        """
        value, error = None, None
        try:
            value = make()
        except (ValueError, TypeError, OSError, RuntimeError) as caught:
            error = caught
        messages = self.everyone(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank} has failed: {message}")
        return value  # type: ignore[return-value]

    def from_first(self, make: Callable[[], Value]) -> Value:
        """Return what `make` returns in the first process, in all processes; its error is raised in all of them."""
        return self.same(self.together(lambda: make() if self.is_first else None))  # type: ignore[return-value]

    def wait(self) -> None:
        """Return once all processes have called this."""
        if self.size > 1:
            dist.barrier()


ALONE = World()


def existing(device: torch.device | None = None) -> World:
    """Return the processes of the process group that exists, such as Lightning's, Ray's or Accelerate's; else one.

    Args:
        device: where this process computes; by default the current GPU if the group uses NCCL, and else the CPU.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=CPU if device is None else device)
    if device is None or (device.type == "cuda" and device.index is None):
        on_gpu = "nccl" in dist.get_backend() if device is None else True
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else CPU
    return World(dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun has started: NCCL on GPUs, gloo on CPUs. Without torchrun, yield one process.

    A process group that exists already is used, and is still there afterwards. If a process ends with an error, the
    others wait until torchrun ends them.
    """
    if dist.is_available() and dist.is_initialized():
        yield existing(device)
        return
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launch_id() is None:
        dist.init_process_group(backend)
    else:
        rank = int(os.environ["RANK"])
        dist.init_process_group(backend, store=_store_of_this_attempt(rank, size), rank=rank, world_size=size)
    try:
        yield World(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()


def _store_of_this_attempt(rank: int, size: int) -> Any:
    """Return a store that holds nothing from before a restart, the same in all processes.

    Torchrun's store may live on when it restarts processes. A process could then find addresses of those that have
    died, and fail to reach them. So the first process makes a prefix for all keys, and gives it to every process that
    answers now; the number of restarts does not serve, since it can differ between nodes.
    """
    store, _, _ = next(rendezvous("env://", rank, size))
    if rank > 0:
        own = uuid.uuid4().hex
        store.set(f"s3d_fast/asks/{rank}", own)
        prefix = store.get(f"s3d_fast/told/{own}").decode()
        store.set(f"s3d_fast/{prefix}/{rank}", "")
        return dist.distributed_c10d.PrefixStore(prefix, store)
    prefix, silent = uuid.uuid4().hex, list(range(1, size))
    while silent:
        for other in silent:
            asks = f"s3d_fast/asks/{other}"
            if store.check([asks]):
                # An old question does no harm: nobody waits for its answer, and the new one is seen in the next round.
                store.set(f"s3d_fast/told/{store.get(asks).decode()}", prefix)
        silent = [other for other in silent if not store.check([f"s3d_fast/{prefix}/{other}"])]
        time.sleep(0.01)
    return dist.distributed_c10d.PrefixStore(prefix, store)


def launch_id() -> str | None:
    """Return what tells this launch of torchrun from every other, if it may restart its processes; else None.

    It is the same after a restart: torchrun's agent, the parent of this process, lives on.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    agent = os.getppid()
    try:
        # The start of the agent in clock ticks: containers use the same small process numbers again and again.
        with open(f"/proc/{agent}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "unknown"
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} on {socket.gethostname()}, process {agent}, started {started}"


def was_restarted() -> bool:
    """Return whether torchrun has started this process anew, after it or another process of the run failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def local_processes() -> int:
    """Return how many processes of this run share the machine: torchrun's LOCAL_WORLD_SIZE, or 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
