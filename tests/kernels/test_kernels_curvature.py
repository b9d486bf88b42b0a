"""Curvature and grown weights by the Triton kernels: their precision, and what they refuse before a launch.

That they agree with the reference is in `tests/backends/test_agreement_entries.py`.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from s3d_fast import Activation, activation, activation_names
from s3d_fast.backends import operations
from s3d_fast.backends.choice import choose
from s3d_fast.kernels import surgery
from s3d_fast.maths import reference
from s3d_fast.maths.activations import Kink
from s3d_fast.maths.reference import Widening
from tests.backends.agreement import assert_agrees
from tests.cases import doubles, embedded, random_tensor
from tests.kernel_cases import recorded

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]

# The largest error of rounding a number to 16 bits, as a fraction of it. A GPU rounds to the nearest bfloat16, the
# interpreter towards zero.
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
sixteen_bits = pytest.mark.parametrize("dtype", ROUNDING, ids=["bf16", "fp16"])


def coefficients(g: Tensor, z: Tensor, act: Activation, scale: Tensor | None = None) -> Tensor:
    settings = {"activation": act, "scale": scale, "axis": g.dim() - 1, "inplace": False}
    return choose("triton").curvature_coefficients(g=g, z=z, **settings)


def widening(dtype: torch.dtype = torch.float32) -> Widening:
    """Return how a weight (5, 7) grows by everything that there is."""
    rows, columns = torch.tensor([4, 3, 2, 1, 0, 0, 0, 4]), torch.tensor([6, 5, 4, 3, 2, 1, 0])
    shift, shift_rows = random_tensor(2, 7, dtype=dtype, seed=2), torch.tensor([-1, 1, 0, -1, 1, 0, -1, 1])
    scales = random_tensor(8, dtype=dtype, seed=1), random_tensor(7, dtype=dtype, seed=3)
    return Widening(random_tensor(5, 7, dtype=dtype), rows, scales[0], shift, shift_rows, columns, scales[1], 0.3)


def assert_rounded_once(found: Tensor, expected: Tensor, label: object = "") -> None:
    """Check that entries in 16 bits are off by one rounding, but for float32 arithmetic before it."""
    # float16 rounds absolutely below its smallest normal number.
    allowed = ROUNDING[found.dtype] * expected.abs() + 1e-6 * expected.abs().max() + 2.0**-25
    error = (found.double() - expected).abs()
    assert (error <= allowed).all(), f"{label}: error {(error - allowed).max()} beyond rounding"


@sixteen_bits
def test_curvature_in_16_bits_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    g, z, scale = (random_tensor(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(61, 17)] * 2 + [(17,)]))
    z = 4 * z
    for name in activation_names():
        expected = reference.curvature_coefficients(*doubles(g, z), activation(name), scale.double(), 1)
        assert_rounded_once(coefficients(g, z, activation(name), scale), expected, name)


@sixteen_bits
def test_weights_in_16_bits_grow_in_float32_and_are_rounded_once(dtype: torch.dtype) -> None:
    given = widening(dtype)
    (grown,) = choose("triton").grow_weights([given])
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    assert_rounded_once(grown, reference.grow_weight(*wide))


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_curvature_near_a_zero_of_it_keeps_its_digits(dtype: torch.dtype, accuracy: float) -> None:
    z = torch.cat([sign * torch.logspace(-12, 0.5, 300, dtype=dtype) for sign in (1, -1)])
    t = torch.tanh(z.double())
    half = torch.tanh(z.double() / 2)
    for name, expected in (("tanh", -2 * t * (1 - t * t)), ("sigmoid", -0.25 * half * (1 - half * half))):
        C = coefficients(torch.ones_like(z), z, activation(name)).double()
        assert ((C - expected).abs() <= accuracy * expected.abs()).all(), name


def test_an_activation_without_a_formula_is_an_error() -> None:
    g = random_tensor(3, 2)
    square = Activation("square", lambda z: z * z, lambda z: 2 * z, lambda z: torch.full_like(z, 2))
    kinks = (Kink(0, 1), Kink(1, 1), Kink(2, 1))
    many = Activation("many", g.relu, g.relu, torch.zeros_like, kinks, formula=activation("relu").formula)
    for own in (square, many):
        with pytest.raises(RuntimeError, match=f"'triton' cannot be used: it has no formula for '{own.name}'"):
            operations.curvature_coefficients(g, g, own, backend="triton")


def test_what_follows_a_scale_of_columns_in_memory_is_not_used() -> None:
    weight, rows = random_tensor(4, 3, 2, 2), torch.tensor([0, 3, 1])
    scale = embedded(random_tensor(3, seed=3))[1][2:].clone()[:3]
    for columns in (None, torch.arange(3)):
        given = Widening(weight, rows, columns=columns, column_scale=scale)
        assert_agrees(choose("triton"), "grow_weights", widenings=[given], label=columns)


@pytest.mark.parametrize(("name", "low", "high"), [("rows", 0, 5), ("shift_rows", -1, 2), ("columns", 0, 7)])
def test_an_index_out_of_range_is_an_error_before_anything_happens(
    name: str, low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, surgery, "grow_kernel")
    good = widening()
    for index, at in product([low - 1, high, 10**12, -(10**12)], [0, -1]):
        bad = getattr(good, name).clone()
        bad[at] = index
        with pytest.raises(IndexError, match=rf"{name} must lie in \[{low}, {high}\)"):
            operations.grow_weights([good, good._replace(**{name: bad}), good], backend="triton")
    assert not launches
    assert_agrees(choose("triton"), "grow_weights", widenings=[good])


@pytest.mark.parametrize("name", ["row_scale", "shift", "shift_rows", "column_scale"])
def test_arguments_that_are_too_short_are_an_error(name: str) -> None:
    good = widening()
    if name == "shift":
        good = good._replace(shift=random_tensor(8, 7, dtype=torch.float32), shift_rows=None)
    short = good._replace(**{name: getattr(good, name)[:-1]})
    for backend in ("cpu", "triton"):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            operations.grow_weights([short], backend=backend)


def test_columns_of_a_vector_are_an_error() -> None:
    growth = Widening(random_tensor(3), torch.tensor([0, 1]))
    for change in ({"columns": torch.tensor([0])}, {"column_scale": random_tensor(5)}):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            operations.grow_weights([growth._replace(**change)], backend="triton")


def test_no_number_of_rows_needs_more_programs_than_a_grid_has() -> None:
    weight, rows = torch.empty(4, 300, device="meta"), torch.empty(2_000_000, dtype=torch.int64, device="meta")
    (launch,) = surgery.plan(Widening(weight, rows)).launches
    # CUDA allows 2^31 - 1 programs in the first dimension, 65535 in the others.
    assert len(launch.grid) == 1
    assert launch.grid[0] < 2**31
