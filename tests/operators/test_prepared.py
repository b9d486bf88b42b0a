"""Rows that zeros follow: who counts as such, and that products with them are the same without copies at every step."""

from __future__ import annotations

import copy

import pytest
import torch

import s3d_fast as s3d
from s3d_fast.base.padding import is_padded, padded_size, with_padding
from s3d_fast.kernels import aligned as kernels_aligned
from s3d_fast.kernels import gated, grouped, pointwise, products
from s3d_fast.kernels.options import triton_options
from s3d_fast.maths import reference
from s3d_fast.operators import DepthwiseOperator, EdgeConvOperator, GatedOperator, PointwiseOperator, SumOperator
from s3d_fast.operators.prepared import prepared_where_faster
from tests.cases import RowsCase, doubles, random_tensor, random_vectors, relative_error
from tests.kernel_cases import pretend, recorded

pytest.importorskip("triton")
# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]

# Of two bfloat16 products that sum few numbers, relative to the largest entry (docs/gpu.md).
BOUND = 2.0**-15


@pytest.mark.parametrize("shape", [(5, 3), (7, 16), (2, 3, 20), (1, 1), (0, 5)])
def test_a_padded_copy_has_the_same_entries_and_zeros_behind_its_rows(shape: tuple[int, ...]) -> None:
    X = random_tensor(*shape)
    padded = with_padding(X)
    assert torch.equal(padded, X)
    assert is_padded(padded)
    assert padded.stride(-2) == padded_size(shape[-1])
    behind = padded.as_strided((*shape[:-1], padded_size(shape[-1])), padded.stride())
    assert torch.equal(behind[..., shape[-1] :], torch.zeros_like(behind[..., shape[-1] :]))


@pytest.mark.parametrize("shape", [(1, 17), (1, 1, 17), (1, 32), (5, 17), (2, 3, 17)], ids=str)
@pytest.mark.parametrize(("form", "dtype"), [("bf16x2", torch.bfloat16), ("bf16x3", torch.float16)])
def test_prepared_rows_are_not_copied_again(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    X = random_tensor(*shape[:-1], shape[-1] + 4, dtype=dtype)[..., 2:-2]
    own = kernels_aligned.prepared(form, X, True)
    assert kernels_aligned.prepared_bytes(form, X, True) > 0
    assert kernels_aligned.prepared_bytes(form, own, True) == 0
    assert torch.equal(own, X)


def test_a_single_row_gets_the_stride_of_its_shape() -> None:
    X = random_tensor(5, 36, dtype=torch.bfloat16)[2:3, 2:34]
    assert X.is_contiguous()
    padded = with_padding(X)
    assert padded.stride() == (32, 1)
    assert torch.equal(padded, X)


def test_rows_of_a_padded_copy_are_padded_and_other_views_and_copies_are_not() -> None:
    padded = with_padding(random_tensor(12, 20))
    assert all(map(is_padded, (padded[2:5], padded[::2], padded[:, 4:], padded.view(3, 4, 20), *padded.split(5))))
    others = [padded[:, :19], padded[:, 4:19], padded.mT, padded.clone(), padded + 0, padded.contiguous()]
    assert not any(map(is_padded, [*others, random_tensor(12, 20), random_tensor(12, 32)[:, :20]]))


def test_a_view_of_a_wider_matrix_with_other_numbers_behind_it_is_not_believed() -> None:
    # Aligned, and readable to a multiple of 16, but what follows is not zero.
    whole = torch.full((50, 32), float("nan"), dtype=torch.bfloat16)
    X, C, V = whole[:, :20], random_tensor(50, 16, dtype=torch.bfloat16), random_vectors(16, 20, dtype=torch.bfloat16)
    X.copy_(random_tensor(50, 20, seed=1))
    SV = s3d.splitting_matvec(X, C, V, backend="triton")
    assert relative_error(SV, reference.splitting_matvec(*doubles(X, C, V), False)) < BOUND


@pytest.mark.parametrize("vendor", ["nvidia", "hopper", "amd"])
@pytest.mark.parametrize("K", [0, 3], ids=["one-vector", "three-vectors"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_chunks_of_copied_rows_add_up_to_the_product(
    vendor: str, K: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vendor)
    monkeypatch.setattr(kernels_aligned, "LEAST_ROWS", 32)
    launches = recorded(monkeypatch, pointwise, "fused_kernel")
    case = RowsCase(150, 19, 21, torch.bfloat16, bias, K)
    (X, C), V = case.tensors(), case.vectors()
    with triton_options(scratch_bytes=64 * (32 + 32) * 2):
        SV = s3d.splitting_matvec(X, C, V, bias=bias, backend="triton")
    assert len(launches) == 3
    assert all(entry.arguments["WHOLE"] for entry in launches)
    assert relative_error(SV, reference.splitting_matvec(*doubles(X, C, V), bias)) < BOUND


def test_float32_rows_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "nvidia")
    launches = recorded(monkeypatch, pointwise, "fused_kernel")
    case = RowsCase(70, 19, 21)
    s3d.splitting_matvec(*case.tensors(), case.vectors(), backend="triton")
    s3d.splitting_matvec(*map(with_padding, case.tensors()), case.vectors(), backend="triton")
    assert [entry.arguments["WHOLE"] for entry in launches] == [False, True]


def test_operators_get_copies_once_and_their_parts_too() -> None:
    X, C = random_tensor(90, 19, dtype=torch.bfloat16), random_tensor(90, 21, dtype=torch.bfloat16, seed=1)
    plain = PointwiseOperator(X, C, bias=True)
    (own,) = prepared_where_faster([plain], "triton")
    assert plain.X is X
    assert plain.C is C
    assert all(map(is_padded, (own.X, own.C)))
    assert own.nbytes == plain.nbytes
    (again,) = prepared_where_faster([own], "triton")
    assert again.X is own.X
    assert again.C is own.C
    part = own.restrict(torch.tensor([3, 0, 20]))
    assert is_padded(part.C)
    V = random_vectors(3, 20, dtype=torch.float32)
    expected = plain.restrict(torch.tensor([3, 0, 20])).matvec(V, "reference")
    assert relative_error(part.matvec(V, "triton"), expected) < BOUND
    assert torch.equal(part.matvec(V, "reference"), expected)


def test_only_kernels_for_gpus_get_copies() -> None:
    operator = PointwiseOperator(random_tensor(9, 3), random_tensor(9, 5))
    for backend in ("auto", "reference"):
        assert prepared_where_faster([operator], backend) == [operator]
    double = PointwiseOperator(random_tensor(9, 3, dtype=torch.float64), random_tensor(9, 5, dtype=torch.float64))
    multiple = PointwiseOperator(random_tensor(9, 16), random_tensor(9, 32))
    assert prepared_where_faster([double, multiple], "triton") == [double, multiple]


def test_operators_stay_as_they_are_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = PointwiseOperator(random_tensor(9, 3), random_tensor(9, 5))
    monkeypatch.setattr("s3d_fast.operators.prepared._has_room", lambda *_: False)
    assert prepared_where_faster([operator], "triton") == [operator]


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_every_form_agrees_with_the_reference_after_it_was_prepared(dtype: torch.dtype, precision: str) -> None:
    X, C = random_tensor(60, 19, dtype=dtype), random_tensor(60, 21, dtype=dtype, seed=1)
    edges = random_tensor(3, 20, 5, dtype=dtype), torch.randint(20, (3, 20, 21)), C.view(3, 20, 21)
    operators = [
        PointwiseOperator(X, C, bias=True),
        GatedOperator(X, C, C * C, bias=True),
        EdgeConvOperator(*edges, bias=True),
        SumOperator([PointwiseOperator(X, C), PointwiseOperator(2 * X, C)], [1.0, 0.5]),
    ]
    with triton_options(precision=precision):
        for plain, own in zip(operators, prepared_where_faster(operators, "triton"), strict=True):
            assert own is not plain
            V = random_vectors(*plain.shape, dtype=dtype)
            error = relative_error(own.matvec(V, "triton"), plain.matvec(V, "reference"))
            # float16 rows have two planes: one more product of planes is left out.
            assert error < (2 * BOUND if dtype == torch.float16 else BOUND), plain


def test_planes_are_carried_by_the_operator_of_the_solver_alone() -> None:
    X, C = random_tensor(50, 19, dtype=torch.float32), random_tensor(50, 21, dtype=torch.float32, seed=1)
    plain = PointwiseOperator(X, C)
    with triton_options(precision="high"):
        (own,) = prepared_where_faster([plain], "triton")
        assert kernels_aligned.ready_planes("bf16x6", X) is None
        planes = kernels_aligned.ready_planes("bf16x6", own.X)
        (again,) = prepared_where_faster([own], "triton")
    # Three planes hold every bit of float32.
    assert torch.equal(planes.double().sum(0), X.double())
    assert planes.dtype == torch.bfloat16
    assert is_padded(planes)
    assert own.X.data_ptr() == X.data_ptr()
    assert again.X is own.X
    # Other forms make planes of their own.
    assert kernels_aligned.ready_planes("bf16x1", own.X) is None
    assert kernels_aligned.ready_planes("bf16x6", own.X[:20]) is None


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "highest"), (torch.float16, "highest"), (torch.float32, "high"), (torch.float32, "medium")],
    ids=["bf16", "fp16", "fp32-high", "fp32-medium"],
)
def test_a_solver_copies_rows_before_its_first_step_and_never_again(
    dtype: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "hopper")
    operators = [
        PointwiseOperator(random_tensor(200, D, dtype=dtype), random_tensor(200, M, dtype=dtype))
        for D, M in ((19, 21), (35, 7))
    ]
    copies: list[int] = []
    for name in ("with_padding", "split_rows"):
        own = getattr(kernels_aligned, name)
        noted = lambda *given, own=own: copies.append(given[-1].shape[1]) or own(*given)  # noqa: E731
        monkeypatch.setattr(kernels_aligned, name, noted)
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    with triton_options(precision=precision):
        spectra = s3d.extremal_eigenpairs(operators, solver="lanczos", tol=1e-2, backend="triton")
    assert len(launches) > 2
    assert all(entry.arguments["WHOLE"] for entry in launches)
    assert sorted(copies) == [7, 19, 21, 35]
    for operator, spectrum in zip(operators, spectra, strict=True):
        values = torch.linalg.eigvalsh(operator.dense("reference").double())
        size = values.abs().amax(1)
        assert ((spectrum.lambda_min - values[:, 0]).abs() <= 2e-2 * size).all()
        assert ((spectrum.lambda_max - values[:, -1]).abs() <= 2e-2 * size).all()


def test_gated_units_with_several_vectors_agree_whatever_their_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "nvidia")
    launches = recorded(monkeypatch, gated, "gated_kernel")
    X, C = random_tensor(60, 19, dtype=torch.bfloat16), random_tensor(60, 21, dtype=torch.bfloat16, seed=1)
    operator = GatedOperator(X, C, C * C, C + C)
    V = torch.stack([random_vectors(*operator.shape, dtype=torch.float32, seed=seed) for seed in range(2)])
    expected = operator.matvec(V, "reference")
    for own in (operator, *prepared_where_faster([copy.copy(operator)], "triton")):
        assert relative_error(own.matvec(V, "triton"), expected) < BOUND
    assert all(entry.arguments["WHOLE"] for entry in launches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_views_of_prepared_rows_are_known_in_inference_mode(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "hopper")
    with torch.inference_mode(), triton_options(precision="high"):
        X, C = random_tensor(90, 19, dtype=dtype), random_tensor(90, 21, dtype=dtype, seed=1)
        (own,) = prepared_where_faster([PointwiseOperator(X, C)], "triton")
        clouds = PointwiseOperator(X, C).X.view(3, 30, 19)
        edges = EdgeConvOperator(clouds, torch.randint(30, (3, 30, 21)), C.view(3, 30, 21))
        (prepared,) = prepared_where_faster([edges], "triton")
        assert kernels_aligned.ready_planes(products.current_form(X), prepared.X) is not None
        launches = recorded(monkeypatch, grouped, "grouped_kernel")
        grouped.splitting_matvec_grouped([grouped.Member(own.X, own.C, random_vectors(21, 19, dtype=dtype), False)])
        assert [entry.arguments["WHOLE"] for entry in launches] == [True]


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_rows_in_any_order_are_multiplied(precision: str) -> None:
    X, C, V = (
        random_tensor(40, 70, dtype=torch.float32),
        random_tensor(70, 5, dtype=torch.float32),
        random_vectors(5, 40),
    )
    with triton_options(precision=precision):
        SV = s3d.splitting_matvec(X.mT, C, V.float(), backend="triton")
    assert relative_error(SV, reference.splitting_matvec(*doubles(X.mT, C, V), False)) < 1e-6


def test_permuted_clouds_are_copied_before_the_first_product_only() -> None:
    # Aligned, but no view of all points as one matrix.
    X = random_tensor(3, 32, 16, dtype=torch.bfloat16).permute(0, 2, 1)
    winner, C = torch.randint(16, (3, 16, 5)), random_tensor(3, 16, 5, dtype=torch.bfloat16, seed=1)
    plain = EdgeConvOperator(X, winner, C)
    (own,) = prepared_where_faster([plain], "triton")
    assert kernels_aligned.ready_planes("bf16x2", plain.X) is None
    assert kernels_aligned.ready_planes("bf16x2", own.X) is not None
    V = random_vectors(*plain.shape, dtype=torch.float32)
    assert relative_error(own.matvec(V, "triton"), plain.matvec(V, "reference")) < BOUND


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_copies_of_clouds_and_images_take_no_more_than_the_scratch_memory(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    own = kernels_aligned.split_rows
    monkeypatch.setattr(kernels_aligned, "split_rows", lambda form, X: sizes.append(len(X)) or own(form, X))
    X, C = random_tensor(5, 12, 20, dtype=torch.float32), random_tensor(5, 12, 7, dtype=torch.float32, seed=1)
    winner, runner = torch.randint(12, (2, 5, 12, 7))
    slopes = {"d1": C * C, "d2": C + 1} if bias else {}
    edges = EdgeConvOperator(X, winner, C, runner=runner, K=C, **slopes, bias=bias)
    maps = random_tensor(5, 3, 4, 7, dtype=torch.float32), random_tensor(5, 3, 4, 7, dtype=torch.float32, seed=1)
    taps = [random_tensor(7, 3, 3, dtype=torch.float32)]
    stage = reference.DepthwiseStage(padding=(1, 1))
    chain = DepthwiseOperator(X.flatten(0, 1), [*maps], [maps[1]], taps, stages=[stage], bias=bias)
    for operator in (edges, chain):
        sizes.clear()
        V = random_vectors(*operator.shape, dtype=torch.float32)
        with triton_options(precision="high", scratch_bytes=2 * 12 * 32 * 6):
            SV = operator.matvec(V, "triton")
        assert sizes == [24, 24, 12]
        assert relative_error(SV, operator.matvec(V, "reference")) < 1e-6, operator


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_bias_alone_needs_no_rows(dtype: torch.dtype) -> None:
    X, C, V = (
        torch.empty(40, 0, dtype=dtype),
        random_tensor(40, 5, dtype=dtype),
        random_vectors(5, 1, dtype=torch.float32),
    )
    with triton_options(precision="high"):
        SV = s3d.splitting_matvec(X, C, V, bias=True, backend="triton")
    assert relative_error(SV, reference.splitting_matvec(*doubles(X, C, V), True)) < BOUND
