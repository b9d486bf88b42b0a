"""Activations: their derivatives against autograd, their surrogates, and the ways to find them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from torch import Tensor, nn

from s3d_fast import Activation, Gaussian, activation, activation_names

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in activation_names()),
    ("leaky_relu", {"negative_slope": 0.2}),
    ("elu", {"alpha": 0.7}),
    ("elu", {"alpha": 1}),
    ("softplus", {"beta": 2}),
    ("gelu", {"approximate": "tanh"}),
]
HAVE_KINKS = ("relu", "relu6", "leaky_relu", "hardswish")

# With an offset, so that no point of it is a kink.
GRID = torch.cat(
    [
        torch.linspace(-12, 12, 2401, dtype=torch.float64) + math.pi / 1e4,
        torch.tensor([-1e3, -100.0, -45.0, -30.0, -20.5, 20.5, 30.0, 45.0, 100.0, 1e3], dtype=torch.float64),
    ]
)


def has_kinks(name: str, options: dict[str, Any]) -> bool:
    return name in HAVE_KINKS or options.get("alpha", 1) != 1


def option_id(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "default"
    return str(value)


def slopes(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second derivative of `function` by autograd."""
    z = z.clone().requires_grad_()
    first = torch.autograd.grad(function(z).sum(), z, create_graph=True)[0]
    if not first.requires_grad:
        return first, torch.zeros_like(first)
    return first.detach(), torch.autograd.grad(first.sum(), z)[0]


every_activation = pytest.mark.parametrize(("name", "options"), OPTIONS, ids=option_id)
kinked = pytest.mark.parametrize(("name", "options"), [case for case in OPTIONS if has_kinks(*case)], ids=option_id)
smooth = pytest.mark.parametrize(("name", "options"), [case for case in OPTIONS if not has_kinks(*case)], ids=option_id)


@every_activation
def test_first_is_the_slope_of_the_function(name: str, options: dict[str, Any]) -> None:
    act = activation(name, **options)
    torch.testing.assert_close(act.first(GRID), slopes(act.function, GRID)[0], rtol=0, atol=1e-10)


@every_activation
def test_second_is_the_curvature_of_the_surrogate(name: str, options: dict[str, Any]) -> None:
    act = activation(name, **options)
    torch.testing.assert_close(act.second(GRID), slopes(act.surrogate, GRID)[1], rtol=0, atol=1e-10)


@kinked
@pytest.mark.parametrize("sharpness", [0.5, 3.0, 20.0])
def test_second_is_the_curvature_of_the_surrogate_at_every_sharpness(
    name: str, options: dict[str, Any], sharpness: float
) -> None:
    act = activation(name, sharpness=sharpness, **options)
    torch.testing.assert_close(act.second(GRID), slopes(act.surrogate, GRID)[1], rtol=0, atol=1e-10)


@every_activation
def test_calling_an_activation_is_its_function(name: str, options: dict[str, Any]) -> None:
    act = activation(name, **options)
    assert torch.equal(act(GRID), act.function(GRID))


@smooth
def test_a_smooth_activation_is_its_own_surrogate(name: str, options: dict[str, Any]) -> None:
    act = activation(name, **options)
    assert torch.equal(act.surrogate(GRID), act.function(GRID))
    assert torch.equal(act.second(GRID), activation(name, sharpness=50.0, **options).second(GRID))


@kinked
def test_the_surrogate_tends_to_the_activation_as_sharpness_grows(name: str, options: dict[str, Any]) -> None:
    errors = []
    for sharpness in (1.0, 10.0, 100.0):
        act = activation(name, sharpness=sharpness, **options)
        assert act.sharpness == sharpness
        errors.append((act.surrogate(GRID) - act.function(GRID)).abs().max().item())
        # A softplus lies at most log(2) / sharpness above the kink it replaces.
        assert 0 < errors[-1] <= sum(abs(kink.jump) for kink in act.kinks) * math.log(2) / sharpness
    assert errors[2] < errors[1] < errors[0]


def test_a_relu_has_the_curvature_of_a_softplus_of_sharpness_three() -> None:
    assert activation("relu").second(torch.zeros(1)).item() == pytest.approx(0.75)


@every_activation
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_the_curvature_adds_up_to_the_change_of_slope(name: str, options: dict[str, Any], sharpness: float) -> None:
    act = activation(name, sharpness=sharpness, **options)
    far = 60.0
    total, _ = quad(
        lambda z: act.second(torch.tensor(z, dtype=torch.float64)).item(),
        -far,
        far,
        points=[-3, 0, 3, 6],
        epsabs=1e-9,
        limit=200,
    )
    left, right = slopes(act.function, torch.tensor([-far, far], dtype=torch.float64))[0].tolist()
    assert total == pytest.approx(right - left, abs=1e-8)


@kinked
def test_at_a_kink_first_is_one_of_the_two_slopes(name: str, options: dict[str, Any]) -> None:
    act = activation(name, **options)
    for kink in act.kinks:
        beside = torch.tensor([kink.at - 1e-9, kink.at + 1e-9], dtype=torch.float64)
        left, right = slopes(act.function, beside)[0].tolist()
        assert right - left == pytest.approx(kink.jump, abs=1e-8)
        at = act.first(torch.tensor(kink.at, dtype=torch.float64)).item()
        assert min(abs(at - left), abs(at - right)) < 1e-8


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_shape_and_dtype_are_those_of_the_input(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    act = activation(name, **options)
    z = torch.linspace(-2, 2, 6, dtype=dtype).reshape(2, 3)
    for result in (act(z), act.first(z), act.second(z), act.surrogate(z)):
        assert result.dtype == dtype
        assert result.shape == z.shape


@every_activation
@pytest.mark.parametrize(
    ("dtype", "large"),
    [(torch.float16, [60, 300, 6e4]), (torch.bfloat16, [60, 300, 1e6]), (torch.float32, [60, 300, 1e6])],
    ids=["fp16", "bf16", "fp32"],
)
def test_derivatives_are_finite_far_out(
    name: str, options: dict[str, Any], dtype: torch.dtype, large: list[float]
) -> None:
    act = activation(name, **options)
    z = torch.tensor(large, dtype=dtype)
    for derivative in (act.first, act.second):
        assert bool(torch.isfinite(derivative(torch.cat([z, -z]))).all())


@pytest.mark.parametrize(
    "module",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.ReLU6(),
        nn.LeakyReLU(0.2),
        nn.SiLU(),
        nn.GELU(),
        nn.GELU(approximate="tanh"),
        nn.Softplus(beta=2),
        nn.Softplus(beta=2, threshold=5),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.ELU(alpha=0.7),
        nn.Hardswish(),
        Gaussian(),
        nn.Identity(),
    ],
    ids=str,
)
def test_a_module_is_found_with_its_options(module: nn.Module) -> None:
    act = activation(module)
    assert torch.equal(act(GRID), module(GRID.clone()))
    expected, _ = slopes(lambda z: module(z.clone()), GRID)
    torch.testing.assert_close(act.first(GRID), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "function",
    [
        F.relu,
        torch.relu,
        F.relu6,
        F.leaky_relu,
        F.silu,
        F.gelu,
        F.softplus,
        F.tanh,
        torch.tanh,
        F.sigmoid,
        torch.sigmoid,
        F.elu,
        F.hardswish,
    ],
    ids=lambda function: function.__name__,
)
def test_a_function_is_found(function: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(activation(function)(GRID), function(GRID))


def test_options_go_with_a_function() -> None:
    z = torch.tensor([-2.0])
    assert activation(F.leaky_relu, negative_slope=0.2)(z).item() == pytest.approx(-0.4)


def test_sharpness_goes_with_a_module_and_with_a_function() -> None:
    assert activation(nn.ReLU(), sharpness=7.0).sharpness == 7.0
    assert activation(F.relu, sharpness=7.0).sharpness == 7.0


def test_nothing_is_the_identity() -> None:
    assert torch.equal(activation(None)(GRID), GRID)


def test_an_activation_is_found_by_itself() -> None:
    act = activation("silu")
    assert activation(act) is act
    assert isinstance(act, Activation)


def test_names_find_activations_of_that_name() -> None:
    assert [activation(name).name for name in activation_names()] == list(activation_names())


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"which must be one of .*relu.*got 'swish'"):
        activation("swish")


@pytest.mark.parametrize("module", [nn.PReLU(), nn.Linear(2, 2)], ids=["PReLU", "Linear"])
def test_an_unknown_module_is_an_error(module: nn.Module) -> None:
    with pytest.raises(TypeError, match=rf"which.*{type(module).__name__}"):
        activation(module)


@pytest.mark.parametrize("which", [torch.sin, 3], ids=["function", "number"])
def test_what_is_no_activation_is_an_error(which: Any) -> None:
    with pytest.raises(TypeError, match=r"which must be a name, an nn\.Module or a known function"):
        activation(which)


@pytest.mark.parametrize("sharpness", [0, -1.0, math.nan, math.inf])
def test_sharpness_must_be_positive_and_finite(sharpness: float) -> None:
    with pytest.raises(ValueError, match=r"sharpness must be a finite number > 0, got"):
        activation("relu", sharpness=sharpness)


def test_an_unknown_approximation_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"approximate must be one of 'none', 'tanh'; got 'erf'"):
        activation("gelu", approximate="erf")


@pytest.mark.parametrize("beta", [0, -1.0, math.nan])
def test_the_beta_of_a_softplus_must_be_positive(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        activation("softplus", beta=beta)


@pytest.mark.parametrize("which", ["relu", F.relu, nn.ReLU()], ids=["name", "function", "module"])
def test_an_option_that_it_does_not_have_is_an_error(which: Any) -> None:
    with pytest.raises(TypeError, match="alpha"):
        activation(which, alpha=2)
