"""Activations with their first and second derivatives, found by name, by module or by function.

A kink is a place where the slope jumps. There the second derivative is an impulse, which no sample of data
ever hits. Each kink of height `jump` is therefore replaced by the curvature of a softplus of sharpness beta:

    act''(z) = curvature(z) + sum over kinks of  jump * beta * sigmoid(beta (z - at)) * sigmoid(-beta (z - at))

where `curvature` is the exact second derivative away from the kinks. Smooth activations have no kinks and use their
own exact second derivative. `Activation.surrogate` is the function with this second derivative; it differs from the
activation only near its kinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast.base import require

Elementwise = Callable[[Tensor], Tensor]

# The sharpness of the softplus that stands in for a kink. The published S2D code uses the same value.
DEFAULT_SHARPNESS = 3.0


@dataclass(frozen=True)
class Kink:
    """A jump of height `jump` in the slope of an activation at z = `at`."""

    at: float
    jump: float


@dataclass(frozen=True)
class Formula:
    """The name and parameters of a formula for act'' away from kinks that the compiled kernels implement.

    For "none", `a` is the slope before the first kink.
    """

    name: str
    a: float = 0.0
    b: float = 0.0


# Zero curvature between kinks, and no slope before the first one.
_NONE = Formula("none")


@dataclass(frozen=True)
class Activation:
    """An elementwise function with its derivatives.

    Attributes:
        name: its name for `activation`.
        function: act(z).
        first: act'(z), one-sided at a kink.
        curvature: act''(z) away from the kinks.
        kinks: where the slope jumps; empty for a smooth activation.
        sharpness: beta of the softplus that stands in for a kink.
        formula: the compiled formula that computes `curvature`; None if there is none. Leave it None for an activation
            of your own.
    """

    name: str
    function: Elementwise
    first: Elementwise
    curvature: Elementwise
    kinks: tuple[Kink, ...] = ()
    sharpness: float = DEFAULT_SHARPNESS
    formula: Formula | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Return act(z)."""
        return self.function(z)

    def second(self, z: Tensor, sharpness: Tensor | None = None) -> Tensor:
        """Return act''(z), with each kink smoothed by a softplus of the given sharpness.

        A tensor, which broadcasts with z, takes the place of the activation's own sharpness; where it is 0, kinks add
        nothing.
        """
        beta = self.sharpness if sharpness is None else sharpness
        result = self.curvature(z)
        for kink in self.kinks:
            x = beta * (z - kink.at)
            result = result + (kink.jump * beta) * torch.sigmoid(x) * torch.sigmoid(-x)
        return result

    def surrogate(self, z: Tensor) -> Tensor:
        """Return the smooth function whose second derivative is `second`: act itself if it has no kinks."""
        result = self.function(z)
        for kink in self.kinks:
            shifted = z - kink.at
            result = result + kink.jump * (_softplus(shifted, self.sharpness) - torch.relu(shifted))
        return result


class Gaussian(nn.Module):
    """The radial basis activation exp(-z^2 / 2)."""

    def forward(self, z: Tensor) -> Tensor:
        """Return exp(-z^2 / 2)."""
        return gaussian(z)


def gaussian(z: Tensor) -> Tensor:
    """Return exp(-z^2 / 2)."""
    return torch.exp(-0.5 * z * z)


def activation(
    which: str | nn.Module | Callable[..., Any] | Activation | None,
    *,
    sharpness: float | None = None,
    **options: Any,
) -> Activation:
    """Return the activation that a name, an `nn.Module` instance or a function stands for.

    Args:
        which: a name from `activation_names()`; a module such as `nn.SiLU()`, whose options are read off it; a
            function such as `F.silu` or `torch.tanh`; or None for the identity.
        sharpness: beta of the softplus that stands in for a kink; 3 by default.
        options: the function's own options, such as `negative_slope=0.1` or `approximate="tanh"`.

    Raises:
        ValueError: the name is not known, an option has a bad value, or sharpness <= 0.
        TypeError: the module or function is not a known activation, or it has no such option.
    """
    if sharpness is not None:
        require.positive("sharpness", sharpness)
    if options and not (isinstance(which, str) or which in _FUNCTIONS):
        raise TypeError(f"options are allowed only with a name or a function, got {', '.join(options)} for {which!r}")
    if isinstance(which, Activation):
        return which if sharpness is None else replace(which, sharpness=sharpness)
    if isinstance(which, nn.Module):
        if type(which) not in MODULES:
            raise TypeError(f"which: no activation is known for the module {type(which).__name__}")
        name, attributes = MODULES[type(which)]
        return activation(name, sharpness=sharpness, **{a: getattr(which, a) for a in attributes})
    if which is None:
        which = "identity"
    if isinstance(which, str):
        if which not in _BUILDERS:
            raise ValueError(f"which must be one of {', '.join(_BUILDERS)}; got {which!r}")
        return activation(_BUILDERS[which](**options), sharpness=sharpness)
    if callable(which) and which in _FUNCTIONS:
        return activation(_FUNCTIONS[which], sharpness=sharpness, **options)
    raise TypeError(f"which must be a name, an nn.Module or a known function, got {which!r}")


def from_formula(formula: Formula, kinks: Sequence[Kink], sharpness: float) -> Activation:
    """Return the activation with this formula and these kinks, in ascending order.

    Without a formula between its kinks it is  a z + sum of jump relu(z - at),  up to a constant.
    """
    a, b = formula.a, formula.b
    builders: dict[str, Callable[[], Activation]] = {
        "none": lambda: _piecewise(a, kinks),
        "silu": _silu,
        "gelu": _gelu,
        "gelu_tanh": lambda: _gelu("tanh"),
        "softplus": lambda: _softplus_activation(a, b),
        "tanh": _tanh,
        "sigmoid": _sigmoid,
        "elu": lambda: _elu(a),
        "hardswish": _hardswish,
        "gaussian": _gaussian,
    }
    return replace(builders[formula.name](), kinks=tuple(kinks), sharpness=sharpness, formula=formula)


def activation_names() -> tuple[str, ...]:
    """Return every name that `activation` knows."""
    return tuple(_BUILDERS)


def is_activation(which: object) -> bool:
    """Return whether `activation` knows this module, function or name."""
    if isinstance(which, nn.Module):
        return type(which) in MODULES
    if isinstance(which, str):
        return which in _BUILDERS
    return callable(which) and which in _FUNCTIONS


def _softplus(z: Tensor, beta: float) -> Tensor:
    # Beyond the threshold, torch's softplus is linear. At the default of 20 the error shows in float64.
    return F.softplus(z, beta=beta, threshold=40.0)


def _piecewise(slope: float, kinks: Sequence[Kink]) -> Activation:
    def function(z: Tensor) -> Tensor:
        return sum((kink.jump * torch.relu(z - kink.at) for kink in kinks), slope * z)

    def first(z: Tensor) -> Tensor:
        return sum((kink.jump * (z > kink.at).to(z) for kink in kinks), torch.full_like(z, slope))

    return Activation("piecewise linear", function, first, torch.zeros_like)


def _relu() -> Activation:
    return Activation("relu", torch.relu, lambda z: (z > 0).to(z), torch.zeros_like, (Kink(0, 1),), formula=_NONE)


def _relu6() -> Activation:
    kinks = (Kink(0, 1), Kink(6, -1))
    return Activation("relu6", F.relu6, lambda z: ((z > 0) & (z < 6)).to(z), torch.zeros_like, kinks, formula=_NONE)


def _leaky_relu(negative_slope: float = 0.01) -> Activation:
    require.number("negative_slope", negative_slope)
    return Activation(
        "leaky_relu",
        lambda z: F.leaky_relu(z, negative_slope),
        lambda z: torch.where(z > 0, torch.ones_like(z), negative_slope),
        torch.zeros_like,
        (Kink(0, 1 - negative_slope),),
        formula=Formula("none", float(negative_slope)),
    )


def _elu(alpha: float = 1.0) -> Activation:
    require.number("alpha", alpha)

    def decay(z: Tensor) -> Tensor:
        return alpha * torch.exp(z.clamp(max=0))

    return Activation(
        "elu",
        lambda z: F.elu(z, alpha),
        lambda z: torch.where(z > 0, torch.ones_like(z), decay(z)),
        lambda z: torch.where(z > 0, torch.zeros_like(z), decay(z)),
        () if alpha == 1 else (Kink(0, 1 - alpha),),
        formula=Formula("elu", float(alpha)),
    )


def _hardswish() -> Activation:
    return Activation(
        "hardswish",
        F.hardswish,
        lambda z: torch.where(z.abs() < 3, (2 * z + 3) / 6, (z > 0).to(z)),
        lambda z: (z.abs() < 3).to(z) / 3,
        (Kink(-3, -0.5), Kink(3, -0.5)),
        formula=Formula("hardswish"),
    )


def _silu() -> Activation:
    def first(z: Tensor) -> Tensor:
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))

    def second(z: Tensor) -> Tensor:
        s = torch.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))

    return Activation("silu", F.silu, first, second, formula=Formula("silu"))


def _gelu(approximate: str = "none") -> Activation:
    require.choice("approximate", approximate, ("none", "tanh"))
    function = partial(F.gelu, approximate=approximate)
    if approximate == "none":
        return Activation("gelu", function, _gelu_first, _gelu_second, formula=Formula("gelu"))
    return Activation("gelu", function, _tanh_gelu_first, _tanh_gelu_second, formula=Formula("gelu_tanh"))


def _within(z: Tensor, bound: float) -> Tensor:
    """Return z clamped so that z^2 cannot overflow; beyond the bound, derivatives are constant to the last bit."""
    return z.clamp(-bound, bound)


def _gelu_first(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * gaussian(z) / math.sqrt(2 * math.pi)


def _gelu_second(z: Tensor) -> Tensor:
    z = _within(z, 40)
    return (2 - z * z) * gaussian(z) / math.sqrt(2 * math.pi)


# gelu_tanh(z) = z/2 * (1 + tanh u),  u = a (z + b z^3)
_GELU_A, _GELU_B = math.sqrt(2 / math.pi), 0.044715


def _tanh_gelu_first(z: Tensor) -> Tensor:
    z = _within(z, 10)
    t = torch.tanh(_GELU_A * (z + _GELU_B * z**3))
    du = _GELU_A * (1 + 3 * _GELU_B * z * z)
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * du


def _tanh_gelu_second(z: Tensor) -> Tensor:
    z = _within(z, 10)
    t = torch.tanh(_GELU_A * (z + _GELU_B * z**3))
    du = _GELU_A * (1 + 3 * _GELU_B * z * z)
    ddu = 6 * _GELU_A * _GELU_B * z
    return (1 - t * t) * (du + 0.5 * z * (ddu - 2 * t * du * du))


def _softplus_activation(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    require.positive("beta", beta)
    require.number("threshold", threshold)

    # Beyond the threshold, PyTorch's softplus is the identity, with derivatives 1 and 0.
    def first(z: Tensor) -> Tensor:
        return torch.where(beta * z > threshold, torch.ones_like(z), torch.sigmoid(beta * z))

    def second(z: Tensor) -> Tensor:
        s = torch.sigmoid(beta * z)
        return torch.where(beta * z > threshold, torch.zeros_like(z), beta * s * (1 - s))

    formula = Formula("softplus", float(beta), float(threshold))
    return Activation("softplus", lambda z: F.softplus(z, beta, threshold), first, second, formula=formula)


def _tanh() -> Activation:
    def second(z: Tensor) -> Tensor:
        t = torch.tanh(z)
        return -2 * t * (1 - t * t)

    return Activation("tanh", torch.tanh, lambda z: 1 - torch.tanh(z) ** 2, second, formula=Formula("tanh"))


def _sigmoid() -> Activation:
    def first(z: Tensor) -> Tensor:
        s = torch.sigmoid(z)
        return s * (1 - s)

    def second(z: Tensor) -> Tensor:
        s = torch.sigmoid(z)
        return s * (1 - s) * (1 - 2 * s)

    return Activation("sigmoid", torch.sigmoid, first, second, formula=Formula("sigmoid"))


def _gaussian() -> Activation:
    def second(z: Tensor) -> Tensor:
        z = _within(z, 40)
        return (z * z - 1) * gaussian(z)

    return Activation("gaussian", gaussian, lambda z: -z * gaussian(z), second, formula=Formula("gaussian"))


def _identity() -> Activation:
    return Activation("identity", lambda z: z, torch.ones_like, torch.zeros_like, formula=Formula("none", 1.0))


_BUILDERS: dict[str, Callable[..., Activation]] = {
    "relu": _relu,
    "relu6": _relu6,
    "leaky_relu": _leaky_relu,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus_activation,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "elu": _elu,
    "hardswish": _hardswish,
    "gaussian": _gaussian,
    "identity": _identity,
}

# Module type -> name, and the attributes that are the function's options.
MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ()),
    nn.ReLU6: ("relu6", ()),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.SiLU: ("silu", ()),
    nn.GELU: ("gelu", ("approximate",)),
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.Tanh: ("tanh", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.ELU: ("elu", ("alpha",)),
    nn.Hardswish: ("hardswish", ()),
    Gaussian: ("gaussian", ()),
    nn.Identity: ("identity", ()),
}

_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.relu6: "relu6",
    F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu",
    F.silu: "silu",
    F.gelu: "gelu",
    F.softplus: "softplus",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.elu: "elu",
    F.elu_: "elu",
    F.hardswish: "hardswish",
    gaussian: "gaussian",
}
