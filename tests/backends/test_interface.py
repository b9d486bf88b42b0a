"""The interface of backends: no call can confuse two tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from s3d_fast.backends.choice import choose
from s3d_fast.backends.interface import Backend
from s3d_fast.kernels import (
    curvature,
    edgeconv,
    gated,
    grouped,
    krylov,
    pointwise,
    pointwise_wide,
    surgery,
    tridiagonal,
)
from s3d_fast.maths.reference import KrylovState

OPERATIONS = sorted(name for name in Backend.__abstractmethods__ if not name.startswith("why_not"))
# What `backends/triton.py` calls.
WRAPPERS = [
    pointwise.splitting_matvec,
    pointwise_wide.splitting_matvec,
    gated.gated_matvec,
    grouped.splitting_matvec_grouped,
    edgeconv.edgeconv_matvec,
    curvature.curvature_coefficients,
    surgery.grow_weight,
    krylov.krylov_extend,
    tridiagonal.tridiagonal_extremes,
]


def tensors_by_position(function: Callable[..., Any]) -> list[str]:
    """Return the parameters that take a tensor, or several, and may be given without their name."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if "Tensor" in str(p.annotation) and p.kind is not p.KEYWORD_ONLY]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_at_most_one_tensor_by_position(name: str) -> None:
    assert len(tensors_by_position(getattr(Backend, name))) <= 1


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_every_backend_has_the_signatures_of_the_interface(backend: str, name: str) -> None:
    own = getattr(type(choose(backend)), name)
    assert inspect.signature(own) == inspect.signature(getattr(Backend, name))


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: f"{wrapper.__module__}.{wrapper.__name__}")
def test_a_kernel_takes_at_most_one_tensor_by_position(wrapper: Callable[..., Any]) -> None:
    assert len(tensors_by_position(wrapper)) <= 1


def test_a_state_is_made_of_named_tensors() -> None:
    assert not tensors_by_position(KrylovState)
