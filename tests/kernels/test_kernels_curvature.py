"""Curvature and grown weights by the Triton kernels, in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast import Activation, activation, activation_names
from s3d_fast.backends import operations
from s3d_fast.kernels import surgery
from s3d_fast.maths import reference
from s3d_fast.maths.activations import Kink
from s3d_fast.maths.reference import Widening
from tests.cases import TOLERANCE, relative_error
from tests.extension_cases import DTYPES, LAYOUTS, doubles, embedded, laid_out, random_tensor
from tests.kernel_cases import every_dtype, poisoned, recorded  # noqa: F401

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]

# The largest error of rounding a number to these dtypes, as a fraction of it. A GPU rounds to the nearest bfloat16, the
# interpreter towards zero.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("leaky_relu", {"negative_slope": -0.2}),
    ("leaky_relu", {"negative_slope": 0.3, "sharpness": 0.7}),
    ("elu", {"alpha": 0.4}),
    ("elu", {"alpha": 2.0, "sharpness": 5.0}),
    ("softplus", {"beta": 2.5, "threshold": 3.0}),
    ("softplus", {"beta": 0.3}),
    ("gelu", {"approximate": "tanh"}),
    ("relu", {"sharpness": 40.0}),
    ("relu6", {"sharpness": 11.0}),
    ("hardswish", {"sharpness": 1.5}),
]
ACTIVATIONS = {name: activation(name) for name in activation_names()} | {
    f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})": activation(name, **options)
    for name, options in OPTIONS
}
every_activation = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())


def assert_coefficients(C: Tensor, expected: Tensor, label: object = "") -> None:
    """Check that coefficients are `expected` but for float32 arithmetic and the rounding of the result."""
    if C.dtype in (torch.float64, torch.float32):
        error = relative_error(C, expected)
        assert error < TOLERANCE[C.dtype], f"{label}: error {error}"
        return
    expected = expected.double()
    # float16 rounds absolutely below its smallest normal number.
    allowed = ROUNDING[C.dtype] * expected.abs() + 1e-6 * expected.abs().max() + 2.0**-25
    error = (C.double() - expected).abs()
    assert (error <= allowed).all(), f"{label}: error {(error - allowed).max()} beyond rounding"


def coefficients(g: Tensor, z: Tensor, act: Activation, scale: Tensor | None = None, **options: Any) -> Tensor:
    return operations.curvature_coefficients(g, z, act, scale, backend="triton", **options)


@every_activation
@every_dtype
def test_curvature_agrees_with_the_reference(act: Activation, dtype: torch.dtype) -> None:
    shapes = [((37,), 0), ((61, 17), 1), ((61, 17), 0), ((3, 5, 7, 6), 1), ((2, 9, 1, 5), 2), ((1300, 1), 0)]
    flags = cycle([False, True, True, False, False])
    for shape, axis in shapes:
        g, z = random_tensor(*shape, dtype=dtype), 4 * random_tensor(*shape, dtype=dtype, seed=1)
        scale = random_tensor(shape[axis], dtype=dtype, seed=2) if next(flags) else None
        inplace = next(flags)
        label = (shape, axis, scale is not None, inplace)
        wide_scale = None if scale is None else scale.double()
        expected = reference.curvature_coefficients(*doubles(g, z), act, wide_scale, axis)
        given, z_before = g.clone(), z.clone()
        C = coefficients(given, z, act, scale, axis=axis, inplace=inplace)
        assert C.dtype == dtype, label
        assert (C is given) == inplace, label
        assert inplace or torch.equal(given, g), label
        assert torch.equal(z, z_before), label
        assert_coefficients(C, expected, label)


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_curvature_of_every_layout_agrees_with_the_reference(inplace: bool) -> None:
    act, dtypes = activation("hardswish"), cycle(DTYPES)
    layouts = LAYOUTS[:4] if inplace else LAYOUTS
    for (g_layout, z_layout), axis in zip(product(layouts, LAYOUTS), cycle([0, 1, 2])):
        dtype = next(dtypes)
        g = laid_out(random_tensor(5, 7, 3, dtype=dtype), g_layout)
        z = laid_out(4 * random_tensor(5, 7, 3, dtype=dtype, seed=1), z_layout)
        scale = laid_out(random_tensor(g.shape[axis], dtype=dtype, seed=2), z_layout)
        expected = reference.curvature_coefficients(*doubles(g, z), act, scale.double(), axis)
        C = coefficients(g, z, act, scale, axis=axis, inplace=inplace)
        assert (C is g) == inplace
        assert_coefficients(C, expected, (g_layout, z_layout, axis))


@pytest.mark.parametrize("layout", ["offset", "stepped"])
def test_curvature_in_place_writes_nothing_but_its_output(layout: str) -> None:
    g, z = random_tensor(11, 6), random_tensor(11, 6, seed=1)
    view, buffer = embedded(g, layout)
    expected = reference.curvature_coefficients(g, z, activation("silu"))
    coefficients(view, z, activation("silu"), inplace=True)
    assert relative_error(view, expected) < TOLERANCE[torch.float64]
    assert int((~buffer.isnan()).sum()) == g.numel()
    whole = torch.full((1200,), torch.nan, dtype=torch.float64)
    whole[8:-8] = 1
    coefficients(whole[8:-8], torch.ones(1184, dtype=torch.float64), activation("silu"), axis=0, inplace=True)
    assert whole[8:-8].isfinite().all()
    assert whole[:8].isnan().all()
    assert whole[-8:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 4), (0,)], ids=str)
def test_curvature_of_nothing_is_nothing(shape: tuple[int, ...]) -> None:
    for axis, inplace in product(range(len(shape)), [False, True]):
        g = random_tensor(*shape)
        C = coefficients(g, g.clone(), activation("silu"), random_tensor(shape[axis]), axis=axis, inplace=inplace)
        assert C.shape == shape
        assert (C is g) == inplace


@every_activation
@every_dtype
def test_curvature_of_nan_is_nan_where_the_reference_says_so(act: Activation, dtype: torch.dtype) -> None:
    nan, one = torch.full((3,), torch.nan, dtype=dtype), torch.ones(3, dtype=dtype)
    expected = reference.curvature_coefficients(one, nan, act, axis=0).isnan()
    assert expected.all() or act.name == "identity"
    assert torch.equal(coefficients(one, nan, act, axis=0).isnan(), expected)
    assert coefficients(nan, one, act, axis=0).isnan().all()
    assert coefficients(one, one, act, nan, axis=0).isnan().all()


@every_activation
@every_dtype
def test_curvature_of_extreme_inputs_is_what_the_reference_gives(act: Activation, dtype: torch.dtype) -> None:
    sizes = [0.0, 1e-45, 1e-30, 1e-5, 0.05, 0.079, 0.08, 0.081, 1, 3, 6, 10, 19, 21, 40, 87, 89, 100, 500, 708, 1e4]
    sizes += [1e30, 3e38] * (dtype != torch.float16) + [1e-310, 1e150, 1e300] * (dtype == torch.float64)
    z = torch.tensor([sign * size for size in sizes for sign in (1, -1)], dtype=dtype)
    g = torch.linspace(0.5, 2, len(z), dtype=dtype)
    expected = reference.curvature_coefficients(*doubles(g, z), act, axis=0)
    assert expected.isfinite().all()
    assert_coefficients(coefficients(g, z, act, axis=0), expected)


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_curvature_near_a_zero_of_it_keeps_its_digits(dtype: torch.dtype, accuracy: float) -> None:
    z = torch.cat([sign * torch.logspace(-12, 0.5, 300, dtype=dtype) for sign in (1, -1)])
    t = torch.tanh(z.double())
    half = torch.tanh(z.double() / 2)
    for name, expected in (("tanh", -2 * t * (1 - t * t)), ("sigmoid", -0.25 * half * (1 - half * half))):
        C = coefficients(torch.ones_like(z), z, activation(name), axis=0).double()
        assert ((C - expected).abs() <= accuracy * expected.abs()).all(), name


def test_an_activation_without_a_formula_is_an_error() -> None:
    g = random_tensor(3, 2)
    square = Activation("square", lambda z: z * z, lambda z: 2 * z, lambda z: torch.full_like(z, 2))
    kinks = (Kink(0, 1), Kink(1, 1), Kink(2, 1))
    many = Activation("many", g.relu, g.relu, torch.zeros_like, kinks, formula=activation("relu").formula)
    for own in (square, many):
        with pytest.raises(RuntimeError, match=f"'triton' cannot be used: it has no formula for '{own.name}'"):
            coefficients(g, g, own)


WEIGHT_SHAPES = ((5,), (5, 7), (5, 40), (4, 3, 5), (4, 6, 3, 3), (3, 2, 1, 17), (3, 300))
COLUMNS: dict[str, Callable[[int], list[int]]] = {
    "reversed": lambda size: list(range(size))[::-1],
    "repeated": lambda size: [i // 2 for i in range(2 * size)],
    "unsorted": lambda size: [(7 * i + 3) % size for i in range(size + 5)],
    "one": lambda size: [size - 1],
    "none": lambda size: [],
}


def assert_grown(growth: Widening, label: object = "") -> Tensor:
    """Check a grown weight against the reference in float64, and that nothing else changed; return it."""
    tensors = [value for value in growth if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    (grown,) = operations.grow_weights([growth], backend="triton")
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in growth]
    expected = reference.grow_weight(*wide)
    assert (grown.shape, grown.dtype) == (expected.shape, growth.weight.dtype), label
    if grown.numel():
        unit = ROUNDING[grown.dtype]
        # Of the result, and of the float32 or float64 arithmetic before it.
        error = (grown.double() - expected).abs()
        allowed = unit * expected.abs() + 4 * min(unit, 2.0**-24) * expected.abs().max() + 2.0**-25 * (unit > 1e-6)
        assert (error <= allowed).all(), f"{label}: error {error.max()}"
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old), f"{label}: an argument was changed"
    return grown


def growths(shape: tuple[int, ...], dtype: torch.dtype, shifted: str, scaled: str) -> list[Widening]:
    """Return how a weight of this shape grows, with every choice of columns."""
    weight, rows = random_tensor(*shape, dtype=dtype), torch.tensor([*range(shape[0])[::-1], 0, 0, shape[0] - 1])
    M = len(rows)
    row_scale = random_tensor(M, dtype=dtype, seed=1) if "rows" in scaled else None
    shift = shift_rows = None
    if shifted == "one-after-the-other":
        shift = random_tensor(M, *shape[1:], dtype=dtype, seed=2)
    elif shifted == "by-rows":
        shift = random_tensor(2, *shape[1:], dtype=dtype, seed=2)
        shift_rows = torch.tensor([(-1, 1, 0)[i % 3] for i in range(M)])
    choices: list[Tensor | None] = [None]
    if len(shape) > 1:
        choices += [torch.tensor(choose(shape[1]), dtype=torch.int64) for choose in COLUMNS.values()]
    found = []
    for columns in choices:
        column_scale = None
        if "columns" in scaled and len(shape) > 1 and (columns is not None or len(shape) == 2):
            column_scale = random_tensor(shape[1] if columns is None else len(columns), dtype=dtype, seed=3)
        found.append(Widening(weight, rows, row_scale, shift, shift_rows, columns, column_scale, 0.3))
    return found


@every_dtype
@pytest.mark.parametrize("shifted", ["unshifted", "one-after-the-other", "by-rows"])
@pytest.mark.parametrize("scaled", ["", "rows", "columns", "rows-columns"])
def test_grown_weights_agree_with_the_reference(shifted: str, scaled: str, dtype: torch.dtype) -> None:
    sample = random.Random(f"{shifted} {scaled} {dtype}").sample
    for shape in WEIGHT_SHAPES:
        candidates = growths(shape, dtype, shifted, scaled)
        for growth in sample(candidates, min(2, len(candidates))):
            assert_grown(growth, (shape, growth.columns))


def test_columns_of_convolutions_are_scaled_whether_or_not_they_are_repeated() -> None:
    weight, rows = random_tensor(4, 3, 2, 2), torch.tensor([0, 3, 1])
    # What follows the scale in memory is no number.
    scale = embedded(random_tensor(3, seed=3))[1][2:].clone()[:3]
    for columns in (None, torch.arange(3)):
        assert_grown(Widening(weight, rows, columns=columns, column_scale=scale), columns)


def test_the_scale_of_a_shift_is_not_rounded() -> None:
    weight, rows = torch.zeros(3, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 2])
    shift = torch.ones(4, 5, dtype=torch.float64)
    for scale in (0.1, 1 / 3, 1e-300, 1e300, -2.5):
        for shift_rows in (None, torch.tensor([3, 2, 1, 0])):
            growth = Widening(weight, rows, shift=shift, shift_rows=shift_rows, shift_scale=scale)
            assert (assert_grown(growth) == scale).all(), scale


def test_weights_of_every_layout_agree_with_the_reference() -> None:
    layouts = cycle(LAYOUTS + LAYOUTS[::-1] + LAYOUTS[:1])
    for growth in growths((4, 6, 3), torch.float32, "by-rows", "rows-columns"):
        for _ in range(3):
            laid = [laid_out(x, next(layouts)) if isinstance(x, Tensor) else x for x in growth]
            assert_grown(Widening(*laid))


def test_many_weights_grow_in_one_call() -> None:
    given = [
        growth
        for shape, dtype in zip(WEIGHT_SHAPES, cycle(DTYPES))
        for growth in growths(shape, dtype, "by-rows", "rows")[:2]
    ]
    grown = operations.grow_weights(given, backend="triton")
    assert len(grown) == len(given)
    for weight, growth in zip(grown, given, strict=True):
        assert torch.equal(weight, assert_grown(growth))
    assert operations.grow_weights([], backend="triton") == []


@pytest.mark.parametrize(("name", "low", "high"), [("rows", 0, 5), ("shift_rows", -1, 2), ("columns", 0, 7)])
def test_an_index_out_of_range_is_an_error_before_anything_happens(
    name: str, low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, surgery, "grow_kernel")
    good = growths((5, 7), torch.float32, "by-rows", "rows-columns")[1]
    for index, at in product([low - 1, high, 10**12, -(10**12)], [0, -1]):
        bad = getattr(good, name).clone()
        bad[at] = index
        with pytest.raises(IndexError, match=rf"{name} must lie in \[{low}, {high}\)"):
            operations.grow_weights([good, good._replace(**{name: bad}), good], backend="triton")
    assert not launches
    assert_grown(good)


@pytest.mark.parametrize("name", ["row_scale", "shift", "shift_rows", "column_scale"])
def test_arguments_that_are_too_short_are_an_error(name: str) -> None:
    shifted = "by-rows" if name == "shift_rows" else "one-after-the-other"
    good = growths((5, 7), torch.float32, shifted, "rows-columns")[1]
    short = good._replace(**{name: getattr(good, name)[:-1]})
    for backend in ("cpu", "triton"):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            operations.grow_weights([short], backend=backend)


def test_columns_of_a_vector_are_an_error() -> None:
    growth = Widening(random_tensor(3), torch.tensor([0, 1]))
    for change in ({"columns": torch.tensor([0])}, {"column_scale": random_tensor(5)}):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            operations.grow_weights([growth._replace(**change)], backend="triton")
