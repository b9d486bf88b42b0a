"""Products of every width on every instruction set: panels of all widths, few filters, and factors in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor

import s3d_fast as s3d
from s3d_fast.backends import cpu_options, extension
from s3d_fast.backends.cpu import CPU
from tests.backends.agreement import assert_agrees, assert_close, joint_of, layers_of, rows_of, tied_of
from tests.cases import LAYOUTS, ConvCase, RowsCase, laid_out

_C = pytest.importorskip("s3d_fast._C")

MOST = 70
# Sizes around the widths of panels and the heights of tiles.
AWKWARD = (1, 2, 3, 8, 11, 13, 16, 17, 24, 25, 27, 32, 33, 48, 63)
# The error of products in bfloat16, as a fraction of the largest entry.
ROUNDED = 1e-2


def every_width(dtype: torch.dtype) -> Iterator[RowsCase]:
    """Return layers of all widths up to MOST, with some of the other sizes."""
    others, rows, biases, sets = map(cycle, (AWKWARD, (1, 25, 97, 130), (False, True, True), (0, 1, 2, 0)))
    for size in range(1, MOST + 1):
        for D, M in ((next(others), size), (size, next(others))):
            yield RowsCase(next(rows), D, M, dtype, bool(next(biases)), next(sets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
def test_every_number_of_filters_and_of_inputs(isa: str, dtype: torch.dtype) -> None:
    for case in every_width(dtype):
        assert_agrees(CPU, "splitting_matvec", label=case, **rows_of(case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_where_panels_are_not_full(isa: str, layout: str) -> None:
    for D, M, bias in ((27, 27, True), (16, 20, False), (33, 9, True), (5, 50, False)):
        given = rows_of(RowsCase(103, D, M, torch.float32, bias, K=2))
        for name in ("X", "C", "V"):
            assert_agrees(CPU, "splitting_matvec", label=(D, M, name), **{**given, name: laid_out(given[name], layout)})


def test_a_filter_has_the_same_bits_in_every_panel(isa: str) -> None:
    given = rows_of(RowsCase(97, 27, MOST, torch.float32, bias=True))
    whole = CPU.splitting_matvec(**given)
    # One or two filters are no panel.
    for M in range(3, MOST):
        some = CPU.splitting_matvec(**{**given, "C": given["C"][:, :M], "V": given["V"][:M]})
        assert torch.equal(some, whole[:M]), M


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("M", [1, 2, 3, 5, 20])
def test_matrices_of_few_filters(isa: str, dtype: torch.dtype, M: int) -> None:
    rows, biases, layouts = cycle((1, 40, 97, 230)), cycle((False, True)), cycle(LAYOUTS[:4])
    for D in AWKWARD:
        given = rows_of(RowsCase(next(rows), D, M, dtype, next(biases)))
        del given["V"]
        given |= {name: laid_out(given[name], next(layouts)) for name in ("X", "C")}
        S = assert_agrees(CPU, "splitting_matrices", label=D, **given)
        assert torch.equal(S, S.mT)
        total = torch.arange(S.numel(), dtype=S.dtype).reshape(S.shape) / S.numel()
        assert_agrees(CPU, "add_splitting_matrices", label=D, S=total, weight=-0.3, **given)


def rounded_product(**given: object) -> Tensor:
    with s3d.cpu_options(precision="medium"):
        return CPU.splitting_matvec(**given)  # type: ignore[arg-type]


def test_factors_in_bfloat16_at_every_width(isa: str) -> None:
    for case in every_width(torch.bfloat16):
        given = rows_of(case)
        wide = CPU.splitting_matvec(**{**given, **{name: given[name].double() for name in ("X", "C", "V")}})
        found = rounded_product(**given)
        assert found.dtype == torch.float32
        assert_close(found, wide, ROUNDED, case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors_in_bfloat16_in_every_layout(isa: str, layout: str) -> None:
    for D, M, bias in ((27, 27, True), (16, 20, False), (34, 9, True), (5, 50, False)):
        given = rows_of(RowsCase(103, D, M, torch.bfloat16, bias, K=2))
        for name in ("X", "C", "V"):
            arguments = {**given, name: laid_out(given[name], layout)}
            assert_close(rounded_product(**arguments), CPU.splitting_matvec(**arguments), ROUNDED, (D, M, name))


def joint_product(**given: object) -> Tensor:
    with s3d.cpu_options(precision="medium"):
        return CPU.joint_matvec(**given)  # type: ignore[arg-type]


def test_joint_factors_in_bfloat16(isa: str) -> None:
    cases: list[tuple[tuple[int, ...], tuple[bool, ...], int, int, int | None]] = [
        ((7, 30, 4), (False, True, True), 9, 130, 2),
        ((64,), (True,), 33, 97, None),
        ((5, 2), (True, False), 16, 1, None),
        ((1, 96, 33), (False, False, True), 70, 203, None),
        ((1200, 18), (False, True), 17, 99, None),
    ]
    for widths, bias, M, N, K in cases:
        given = joint_of(widths, bias, M, N, K, torch.float32)
        short = {name: [one.bfloat16() for one in given[name]] for name in ("X", "C")}
        wide = {name: [one.double() for one in tensors] for name, tensors in short.items()}
        exact = CPU.joint_matvec(**{**given, **wide, "V": given["V"].double()})
        found = joint_product(**{**given, **short})
        assert found.dtype == torch.float32
        assert_close(found, exact, ROUNDED, widths)
        assert torch.equal(found, CPU.joint_matvec(**{**given, **short})) != _C.has_bfloat16_products()
        # One tensor that is not bfloat16, and nothing is rounded.
        mixed = {**given, **short, "C": [*short["C"][:-1], given["C"][-1]]}
        assert torch.equal(joint_product(**mixed), CPU.joint_matvec(**mixed))
        for layout in LAYOUTS:
            moved = {name: [laid_out(one, layout) for one in tensors] for name, tensors in short.items()}
            for arguments in ({**given, **moved}, {**given, **short, "V": laid_out(given["V"], layout)}):
                assert_close(joint_product(**arguments), CPU.joint_matvec(**arguments), ROUNDED, (widths, layout))


@pytest.mark.parametrize("sloped", [False, True], ids=["plain", "sloped"])
def test_tied_factors_in_bfloat16(isa: str, sloped: bool) -> None:
    for B, D, P, M, bias, K in ((30, 5, 2, 3, True, 0), (31, 64, 2, 40, False, 2), (9, 131, 3, 17, True, 0)):
        given = tied_of(ConvCase(B, D, P, P, M, k=(1, 1), bias=bias, K=K, dtype=torch.bfloat16), sloped, 2)
        given |= {name: given[name].contiguous(memory_format=torch.channels_last) for name in ("X", "C")}
        ties = type(given["ties"])(
            *(one if one is None or not one.is_floating_point() else one.double() for one in given["ties"])
        )
        wide = {**given, **{name: given[name].double() for name in ("X", "C", "V")}, "ties": ties}
        with s3d.cpu_options(precision="medium"):
            found = CPU.tied_matvec(**given)
        assert found.dtype == torch.float32
        assert_close(found, CPU.tied_matvec(**wide), ROUNDED, (B, D, M))
        assert torch.equal(found, CPU.tied_matvec(**given)) != _C.has_bfloat16_products()


def test_only_medium_precision_and_bfloat16_rows_round(isa: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        given = rows_of(RowsCase(300, 40, 33, dtype, bias=True))
        exact = CPU.splitting_matvec(**given)
        for precision in ("highest", "high"):
            with s3d.cpu_options(precision=precision):
                assert torch.equal(CPU.splitting_matvec(**given), exact)
        rounds = dtype == torch.bfloat16 and _C.has_bfloat16_products()
        assert torch.equal(rounded_product(**given), exact) != rounds
        mixed = {**given, "C": given["C"].float()} if dtype == torch.bfloat16 else given
        assert torch.equal(rounded_product(**mixed), CPU.splitting_matvec(**mixed))
    assert cpu_options.current().precision == "highest"


def test_layers_with_rounded_factors_share_a_call(isa: str) -> None:
    case = RowsCase(260, 19, 40, torch.bfloat16, bias=True, K=2)
    layers = [rows_of(case), rows_of(replace(case, dtype=torch.float32)), rows_of(replace(case, D=64, bias=False))]
    with s3d.cpu_options(precision="medium"):
        grouped = CPU.splitting_matvec_grouped(**layers_of(layers))
    for found, layer in zip(grouped, layers, strict=True):
        assert torch.equal(found, rounded_product(**layer))


def test_a_rounded_product_has_a_rounded_gradient(isa: str) -> None:
    given = rows_of(RowsCase(90, 24, 17, torch.bfloat16))
    G = torch.randn(17, 24, generator=torch.Generator().manual_seed(0))
    V = given["V"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(rounded_product(**{**given, "V": V}), V, G)
    assert torch.equal(gradient, rounded_product(**{**given, "V": G}))


def test_a_precision_of_another_name_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="precision must be one of 'highest', 'high', 'medium'"),
        s3d.cpu_options(precision="low"),
    ):
        pass


def test_an_instruction_set_is_chosen_by_name() -> None:
    before = _C.isa()
    for name in _C.available_isas():
        s3d.use_isa(name)
        assert _C.isa() == name
    s3d.use_isa("auto")
    assert _C.isa() == _C.available_isas()[0]
    with pytest.raises(ValueError, match=r"isa must be one of 'auto', .*'portable'.*; got 'sse9'"):
        s3d.use_isa("sse9")
    extension.use_isa(before)


def test_panels_hold_all_filters_and_little_else(isa: str) -> None:
    widest = _C.panel_widths(1000)[0]
    for M in range(1, 3 * widest):
        widths = _C.panel_widths(M)
        assert widths == sorted(widths, reverse=True)
        assert sum(widths) >= M > sum(widths[:-1])
    # No panel is mostly empty.
    assert _C.panel_widths(widest // 2) == [widest // 2]
    assert _C.panel_widths(widest + widest // 2) == [widest, widest // 2]


def test_the_limits_of_the_processor_are_positive() -> None:
    peaks = [_C.fma_peak(name) for name in _C.available_isas()]
    assert min(peaks) > 1e8
    assert _C.read_bandwidth(1 << 20) > 1e8
    with pytest.raises(ValueError, match="isa must be one that this processor has"):
        _C.fma_peak("none")
