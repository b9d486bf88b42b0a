"""S v of EdgeConv layers by the Triton kernels: atomic sums, precision, far offsets, tuning and configurations.

That they agree with the reference is in `tests/backends/test_agreement.py`.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from s3d_fast import EdgeConvOperator
from s3d_fast.backends import operations
from s3d_fast.backends.choice import choose
from s3d_fast.kernels import configs, edgeconv, launch, pointwise_wide, tiles
from s3d_fast.kernels.aligned import is_near
from s3d_fast.kernels.options import triton_options
from s3d_fast.maths import reference
from s3d_fast.maths.incoming import Incoming, incoming_edges
from s3d_fast.maths.reference import EdgeTies
from tests.backends.agreement import assert_agrees, edge_ties
from tests.cases import DTYPES, PAIRWISE_EDGES, TOLERANCE, EdgeCase, doubles, random_tensor, relative_error
from tests.kernel_cases import (
    ARITHMETIC,
    every_dtype,
    every_vendor,
    pretend,
    recorded,
    with_strides,
)

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]

every_way = pytest.mark.parametrize("atomic", [False, True], ids=["ordered", "atomic"])


def tensors_of(case: EdgeCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return X, winner, C and V."""
    return (*case.won(), case.vectors())


def assert_product(
    X: Tensor,
    winner: Tensor,
    C: Tensor,
    V: Tensor,
    bias: bool = False,
    label: object = "",
    incoming: Incoming | None = None,
    ties: EdgeTies | None = None,
) -> Tensor:
    """Check S v against the reference in float64, and that the arguments stay as they were; return it."""
    settings = {"bias": bias, "incoming": incoming, "ties": ties}
    return assert_agrees(choose("triton"), "edgeconv_matvec", label=label, X=X, winner=winner, C=C, V=V, **settings)


@pytest.mark.parametrize("case", [case for case in PAIRWISE_EDGES if case.F < 100][::3], ids=str)
def test_atomic_sums_agree_with_the_reference(case: EdgeCase) -> None:
    with triton_options(atomic=True):
        for ties in (None, edge_ties(case, sloped=False), edge_ties(case, sloped=True)):
            assert_product(*tensors_of(case), case.bias, ties=ties)


def test_atomic_sums_agree_where_one_point_wins_everywhere_and_where_each_wins_itself() -> None:
    case = EdgeCase(2, 37, 5, 4, 6, bias=True, K=2)
    X, winner, C, V = tensors_of(case)
    with triton_options(atomic=True):
        for winners in (torch.full_like(winner, 17), torch.arange(37)[:, None].expand(winner.shape)):
            assert_product(X, winners, C, V, True)


@pytest.mark.parametrize("zero", ["B", "P", "F", "M", "K"])
def test_atomic_sums_of_sizes_of_zero_are_zero(zero: str) -> None:
    sizes = {"B": 2, "P": 5, "F": 3, "M": 4, "K": 2}
    B, P, F, M, K = (0 if name == zero else size for name, size in sizes.items())
    winner = torch.zeros(B, P, M, dtype=torch.int64)
    with triton_options(atomic=True):
        assert_product(random_tensor(B, P, F), winner, random_tensor(B, P, M), random_tensor(K, M, 2 * F + 1), True)


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_points_may_be_so_far_apart_that_offsets_leave_32_bits(
    dtype: torch.dtype, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, edgeconv, "point_products_kernel")
    X, winner, C, V = tensors_of(EdgeCase(1, 256, 2, 2, 2, dtype))
    far = [with_strides(x, (0, 2**31 // 255 + 1, 1)) for x in (X, C)]
    with triton_options(atomic=atomic):
        assert_product(far[0], winner, C, V)
        assert_product(X, winner, far[1], V)
    assert len(launches) == 4
    assert all(is_near(entry.arguments[name]) for entry in launches for name in ("X", "C"))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=["fp64", "fp32", "bf16"])
def test_magnitudes_that_the_arithmetic_holds_do_no_harm(dtype: torch.dtype) -> None:
    X, winner, C, V = tensors_of(EdgeCase(2, 13, 6, 4, 5))
    number = torch.float64 if dtype == torch.float64 else torch.float32
    scales = [(1e12, 1e10), (1e-12, 1e-5), (1e15, 1e-30), (1e-15, 1e30)]
    scales += [(1e100, 1e100), (1e-100, 1e-90)] * (dtype == torch.float64)
    for x, c in scales:
        assert_product((x * X).to(dtype), winner, (c * C).to(dtype), V.to(number), label=(x, c))


@every_way
@pytest.mark.parametrize("scale", [200.0, 1e-4], ids=["above", "below"])
def test_a_product_that_leaves_the_range_of_float16_is_right(scale: float, atomic: bool) -> None:
    X, winner, C, V = tensors_of(EdgeCase(2, 40, 20, 4, 5))
    for precision in ("highest", "high"):
        with triton_options(precision=precision, atomic=atomic):
            assert_product((scale * X).half(), winner, (scale * C).half(), V.float(), label=precision)


def rounding_bound(X: Tensor, winner: Tensor, C: Tensor, V: Tensor, unit: float) -> Tensor:
    """Return how far S v may be off where [a, b - a] and the sums over edges are each rounded by a fraction `unit`."""
    X, C, V = doubles(X, C, V)
    a, b = V.chunk(2, -1)
    X, C = X.abs(), C.abs()
    t = C * ((X @ a.abs().mT).gather(1, winner) + X @ (b - a).abs().mT)
    received = torch.zeros_like(t).scatter_add(1, winner, t)
    bound = torch.cat([((received + t).mT @ X).sum(0), (t.mT @ X).sum(0)], -1)
    # Below the smallest normal number rounding is absolute.
    return 2.1 * unit * bound + 2.0**-22 * X.sum()


def test_medium_precision_rounds_to_bfloat16_and_no_more() -> None:
    # Rows that are not bfloat16 are rounded, too.
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-7), (torch.float32, 2.0**-7)):
        X, winner, C, V = tensors_of(EdgeCase(2, 40, 20, 4, 5, dtype))
        with triton_options(precision="medium"):
            SV = operations.edgeconv_matvec(X, winner, C, V, backend="triton")
        error = (SV.double() - reference.edgeconv_matvec(X.double(), winner, *doubles(C, V))).abs()
        assert (error <= rounding_bound(X, winner, C, V, unit)).all(), dtype
        assert error.max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_points_shared_out_over_programs_give_the_same_bits_every_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, pointwise_wide, "accumulate_kernel")
    X, winner, C, V = tensors_of(EdgeCase(5, 209, 5, 4, 6, dtype, bias=True, K=2))
    first = assert_product(X, winner, C, V, True)
    assert launches[0].grid[-1] > 1
    again = assert_product(X, winner, C, V, True, incoming=incoming_edges(winner))
    assert torch.equal(again, first)
    with triton_options(atomic=True):
        assert_product(X, winner, C, V, True)


@every_way
def test_an_operator_restricted_after_a_product_agrees_with_the_reference(atomic: bool) -> None:
    dtype = torch.float32
    X, winner, C, V = tensors_of(EdgeCase(2, 13, 6, 4, 7, dtype, bias=True))
    operator = EdgeConvOperator(X, winner, C, bias=True)
    with triton_options(atomic=atomic):
        operator.matvec(V, "triton")
        for filters in (torch.tensor([5, 0, 3]), torch.tensor([2]), torch.arange(7)):
            rest = operator.restrict(filters)
            expected = reference.edgeconv_matvec(
                X.double(), winner[..., filters], *doubles(C[..., filters], V[filters]), True
            )
            assert relative_error(rest.matvec(V[filters], "triton"), expected) < TOLERANCE[dtype], filters
            again = rest.restrict(torch.tensor([-1])).matvec(V[filters][-1:], "triton")
            assert relative_error(again, expected[-1:]) < TOLERANCE[dtype], filters


def test_incoming_edges_are_the_points_in_the_order_of_their_winners() -> None:
    _, winner, _, _ = tensors_of(EdgeCase(3, 11, 2, 4, 5))
    incoming = incoming_edges(winner)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in incoming)
    assert torch.equal(incoming.winner.long(), winner)
    for cloud, point, j in product(range(3), range(11), range(5)):
        first, last = incoming.start[cloud, point : point + 2, j].tolist()
        found = incoming.order[cloud, first:last, j].tolist()
        assert found == (winner[cloud, :, j] == point).nonzero().flatten().tolist()


def test_winners_out_of_range_are_an_error_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, edgeconv, "point_products_kernel")
    X, winner, C, V = tensors_of(EdgeCase(2, 13, 6, 4, 5))
    for bad in (-1, 13):
        winner[1, 3, 2] = bad
        with pytest.raises(ValueError, match=r"winner must lie in \[0, 13\), got indices from"):
            operations.edgeconv_matvec(X, winner, C, V, backend="triton")
    assert not launches


class Untouched:
    """A kernel that must not be launched."""

    def __getitem__(self, grid: object) -> None:
        pytest.fail("a kernel was launched")


def test_incoming_edges_of_another_shape_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgeconv, "point_products_kernel", Untouched())
    X, winner, C, V = tensors_of(EdgeCase(2, 13, 6, 4, 5))
    for other in (winner[..., :3], winner[:1], winner[:, :7].clamp(max=6)):
        with pytest.raises(ValueError, match="incoming must"):
            operations.edgeconv_matvec(X, winner, C, V, backend="triton", incoming=incoming_edges(other))


@pytest.mark.parametrize("fastest", [0, 1])
@every_way
def test_tuning_times_every_configuration_once_and_keeps_the_fastest(
    fastest: int, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def seconds(call: object) -> float:
        timed.append(call())
        return float(len(timed) != 1 + fastest)

    pretend(monkeypatch, "amd")
    monkeypatch.setattr(launch, "_seconds", seconds)
    launches = recorded(monkeypatch, edgeconv, "point_products_kernel")
    X, winner, C, V = tensors_of(EdgeCase(2, 40, 6, 4, 5, torch.float32))
    with triton_options(tune=True, atomic=atomic):
        assert_product(X, winner, C, V)
        assert_product(X, winner, C, V)
    assert len(timed) == 2
    assert relative_error(timed[0], timed[1]) < TOLERANCE[torch.float32]
    tiles = [entry.arguments["BN"] for entry in launches if entry.arguments["EDGES"]]
    assert tiles[0] != tiles[1]
    assert tiles[2:] == [tiles[fastest]] * 2


@every_vendor
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_for_a_gpu_agrees_with_the_reference(
    vendor: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vendor)
    monkeypatch.setattr(edgeconv, "RECEIVE_ROWS", 8)
    flags = cycle([False, True, True])
    for pair in tiles.WIDE.get((vendor, arithmetic), ()):
        monkeypatch.setattr(configs, "wide", lambda *_, pair=pair: [pair])
        for dtype, precision in ARITHMETIC[arithmetic]:
            case = EdgeCase(2, 35, 66, 4, 17, dtype, next(flags), K=2)
            X, winner, C, V = tensors_of(case)
            with triton_options(precision=precision, atomic=next(flags)):
                assert_product(X, winner, C, V, case.bias, (case, pair))
                assert_product(X, winner, C, V, case.bias, (case, pair), ties=edge_ties(case, sloped=True))


@every_vendor
@every_dtype
def test_every_gpu_agrees_with_the_reference(vendor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, vendor)
    assert_product(*tensors_of(EdgeCase(2, 13, 6, 4, 5, dtype)))
