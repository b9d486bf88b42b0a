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
