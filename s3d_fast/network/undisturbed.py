"""Evaluate a model without changing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def set_training(model: nn.Module, training: bool) -> None:
    """Put a model into training or eval mode; an exported one has no such methods, and only its flags are set."""
    try:
        model.train(training)
    except NotImplementedError:
        for module in model.modules():
            module.training = training


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards restore its modes, its buffers and the random state."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    set_training(model, False)
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                # Write only if the values differ: autograd counts every write as a change.
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
