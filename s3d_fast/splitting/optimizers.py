"""Optimizers whose state can be carried through a split: how each entry of state scales with the copies' weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

Scaling = Callable[[np.ndarray], np.ndarray]

# How an entry of state scales if the gradient is scaled by w.
SCALINGS: dict[str, Scaling] = {
    "gradient": lambda w: w,
    "square": lambda w: w**2,
    "magnitude": np.abs,
    "sign": np.sign,
    "same": np.ones_like,
}
_MOMENTS = {"exp_avg": "gradient", "exp_avg_sq": "square", "max_exp_avg_sq": "square"}
_STATES: dict[type[torch.optim.Optimizer], dict[str, str]] = {
    torch.optim.SGD: {"momentum_buffer": "gradient"},
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
    torch.optim.NAdam: _MOMENTS,
    torch.optim.RAdam: _MOMENTS,
    torch.optim.Adamax: {"exp_avg": "gradient", "exp_inf": "magnitude"},
    torch.optim.Adagrad: {"sum": "square"},
    # The average of squared steps: steps do not depend on the size of gradients.
    torch.optim.Adadelta: {"square_avg": "square", "acc_delta": "same"},
    torch.optim.Adafactor: {"row_var": "square", "col_var": "square", "variance": "square"},
    # RMSprop's momentum adds up gradients that are already divided by their root mean square.
    torch.optim.RMSprop: {"square_avg": "square", "grad_avg": "gradient", "momentum_buffer": "sign"},
    torch.optim.Rprop: {"prev": "gradient", "step_size": "same"},
    torch.optim.Muon: {"momentum_buffer": "gradient"},
}


def register_optimizer(kind: type[torch.optim.Optimizer], state: Mapping[str, str]) -> None:
    """Teach `apply_splits` an optimizer of your own.

    A copy of a filter is read with weight w, so its gradient is w times that of the original.

    Args:
        kind: the class; subclasses are included unless they are registered themselves.
        state: for every tensor in the optimizer's state of a parameter, how it scales: like the "gradient" (w), its
            "square" (w^2), its "magnitude" (|w|), its "sign", or not at all ("same"). Lion, for example, is
            {"exp_avg": "gradient"}.

    Raises:
        TypeError: kind is not an optimizer class.
        ValueError: a word is none of these.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"kind must be a subclass of torch.optim.Optimizer, got {kind!r}")
    for name, word in dict(state).items():
        if word not in SCALINGS:
            raise ValueError(f"state: {name!r} must be one of {', '.join(SCALINGS)}; got {word!r}")
    _STATES[kind] = dict(state)


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers that have the same interface, such as Accelerate's."""
    while type(optimizer) not in _STATES:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer
        optimizer = inner
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> Mapping[str, Scaling]:
    """Return how the entries of the optimizer's state scale, by key.

    Raises:
        TypeError: splitting does not support this type of optimizer.
        ValueError: the optimizer holds parameters that are not the model's.
    """
    if optimizer is None:
        return {}
    found = next((_STATES[kind] for kind in type(optimizer).__mro__ if kind in _STATES), None)
    if found is None:
        known = ", ".join(kind.__name__ for kind in _STATES)
        raise TypeError(
            f"optimizer must be one of {known}, got {type(optimizer).__name__}; teach it with "
            f"s3d_fast.register_optimizer({type(optimizer).__name__}, {{'momentum': 'gradient', ...}})"
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise ValueError(f"optimizer holds {len(foreign)} parameters that are not the model's")
    return {name: SCALINGS[word] for name, word in found.items()}
