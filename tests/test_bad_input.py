"""Bad input: every error names the argument, what it got and what it wanted."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import s3d_fast as s3d
from s3d_fast.backends import choice, extension

X, C, V = torch.ones(6, 4), torch.ones(6, 3), torch.ones(3, 4)
IMAGE, IMAGE_C, IMAGE_V = torch.ones(2, 2, 5, 5), torch.ones(2, 3, 3, 3), torch.ones(3, 18)
POINTS, WINNER, POINTS_C, POINTS_V = (
    torch.ones(2, 5, 3),
    torch.zeros(2, 5, 4).long(),
    torch.ones(2, 5, 4),
    torch.ones(4, 6),
)

NOT_FINITE = [math.nan, math.inf, -math.inf]


def spoilt(tensor: Tensor, value: float) -> Tensor:
    """Return a copy of `tensor` with `value` as its last entry."""
    copy = tensor.clone()
    copy.view(-1)[-1] = value
    return copy


def conv(*tensors: Tensor) -> Tensor:
    return s3d.conv_matvec(*tensors, kernel_size=(3, 3))


def conv_operator(*tensors: Tensor) -> s3d.SplittingOperator:
    return s3d.ConvOperator(*tensors, kernel_size=(3, 3))


def kinks(**change: Tensor | None) -> Tensor:
    widths = {"row_norm": torch.ones(6), "bandwidth": torch.ones(3)}
    return s3d.curvature_coefficients(C, C, s3d.activation("relu"), **{**widths, **change})


def test_valid_input_is_accepted() -> None:
    kinks()
    s3d.splitting_matvec(X, C, V)
    conv(IMAGE, IMAGE_C, IMAGE_V)
    s3d.edgeconv_matvec(POINTS, WINNER, POINTS_C, POINTS_V)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kinks(row_norm=None), "row_norm and bandwidth must be given together"),
        (lambda: kinks(row_norm=torch.ones(5)), r"row_norm must have shape \(6\), got \(5,\)"),
        (lambda: kinks(bandwidth=torch.ones(6)), r"bandwidth must have shape \(3\), got \(6,\)"),
        (lambda: s3d.splitting_matvec(X[0], C, V), r"X must have shape \(N, D\), got \(4,\)"),
        (lambda: s3d.splitting_matvec(X, C[:5], V), r"C must have shape \(6, M\), got \(5, 3\)"),
        (lambda: s3d.splitting_matvec(X, C[0], V), r"C must have shape \(6, M\), got \(3,\)"),
        (lambda: s3d.splitting_matvec(X, C, V[:2]), r"V must have shape \(3, 4\), got \(2, 4\)"),
        (lambda: s3d.splitting_matvec(X, C, V[:, :3]), r"V must have shape \(3, 4\), got \(3, 3\)"),
        (lambda: s3d.splitting_matvec(X, C, V[0]), r"V must have shape \(3, 4\), got \(4,\)"),
        (lambda: s3d.splitting_matvec(X, C, V, bias=True), r"V must have shape \(3, 5\), got \(3, 4\)"),
        (lambda: s3d.splitting_matvec(X, C, V.expand(2, 2, 3, 4)), r"V must have shape .*3, 4\), got \(2, 2, 3, 4\)"),
        (lambda: s3d.splitting_matvec(X, C, V[:2].expand(7, 2, 4)), r"V must have shape \(K, 3, 4\), got \(7, 2, 4\)"),
        (lambda: s3d.splitting_matrices(X, C[:5]), r"C must have shape \(6, M\), got \(5, 3\)"),
        (lambda: s3d.PointwiseOperator(X, C[:5]), r"C must have shape \(6, M\), got \(5, 3\)"),
        (lambda: s3d.PointwiseOperator(X, C).matvec(V[:2]), r"V must have shape \(3, 4\), got \(2, 4\)"),
        (lambda: s3d.extremal_eigenpairs((X, C[:5])), r"C must have shape \(6, M\), got \(5, 3\)"),
    ],
)
def test_shapes_of_rows_must_match(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: conv(IMAGE[0], IMAGE_C, IMAGE_V), r"X must have shape \(B, I, H, W\), got \(2, 5, 5\)"),
        (lambda: conv(IMAGE, IMAGE_C[:1], IMAGE_V), r"C must have shape \(2, M, 3, 3\), got \(1, 3, 3, 3\)"),
        (lambda: conv(IMAGE, IMAGE, IMAGE_V), r"C must have shape \(2, M, 3, 3\), got \(2, 2, 5, 5\)"),
        (lambda: conv(IMAGE, IMAGE_C, IMAGE_V[:, :-1]), r"V must have shape \(3, 18\), got \(3, 17\)"),
        (
            lambda: conv(IMAGE[..., :2], IMAGE_C, IMAGE_V),
            r"X must be at least as large as the kernel, got \(2, 2, 5, 2\)",
        ),
        (lambda: conv_operator(IMAGE, IMAGE), r"C must have shape \(2, M, 3, 3\), got \(2, 2, 5, 5\)"),
        (
            lambda: s3d.ConvOperator(IMAGE, IMAGE_C, kernel_size=(3, 3), stride=(2, 2)),
            r"C must have shape \(2, M, 2, 2\), got \(2, 3, 3, 3\)",
        ),
    ],
)
def test_shapes_of_a_convolution_must_match(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: s3d.edgeconv_matvec(X, WINNER, POINTS_C, POINTS_V), r"X must have shape \(B, P, F\), got \(6, 4\)"),
        (
            lambda: s3d.edgeconv_matvec(POINTS, WINNER, POINTS_C[:, 1:], POINTS_V),
            r"C must have shape \(2, 5, M\), got \(2, 4, 4\)",
        ),
        (
            lambda: s3d.edgeconv_matvec(POINTS, WINNER[..., :3], POINTS_C, POINTS_V),
            r"winner must have shape \(2, 5, 4\), got \(2, 5, 3\)",
        ),
        (
            lambda: s3d.edgeconv_matvec(POINTS, WINNER, POINTS_C, POINTS_V[:, :3]),
            r"V must have shape \(4, 6\), got \(4, 3\)",
        ),
        (
            lambda: s3d.EdgeConvOperator(POINTS, WINNER, POINTS_C[..., :3]),
            r"winner must have shape \(2, 5, 3\), got \(2, 5, 4\)",
        ),
        (
            lambda: s3d.EdgeConvOperator(POINTS, WINNER + 5, POINTS_C),
            r"winner must lie in \[0, 5\), got indices from 5 to 5",
        ),
        (
            lambda: s3d.EdgeConvOperator(POINTS, spoilt(WINNER, -1), POINTS_C),
            r"winner must lie in \[0, 5\), got indices from -1 to 0",
        ),
    ],
)
def test_shapes_and_indices_of_an_edgeconv_must_match(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: s3d.splitting_matvec(X, C.double(), V), r"C must be torch\.float32 .*X.* got torch\.float64"),
        (lambda: s3d.splitting_matvec(X, C, V.double()), r"V must be torch\.float32 .*X.* got torch\.float64"),
        (lambda: s3d.splitting_matvec(X.half(), C, V), r"C must be torch\.float16 .*X.* got torch\.float32"),
        (lambda: s3d.splitting_matvec(X.half(), C.half(), V.half()), r"V must be torch\.float32 .* got torch\.float16"),
        (lambda: s3d.splitting_matvec(X.long(), C, V), r"X must be float32.*got torch\.int64"),
        (lambda: s3d.splitting_matvec(X, C.to(torch.complex64), V), r"C must be float32.*got torch\.complex64"),
        (lambda: s3d.splitting_matvec(X.tolist(), C, V), r"X must be a torch\.Tensor, got list"),
        (lambda: s3d.splitting_matvec(X, C, None), r"V must be a torch\.Tensor, got NoneType"),
        (lambda: s3d.splitting_matrices(X, C.double()), r"C must be torch\.float32 .*got torch\.float64"),
        (lambda: s3d.PointwiseOperator(X.double(), C), r"C must be torch\.float64 .*got torch\.float32"),
        (lambda: conv(IMAGE, IMAGE_C.double(), IMAGE_V), r"C must be torch\.float32 .*got torch\.float64"),
        (
            lambda: s3d.EdgeConvOperator(POINTS, WINNER.short(), POINTS_C),
            r"winner must be an int32 or int64 tensor, got torch\.int16",
        ),
        (
            lambda: s3d.EdgeConvOperator(POINTS, WINNER.tolist(), POINTS_C),
            r"winner must be an int32 or int64 tensor, got list",
        ),
        (
            lambda: s3d.curvature_coefficients(C, C.double(), s3d.activation("silu")),
            r"z must be torch\.float32 .*g.* got torch\.float64",
        ),
    ],
)
def test_dtypes_must_match(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: s3d.splitting_matvec(X, C.to("meta"), V), r"C must be on cpu like X, got meta"),
        (lambda: s3d.splitting_matvec(X, C, V.to("meta")), r"V must be on cpu like X, got meta"),
        (lambda: s3d.splitting_matvec(X.to("meta"), C, V), r"C must be on meta like X, got cpu"),
        (lambda: conv(IMAGE, IMAGE_C.to("meta"), IMAGE_V), r"C must be on cpu like X, got meta"),
        (
            lambda: s3d.EdgeConvOperator(POINTS, WINNER.to("meta"), POINTS_C),
            r"winner must be on cpu like X, got meta",
        ),
        (lambda: s3d.PointwiseOperator(X, C.to("meta")), r"C must be on cpu like X, got meta"),
        (
            lambda: s3d.curvature_coefficients(C, C.to("meta"), s3d.activation("silu")),
            r"z must be on cpu like g, got meta",
        ),
        (
            lambda: s3d.curvature_coefficients(C, C, s3d.activation("silu"), torch.ones(3, device="meta")),
            r"scale must be on cpu like g, got meta",
        ),
    ],
)
def test_devices_must_match(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    "call",
    [
        s3d.splitting_matrices,
        s3d.PointwiseOperator,
        lambda x, c: s3d.splitting_matvec(x, c, V),
        lambda x, c: s3d.extremal_eigenpairs((x, c)),
    ],
    ids=["matrices", "operator", "matvec", "eigenpairs"],
)
def test_rows_must_be_finite(call: Callable[[Tensor, Tensor], object], value: float) -> None:
    with pytest.raises(ValueError, match=r"X must be finite, got 1 NaN or Inf entries of 24"):
        call(spoilt(X, value), C)
    with pytest.raises(ValueError, match=r"C must be finite, got 1 NaN or Inf entries of 18"):
        call(X, spoilt(C, value))


@pytest.mark.parametrize("value", NOT_FINITE)
def test_images_and_points_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="X must be finite, got 1 NaN or Inf"):
        conv_operator(spoilt(IMAGE, value), IMAGE_C)
    with pytest.raises(ValueError, match="C must be finite, got 1 NaN or Inf"):
        conv_operator(IMAGE, spoilt(IMAGE_C, value))
    with pytest.raises(ValueError, match="X must be finite, got 1 NaN or Inf"):
        s3d.EdgeConvOperator(spoilt(POINTS, value), WINNER, POINTS_C)
    with pytest.raises(ValueError, match="C must be finite, got 1 NaN or Inf"):
        s3d.EdgeConvOperator(POINTS, WINNER, spoilt(POINTS_C, value))


def test_opposite_infinities_do_not_hide_each_other() -> None:
    with pytest.raises(ValueError, match="X must be finite, got 2 NaN or Inf"):
        s3d.PointwiseOperator(spoilt(spoilt(X.flip(0, 1), math.inf).flip(0, 1), -math.inf), C)


def test_finite_rows_whose_sum_overflows_are_accepted() -> None:
    large = torch.full((6, 4), torch.finfo(torch.float16).max, dtype=torch.float16)
    s3d.PointwiseOperator(large, C.half())


def test_the_check_for_infinities_can_be_turned_off() -> None:
    bad = spoilt(X, math.nan)
    assert bool(s3d.splitting_matvec(bad, C, V, check_finite=False).isnan().any())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: s3d.PointwiseOperator(X[:0], C[:0]), "X"),
        (lambda: s3d.PointwiseOperator(X[:, :0], C), "X"),
        (lambda: s3d.PointwiseOperator(X, C[:, :0]), "C"),
        (lambda: conv_operator(IMAGE[:0], IMAGE_C[:0]), "X"),
        (lambda: conv_operator(IMAGE, IMAGE_C[:, :0]), "C"),
        (lambda: s3d.EdgeConvOperator(POINTS[:0], WINNER[:0], POINTS_C[:0]), "X"),
        (lambda: s3d.EdgeConvOperator(POINTS[:, :0], WINNER[:, :0], POINTS_C[:, :0]), "X"),
        (lambda: s3d.extremal_eigenpairs((X[:0], C[:0])), "X"),
    ],
)
def test_an_operator_needs_data(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must not be empty, got shape \(.*0.*\)"):
        call()


def test_a_sum_needs_terms_of_one_shape_and_a_weight_for_each() -> None:
    operator = s3d.PointwiseOperator(X, C)
    with pytest.raises(ValueError, match=r"terms must hold at least one operator, got none"):
        s3d.SumOperator([])
    with pytest.raises(ValueError, match=r"weights must have 2 entries, one per term; got 1"):
        s3d.SumOperator([operator, operator], [1.0])
    with pytest.raises(ValueError, match=r"terms must agree in shape.*D=4.*D=5"):
        s3d.SumOperator([operator, s3d.PointwiseOperator(X, C, bias=True)])
    with pytest.raises(ValueError, match=r"terms must agree in shape, dtype.*float32.*float64"):
        s3d.SumOperator([operator, s3d.PointwiseOperator(X.double(), C.double())])


def test_a_sum_is_made_of_operators() -> None:
    with pytest.raises(TypeError, match=r"terms must .*got Tensor"):
        s3d.SumOperator([X, X])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda act: s3d.curvature_coefficients(C[0], C[0], act), r"axis must be a dimension of g, .*\(3,\); got 1"),
        (lambda act: s3d.curvature_coefficients(C, C[:5], act), r"z must have shape \(6, 3\), got \(5, 3\)"),
        (lambda act: s3d.curvature_coefficients(C, C, act, torch.ones(2)), r"scale must have shape \(3\), got \(2,\)"),
    ],
)
def test_coefficients_need_matching_shapes(call: Callable[[s3d.Activation], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(s3d.activation("silu"))


def test_coefficients_need_tensors_and_an_activation() -> None:
    with pytest.raises(TypeError, match=r"scale must be a torch\.Tensor, got list"):
        s3d.curvature_coefficients(C, C, s3d.activation("silu"), [1.0, 1.0, 1.0])
    with pytest.raises(TypeError, match=r"activation must .*got str"):
        s3d.curvature_coefficients(C, C, "silu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kernel_size", (3,)),
        ("kernel_size", (0, 3)),
        ("stride", (1, 1, 1)),
        ("stride", (0, 1)),
        ("padding", (1,)),
        ("padding", (-1, 0)),
        ("dilation", (1, 1, 1)),
        ("dilation", (1, 0)),
    ],
    ids=str,
)
def test_the_geometry_of_a_convolution_must_be_pairs_of_counts(name: str, value: tuple[int, ...]) -> None:
    geometry = {"kernel_size": (3, 3), name: value}
    with pytest.raises(ValueError, match=rf"{name} must .*got {re.escape(str(value))}"):
        s3d.ConvOperator(IMAGE, IMAGE_C, **geometry)
    with pytest.raises(ValueError, match=rf"{name} must .*got {re.escape(str(value))}"):
        s3d.conv_matvec(IMAGE, IMAGE_C, IMAGE_V, **geometry)


@pytest.mark.parametrize("c", [0.99, 0, -2, math.nan, math.inf, True, None, "2"], ids=repr)
def test_the_weight_bound_must_be_a_number_of_at_least_one(c: Any) -> None:
    with pytest.raises(ValueError, match=r"c must be a finite number >= 1, got "):
        s3d.split_gain(-1.0, 1.0, 2, c)
    with pytest.raises(ValueError, match=r"c must be a finite number >= 1, got "):
        s3d.optimal_split(torch.zeros(1), torch.ones(1, 1), torch.zeros(1), torch.ones(1, 1), 2, c)


@pytest.mark.parametrize("m", [0, 1, 5, -2, 2.5, None, True, "2"], ids=repr)
def test_copies_must_be_two_three_or_four(m: Any) -> None:
    with pytest.raises(ValueError, match=r"m must be 2, 3 or 4, got "):
        s3d.split_gain(-1.0, 1.0, m, 2.0)
    with pytest.raises(ValueError, match=r"m must be 2, 3 or 4, got "):
        s3d.optimal_split(torch.zeros(1), torch.ones(1, 1), torch.zeros(1), torch.ones(1, 1), m, 2.0)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_eigenvalues_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"lambda_min must be finite, got 1 NaN or Inf"):
        s3d.split_gain(torch.tensor([-1.0, value]), torch.tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match=r"lambda_max must be finite, got 1 NaN or Inf"):
        s3d.split_gain(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, value]))


def test_eigenvalues_must_be_in_order_and_of_one_shape() -> None:
    with pytest.raises(ValueError, match=r"lambda_min must not exceed lambda_max, got 2 > 1 at neuron 1"):
        s3d.split_gain(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match=r"lambda_max must have shape \(2\), got \(3,\)"):
        s3d.split_gain(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("at", [1, 3], ids=["v_min", "v_max"])
@pytest.mark.parametrize("shape", [(2,), (3, 4), (2, 5, 4)], ids=str)
def test_vectors_must_match_the_eigenvalues_in_shape(at: int, shape: tuple[int, ...]) -> None:
    arguments = [torch.zeros(2), torch.ones(2, 4), torch.zeros(2), torch.ones(2, 4)]
    arguments[at] = torch.ones(shape)
    with pytest.raises(ValueError, match=r"v_(min|max) must have shape \(2, \d\), got "):
        s3d.optimal_split(*arguments)


@pytest.mark.parametrize("at", [1, 3], ids=["v_min", "v_max"])
def test_vectors_must_be_finite_and_of_the_dtype_of_the_eigenvalues(at: int) -> None:
    name = "v_min" if at == 1 else "v_max"
    arguments = [torch.zeros(2), torch.ones(2, 4), torch.zeros(2), torch.ones(2, 4)]
    arguments[at] = torch.ones(2, 4).double()
    with pytest.raises(TypeError, match=rf"{name} must be torch\.float32 .* got torch\.float64"):
        s3d.optimal_split(*arguments)
    arguments[at] = spoilt(torch.ones(2, 4), math.nan)
    with pytest.raises(ValueError, match=rf"{name} must be finite, got 1 NaN"):
        s3d.optimal_split(*arguments)


@pytest.mark.parametrize("name", ["tol", "step"])
@pytest.mark.parametrize("value", [0, -1e-3, math.nan, math.inf, None, "1"], ids=repr)
def test_tolerance_and_step_must_be_positive(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a finite number > 0, got "):
        s3d.extremal_eigenpairs((X, C), **{name: value})


@pytest.mark.parametrize("value", [0, -3, 1.5, True], ids=repr)
def test_max_iters_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ValueError, match=r"max_iters must be an integer >= 1, got "):
        s3d.extremal_eigenpairs((X, C), max_iters=value)


def test_an_unknown_solver_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"solver must be one of 'lanczos', 'auto', 'rayleigh', 'exact'; got 'power'"):
        s3d.extremal_eigenpairs((X, C), solver="power")


@pytest.mark.parametrize(
    ("operator", "got"),
    [("layer", "str"), (3, "int"), (None, "NoneType"), ([X, C], "Tensor"), ((X,), "Tensor"), ({"a": X}, "Tensor")],
)
def test_an_argument_that_is_no_operator_is_an_error(operator: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"operator must .*got {got}"):
        s3d.extremal_eigenpairs(operator)


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: s3d.splitting_matvec(X, C, V, backend=backend),
        lambda backend: s3d.splitting_matrices(X, C, backend=backend),
        lambda backend: s3d.conv_matvec(IMAGE, IMAGE_C, IMAGE_V, kernel_size=(3, 3), backend=backend),
        lambda backend: s3d.edgeconv_matvec(POINTS, WINNER, POINTS_C, POINTS_V, backend=backend),
        lambda backend: s3d.curvature_coefficients(C, C, s3d.activation("silu"), backend=backend),
        lambda backend: s3d.extremal_eigenpairs((X, C), backend=backend),
    ],
    ids=["splitting_matvec", "splitting_matrices", "conv_matvec", "edgeconv_matvec", "coefficients", "eigenpairs"],
)
class TestBackend:
    """Functions with an argument `backend` refuse a backend that is unknown or not available."""

    def test_an_unknown_backend_is_an_error(self, call: Callable[[str], object]) -> None:
        with pytest.raises(ValueError, match=r"backend must be one of 'auto', 'reference'.*got 'mps'"):
            call("mps")

    def test_the_error_without_the_extension_says_how_to_build_it(
        self, call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(extension, "module", None)
        monkeypatch.setattr(extension, "why_not", "the C++ extension s3d_fast._C was not built")
        with pytest.raises(RuntimeError, match=r"'cpu' cannot be used: .* was not built; build it with .*pip install"):
            call("cpu")
        call("auto")

    def test_the_error_without_the_interpreter_says_how_to_enable_it(
        self, call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(choice, "is_interpreted", lambda: False)
        wanted = r"backend 'triton' cannot be used: .*interpreted only: set TRITON_INTERPRET=1"
        with pytest.raises(RuntimeError, match=wanted):
            call("triton")
        call("auto")

    def test_the_error_without_triton_says_how_to_install_it(
        self, call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match=r"'triton' cannot be used: Triton is not installed; pip install triton"):
            call("triton")
        call("auto")
