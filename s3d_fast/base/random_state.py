"""The states of all global random generators, as data that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

# PyTorch's states are tensors, Python's and numpy's are plain data.
RandomState = tuple[dict[str, Tensor], dict[str, Any]]


def seed_all(*key: int) -> None:
    """Seed PyTorch, Python and numpy from a key; different keys of the same length give unrelated states."""
    state = int(np.random.SeedSequence(key).generate_state(1)[0])
    torch.manual_seed(state)
    random.seed(state)
    np.random.seed(state)  # noqa: NPY002 - users' augmentation may draw from it


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Let every such block draw the same random numbers; afterwards the generator of the CPU is as it was."""
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(0)
        else:
            # manual_seed would also note a stack trace for each kind of GPU, in case one comes later; that takes time.
            torch.default_generator.manual_seed(0)
        yield


class OwnRandomness:
    """Random draws that differ between processes, beside PyTorch's global generators, which all processes share.

    The order of the data comes from the global generator, and must be the same everywhere. Masks of dropout must not.
    Within the `with` block of `drawing`, PyTorch's generators are this process's own.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.state = torch.get_rng_state()

    def begin(self) -> None:
        """Seed the own generators from the rank and a draw from the common one, which advances in all processes."""
        common = int(torch.randint(2**62, ()))
        own = torch.Generator()
        own.manual_seed(int(np.random.SeedSequence((common, self.rank)).generate_state(1)[0]))
        self.state = own.get_state()
        if self.device.type == "cuda":
            # Nothing that processes must agree on is drawn on a GPU.
            torch.cuda.manual_seed(own.initial_seed())

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the own generators within the block."""
        common = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(common)


def random_state() -> RandomState:
    """Return the states of the generators: PyTorch's as tensors, Python's and numpy's as plain data."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    version, internal, gauss = random.getstate()
    numpy = [name, np.asarray(keys).tolist(), *rest]
    return tensors, {"python": [version, list(internal), gauss], "numpy": numpy}


def set_random_state(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Restore the states that `random_state` returned; states of GPUs that this machine lacks are ignored."""
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda:{index}"], index)
    version, internal, gauss = record["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = record["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
