"""Every backend agrees with the reference on what is computed entry by entry: curvature and grown weights."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from s3d_fast import Activation, activation, activation_names
from s3d_fast.backends.interface import Backend
from s3d_fast.maths.reference import Widening
from tests.backends.agreement import assert_agrees, kink_widths
from tests.cases import COMPUTE_DTYPES, DTYPES, LAYOUTS, embedded, laid_out, random_tensor, relative_error

# The interpreter of Triton computes with masked entries too, which may overflow or be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

new_and_inplace = pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in activation_names()),
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
ACTIVATIONS = {
    "-".join([name, *(f"{key}{value}" for key, value in options.items())]): activation(name, **options)
    for name, options in OPTIONS
}
every_activation = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
KINKED = {name: act for name, act in ACTIVATIONS.items() if act.kinks}
# The layout of memory and the formula do not depend on each other: one smooth activation and one with two kinks.
smooth_and_kinked = pytest.mark.parametrize("act", [ACTIVATIONS["silu"], ACTIVATIONS["relu6"]], ids=["silu", "relu6"])


def dtypes_of(backend: Backend) -> list[torch.dtype]:
    """Return the dtypes that a backend computes entries in."""
    return [dtype for dtype in DTYPES if not backend.why_not_dtype(dtype)]


def assert_curvature(
    backend: Backend,
    g: Tensor,
    z: Tensor,
    act: Activation,
    scale: Tensor | None = None,
    axis: int = 1,
    inplace: bool = False,
    label: object = "",
) -> Tensor:
    """Check coefficients against their definition; return them."""
    settings = {"activation": act, "scale": scale, "axis": axis, "inplace": inplace}
    return assert_agrees(backend, "curvature_coefficients", label=label, g=g, z=z, **settings)


@every_activation
def test_curvature_of_every_activation(backend: Backend, act: Activation) -> None:
    for dtype in dtypes_of(backend):
        g, z = random_tensor(61, 17, dtype=dtype), 4 * random_tensor(61, 17, dtype=dtype, seed=1)
        scale = random_tensor(17, dtype=dtype, seed=2)
        assert_curvature(backend, g, z, act, scale, label=dtype)


@pytest.mark.parametrize("act", [*KINKED.values(), ACTIVATIONS["silu"]], ids=[*KINKED, "silu"])
def test_curvature_with_kinks_at_the_scale_of_a_step(backend: Backend, act: Activation) -> None:
    for dtype in dtypes_of(backend):
        for shape, axis in (((61, 17), 1), ((61, 32), 1), ((3, 5, 7, 6), 1), ((2, 40, 3), 0), ((0, 3), 1)):
            g, z = random_tensor(*shape, dtype=dtype), 4 * random_tensor(*shape, dtype=dtype, seed=1)
            for whole in (None, shape):
                widths = kink_widths(math.prod(shape) // shape[axis], shape[axis], dtype, whole)
                for scale in (None, random_tensor(shape[axis], dtype=dtype, seed=2)):
                    settings = {"activation": act, "scale": scale, "axis": axis, "inplace": False, **widths}
                    assert_agrees(backend, "curvature_coefficients", label=(dtype, shape), g=g, z=z, **settings)


@every_activation
def test_slopes_of_every_activation(backend: Backend, act: Activation) -> None:
    for dtype in COMPUTE_DTYPES:
        for shape, axis in (((61, 17), 1), ((4, 5000), 1), ((3, 5, 7, 6), 1), ((2, 40, 3), 0), ((0, 3), 1)):
            z = 4 * random_tensor(*shape, dtype=dtype)
            for scale in (None, random_tensor(shape[axis], dtype=dtype, seed=2)):
                settings = {"activation": act, "scale": scale, "axis": axis}
                assert_agrees(backend, "activation_slopes", label=(dtype, shape), z=z, **settings)


@every_activation
def test_slopes_at_kinks_and_far_away(backend: Backend, act: Activation) -> None:
    # float32 holds these numbers exactly.
    z = torch.tensor([0.0, -0.0, 3, -3, 6, 2.0**20, -(2.0**20)], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        assert_agrees(backend, "activation_slopes", z=z.to(dtype), activation=act, scale=None, axis=0)


def test_a_width_of_one_over_the_sharpness_changes_nothing(backend: Backend) -> None:
    act, g, z = activation("relu6", sharpness=4.0), random_tensor(20, 7), 4 * random_tensor(20, 7, seed=1)
    settings = {"activation": act, "scale": None, "axis": 1, "inplace": False}
    row_norm, bandwidth = torch.full((20,), 0.5, dtype=torch.float64), torch.full((7,), 0.5, dtype=torch.float64)
    by_width = backend.curvature_coefficients(g=g, z=z, **settings, row_norm=row_norm, bandwidth=bandwidth)
    assert relative_error(by_width, backend.curvature_coefficients(g=g, z=z, **settings)) < 1e-14


def test_kinks_without_a_width_add_nothing(backend: Backend) -> None:
    for dtype in COMPUTE_DTYPES:
        tiny = torch.finfo(dtype).tiny
        z = torch.tensor([[0.0, 1e-30, -1.0, 1e30]] * 4, dtype=dtype)
        g, bandwidth = torch.ones_like(z), torch.ones(4, dtype=dtype)
        row_norm = torch.tensor([0.0, tiny / 4, tiny, 1.0], dtype=dtype)
        settings = {"scale": None, "axis": 1, "inplace": False, "row_norm": row_norm, "bandwidth": bandwidth}
        C = backend.curvature_coefficients(g=g, z=z, activation=activation("relu"), **settings)
        assert C.isfinite().all()
        assert not C[:2].any()
        smooth = activation("hardswish")
        C = backend.curvature_coefficients(g=g, z=z, activation=smooth, **settings)
        assert torch.equal(C[0], smooth.curvature(z[0]))


@every_activation
def test_curvature_of_extreme_inputs(backend: Backend, act: Activation) -> None:
    sizes = [0.0, 1e-45, 1e-30, 1e-5, 0.05, 0.079, 0.08, 0.081, 1, 3, 6, 10, 19, 21, 40, 87, 89, 100, 500, 708, 711]
    sizes += [1e4, 1e30, 3e38]
    for dtype, more in ((torch.float32, []), (torch.float64, [1e-310, 1e150, 1e300])):
        z = torch.tensor([sign * size for size in sizes + more for sign in (1, -1)], dtype=dtype)
        g = torch.linspace(0.5, 2, len(z), dtype=dtype)
        C = assert_curvature(backend, g, z, act, axis=0, label=dtype)
        assert C.isfinite().all()
        # At infinity the curvature is zero, unless the definition has no number for it.
        z = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
        expected = act.second(z)
        g = torch.ones_like(z)
        C = backend.curvature_coefficients(g=g, z=z, activation=act, scale=None, axis=0, inplace=False)
        known = expected.isfinite()
        assert (C[known] - expected[known]).abs().sum() < 1e-30


@every_activation
def test_curvature_of_nan_is_nan_where_the_definition_says_so(backend: Backend, act: Activation) -> None:
    for dtype in dtypes_of(backend):
        # As many NaN as fill several registers, and a remainder: in one row those of g, in one of z, in one of scale.
        g, z = torch.ones(4, 67, dtype=dtype), torch.zeros(4, 67, dtype=dtype)
        g[0], z[1] = torch.nan, torch.nan
        scale = torch.tensor([1, 1, torch.nan, 1], dtype=dtype)
        C = assert_curvature(backend, g, z, act, scale, axis=0, label=dtype)
        assert C[0].isnan().all()
        assert C[1].isnan().all() or act.name == "identity"
        assert C[2].isnan().all()
        assert C[3].isfinite().all()


@smooth_and_kinked
@new_and_inplace
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((37,), 0),
        ((61, 17), 1),
        ((61, 17), 0),
        ((3, 5, 7, 6), 1),
        ((2, 9, 1, 5), 3),
        ((5, 1), 1),
        # More than one block of a channel, and of a task.
        ((2, 3, 1400), 1),
        ((3, 6000), 0),
        ((0, 3), 1),
        ((3, 0), 1),
        ((2, 0, 4), 2),
    ],
    ids=str,
)
def test_curvature_of_every_shape(
    backend: Backend, act: Activation, inplace: bool, shape: tuple[int, ...], axis: int
) -> None:
    for dtype in COMPUTE_DTYPES:
        g, z = random_tensor(*shape, dtype=dtype), 4 * random_tensor(*shape, dtype=dtype, seed=1)
        for scale in (None, random_tensor(shape[axis], dtype=dtype, seed=2)):
            assert_curvature(backend, g.clone(), z, act, scale, axis, inplace, label=dtype)


@smooth_and_kinked
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_curvature_in_place_in_every_layout(backend: Backend, act: Activation, layout: str) -> None:
    z, scale = 4 * random_tensor(5, 7, 3, seed=1), random_tensor(7, seed=2)
    for z_layout in LAYOUTS:
        g, buffer = embedded(random_tensor(5, 7, 3), layout)
        if layout in ("contiguous", "transposed"):
            g = buffer = laid_out(random_tensor(5, 7, 3), layout)
        outside = buffer.isnan()
        assert_curvature(backend, g, laid_out(z, z_layout), act, scale, inplace=True, label=z_layout)
        assert torch.equal(buffer.isnan(), outside), "what surrounds g was changed"


def test_curvature_in_place_writes_nothing_but_its_output(backend: Backend) -> None:
    for size in (*range(1, 40), 1184):
        whole = torch.full((size + 16,), torch.nan, dtype=torch.float64)
        whole[8:-8] = random_tensor(size)
        z = random_tensor(size, seed=1)
        assert_curvature(backend, whole[8:-8], z, ACTIVATIONS["silu"], axis=0, inplace=True, label=size)
        assert whole[:8].isnan().all()
        assert whole[-8:].isnan().all()


WEIGHT_SHAPES = ((5,), (5, 7), (5, 40), (4, 3, 5), (4, 6, 3, 3), (3, 2, 1, 17), (3, 300))
COLUMNS: dict[str, Callable[[int], list[int]]] = {
    "reversed": lambda size: list(range(size))[::-1],
    "repeated": lambda size: [i // 2 for i in range(2 * size)],
    "unsorted": lambda size: [(7 * i + 3) % size for i in range(size + 5)],
    "grown": lambda size: [*range(size), 0, size - 1],
    "one": lambda size: [size - 1],
    "none": lambda size: [],
}


def widenings(shape: tuple[int, ...], dtype: torch.dtype, shifted: str, scaled: str) -> list[Widening]:
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
        if "columns" in scaled and len(shape) > 1:
            column_scale = random_tensor(shape[1] if columns is None else len(columns), dtype=dtype, seed=3)
        found.append(Widening(weight, rows, row_scale, shift, shift_rows, columns, column_scale, 0.3))
    return found


@pytest.mark.parametrize("shifted", ["unshifted", "one-after-the-other", "by-rows"])
@pytest.mark.parametrize("scaled", ["unscaled", "rows", "columns", "rows-columns"])
def test_weights_of_every_shape_grow_in_one_call(backend: Backend, shifted: str, scaled: str) -> None:
    for dtype in dtypes_of(backend):
        given = [widening for shape in WEIGHT_SHAPES for widening in widenings(shape, dtype, shifted, scaled)]
        # Only the loops of the extension depend on the dtype: by the length of their vectors.
        some = given if dtype == torch.float64 or backend.name == "cpu" else given[::5]
        assert_agrees(backend, "grow_weights", widenings=some, label=dtype)


def test_no_weights_grow_to_none(backend: Backend) -> None:
    assert backend.grow_weights([]) == []


def test_the_scale_of_a_shift_is_not_rounded(backend: Backend) -> None:
    weight, rows = torch.zeros(3, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 2])
    shift = torch.ones(4, 5, dtype=torch.float64)
    for scale in (0.1, 1 / 3, 1e-300, 1e300, -2.5):
        for shift_rows in (None, torch.tensor([3, 2, 1, 0])):
            (grown,) = backend.grow_weights([Widening(weight, rows, None, shift, shift_rows, shift_scale=scale)])
            assert (grown == scale).all(), scale


flags, layouts = st.booleans(), st.sampled_from(LAYOUTS)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    *(st.integers(1, 30), st.integers(0, 30), st.lists(flags, min_size=5, max_size=5), st.sampled_from(COMPUTE_DTYPES)),
    *(st.lists(layouts, min_size=7, max_size=7), st.randoms(use_true_random=False)),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_weights_of_any_shape_and_layout(
    backend: Backend,
    shape: list[int],
    rows: int,
    columns: int,
    options: list[bool],
    dtype: torch.dtype,
    chosen: list[str],
    rng: random.Random,
) -> None:
    has_row_scale, has_shift, has_shift_rows, has_columns, has_column_scale = options
    many = len(shape) > 1
    width = columns if has_columns else shape[1] if many else 0

    def index(count: int, low: int, high: int) -> Tensor:
        return torch.tensor([rng.randrange(low, high) for _ in range(count)], dtype=torch.int64)

    arguments = (
        random_tensor(*shape, dtype=dtype),
        index(rows, 0, shape[0]),
        random_tensor(rows, dtype=dtype, seed=1) if has_row_scale else None,
        random_tensor(3 if has_shift_rows else rows, *shape[1:], dtype=dtype, seed=2) if has_shift else None,
        index(rows, -1, 3) if has_shift and has_shift_rows else None,
        index(columns, 0, shape[1]) if has_columns and many else None,
        random_tensor(width, dtype=dtype, seed=3) if has_column_scale and many else None,
    )
    laid = [None if value is None else laid_out(value, layout) for value, layout in zip(arguments, chosen, strict=True)]
    assert_agrees(backend, "grow_weights", widenings=[Widening(*laid)])
