"""What the operators torch.ops.s3d_fast.* refuse: wrong shapes, dtypes, devices and indices.

Arguments are checked before any loop of an instruction set runs, so that one set is enough; but the loops of EdgeConv
check the winners themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.agreement import edge_ties
from tests.cases import EdgeCase
from tests.extension_cases import IN_PLACE, good_calls, on_meta, tensors_of

pytest.importorskip("s3d_fast._C")
kernels = torch.ops.s3d_fast

Change = Callable[[Any], Any]


def but_for(value: float, at: int = -1) -> Change:
    """Return a change of one entry of a tensor."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[at] = value
        return tensor

    return change


def first(change: Change) -> Change:
    """Return a change of the first item of a list."""
    return lambda items: [change(items[0]), *items[1:]]


def narrower(tensor: Tensor) -> Tensor:
    return tensor[..., :-1]


def shorter(tensor: Tensor | list) -> Tensor | list:
    return tensor[:-1]


def flatter(tensor: Tensor) -> Tensor:
    return tensor[0]


def deeper(tensor: Tensor) -> Tensor:
    return tensor[None, None]


def whole(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64)


def apart(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def change_number(at: int, value: int) -> Change:
    """Return a change of one number of a list."""
    return lambda numbers: [*numbers[:at], value, *numbers[at + 1 :]]


def to(value: object) -> Change:
    return lambda _: value


SHAPES: list[tuple[str, int, Change]] = [
    *(("splitting_matvec", position, change) for position in (0, 1, 2) for change in (narrower, shorter, flatter)),
    *(("splitting_matvec", position, deeper) for position in (0, 1, 2)),
    ("splitting_matvec", 3, to(False)),
    *(("splitting_matvec_grouped", position, shorter) for position in (0, 1, 2, 3)),
    *(("splitting_matvec_grouped", position, first(narrower)) for position in (0, 1, 2)),
    *(("splitting_matvec_grouped", position, first(shorter)) for position in (0, 1, 2)),
    ("splitting_matvec_grouped", 3, to([True, True])),
    *(("gated_matvec", position, change) for position in range(5) for change in (narrower, shorter, flatter, deeper)),
    ("gated_matvec", 5, to(False)),
    *(("joint_matvec", position, shorter) for position in (0, 1, 3)),
    *(("joint_matvec", position, first(change)) for position in (0, 1) for change in (narrower, shorter, flatter)),
    *(("joint_matvec", 2, change) for change in (narrower, shorter, flatter, deeper)),
    ("joint_matvec", 0, to([])),
    ("joint_matvec", 3, to([True, True])),
    *(("depthwise_matvec_grouped", position, shorter) for position in range(8)),
    *(("depthwise_matvec_grouped", position, first(flatter)) for position in (0, 1, 2, 3, 6)),
    *(("depthwise_matvec_grouped", position, first(narrower)) for position in (0, 1, 2, 6)),
    *(("depthwise_matvec_grouped", position, first(shorter)) for position in (0, 1, 2, 3, 6)),
    *(("depthwise_matvec_grouped", 4, to(stages)) for stages in ([1, 2], [3, 0], [0, 3], [2**62, 1], [-1, 4])),
    *(
        ("depthwise_matvec_grouped", 5, change_number(place, value))
        for place, value in [(0, 0), (2, -1), (4, 0), (0, 1), (3, 2), (5, 2), (1, 2**40), (5, 2**62)]
    ),
    ("depthwise_matvec_grouped", 7, to([True, True])),
    *(("depthwise_row_norms", position, change) for position in (0, 1, 2) for change in (shorter, flatter)),
    ("depthwise_row_norms", 1, narrower),
    ("depthwise_row_norms", 3, shorter),
    *(
        ("depthwise_row_norms", 3, change_number(place, value))
        for place, value in [(0, 0), (2, -1), (4, 0), (1, 2**62)]
    ),
    *(("edgeconv_matvec", position, change) for position in range(4) for change in (narrower, shorter, flatter)),
    ("edgeconv_matvec", 4, to(True)),
    *(("edgeconv_matvec", position, change) for position in range(5, 9) for change in (narrower, shorter, to(None))),
    *(("tied_maps", position, change) for position in range(7) for change in (narrower, shorter, flatter)),
    *(("tied_maps", position, to(None)) for position in (5, 6)),
    *(("tied_rows_matvec", position, change) for position in range(8) for change in (shorter, flatter)),
    *(("tied_rows_matvec", position, narrower) for position in (0, 1, 2)),
    *(("tied_rows_matvec", position, to(None)) for position in (6, 7)),
    ("tied_maps", 0, lambda P: P[:, :-1]),
    *(("splitting_matrices", position, change) for position in (0, 1) for change in (shorter, flatter, deeper)),
    *(("add_splitting_matrices", position, change) for position in (0, 1, 2) for change in (shorter, flatter)),
    ("add_splitting_matrices", 0, narrower),
    ("add_splitting_matrices", 0, apart),
    ("add_splitting_matrices", 3, to(True)),
    *(
        (name, position, change)
        for name in ("curvature_coefficients", "curvature_coefficients_")
        for position, change in [
            (0, shorter),
            (0, flatter),
            (1, narrower),
            (2, shorter),
            (2, deeper),
            (3, to(-1)),
            (3, to(3)),
            (3, to(2)),
            (4, to(-1)),
            (4, to(99)),
            (7, to([])),
            (8, to([1.0, 2.0])),
            *((position, change) for position in (10, 11) for change in (shorter, deeper, to(None))),
        ]
    ),
    ("curvature_coefficients_", 0, apart),
    ("activation_slopes", 0, flatter),
    *(("top_two", 0, change) for change in (flatter, deeper, lambda values: values[:, :1])),
    *(("gather_patches", position, flatter) for position in (0, 1)),
    ("gather_patches", 1, lambda places: places[:, :2]),
    *(("gather_patches", position, to(pair)) for position in (2, 3) for pair in ([1], [0, 1], [1, -1], [2**40, 1])),
    *(("activation_slopes", 1, change) for change in (shorter, deeper)),
    *(("activation_slopes", 2, to(axis)) for axis in (-1, 2, 3)),
    *(("activation_slopes", 3, to(kind)) for kind in (-1, 2, 99)),
    ("activation_slopes", 6, to([])),
    ("activation_slopes", 7, to([1.0, 2.0])),
    ("grow_weights", 0, first(flatter)),
    ("grow_weights", 0, first(deeper)),
    ("grow_weights", 0, first(lambda weight: weight.sum())),
    *(("grow_weights", position, first(deeper)) for position in (1, 2, 3, 4, 5, 6)),
    *(("grow_weights", position, first(shorter)) for position in (2, 4, 6)),
    ("grow_weights", 3, first(narrower)),
    ("grow_weights", 3, first(to(None))),
    ("grow_weights", 4, first(to(None))),
    *(("grow_weights", position, shorter) for position in range(8)),
    *(("krylov_extend", position, shorter) for position in range(6)),
    ("krylov_extend", 0, narrower),
    ("krylov_extend", 0, flatter),
    ("krylov_extend", 0, apart),
    ("krylov_extend", 1, narrower),
    ("krylov_extend", 2, lambda alpha: alpha[:, :0]),
    *(("krylov_extend", position, apart) for position in (2, 3, 4, 5)),
    *(("krylov_extend", 6, to(step)) for step in (-1, 2, 3, 2**62, -(2**62))),
    ("symmetric_extremes", 0, narrower),
    ("symmetric_extremes", 0, flatter),
    ("symmetric_extremes", 0, lambda S: S[:, :0, :0]),
    *(("tridiagonal_extremes", position, change) for position in (0, 1) for change in (narrower, shorter, flatter)),
    ("tridiagonal_extremes", 0, lambda alpha: alpha[:, :0]),
    ("tridiagonal_extremes", 2, shorter),
    ("tridiagonal_extremes", 2, deeper),
    *(("certified_widths", position, change) for position in (0, 1) for change in (narrower, shorter, flatter)),
    ("certified_widths", 0, lambda alpha: alpha[:, :0]),
    *(("certified_widths", position, shorter) for position in (2, 3, 4)),
    ("certified_widths", 3, narrower),
    *(("certified_widths", position, deeper) for position in (2, 4)),
]

DTYPES: list[tuple[str, int, Change]] = [
    *(
        (name, position, change)
        for name, positions in {
            "splitting_matvec": (0, 1, 2),
            "gated_matvec": (0, 1, 2, 3, 4),
            "depthwise_row_norms": (0, 1, 2),
            "edgeconv_matvec": (0, 2, 3, 6, 7, 8),
            "tied_maps": (0, 1, 4, 5, 6),
            "tied_rows_matvec": (0, 1, 2, 5, 6, 7),
            "splitting_matrices": (0, 1),
            "add_splitting_matrices": (0, 1, 2),
            "curvature_coefficients": (0, 1, 2, 10, 11),
            "curvature_coefficients_": (0, 1, 2, 10, 11),
            "activation_slopes": (0, 1),
            "krylov_extend": (0, 1, 2, 3, 5),
            "tridiagonal_extremes": (0, 1),
            "certified_widths": (0, 1, 3, 4),
        }.items()
        for position in positions
        for change in (Tensor.float, Tensor.half, whole, Tensor.cfloat)
    ),
    *(("splitting_matvec_grouped", position, first(Tensor.float)) for position in (0, 1, 2)),
    *(("joint_matvec", position, first(Tensor.float)) for position in (0, 1)),
    ("joint_matvec", 2, Tensor.float),
    *(("depthwise_matvec_grouped", position, first(Tensor.float)) for position in (0, 1, 2, 3, 6)),
    *(
        ("grow_weights", position, first(change))
        for position in (0, 2, 3, 6)
        for change in (Tensor.float, Tensor.half, whole, Tensor.cfloat)
    ),
    *(("grow_weights", position, first(change)) for position in (1, 4, 5) for change in (Tensor.int, Tensor.double)),
    *(
        (name, 0, change)
        for name in ("symmetric_extremes", "top_two", "gather_patches")
        for change in (Tensor.half, whole, Tensor.cfloat)
    ),
    *(
        (name, position, change)
        for name, position in [
            ("tied_maps", 2),
            ("tied_maps", 3),
            ("tied_rows_matvec", 3),
            ("tied_rows_matvec", 4),
            ("krylov_extend", 4),
            ("tridiagonal_extremes", 2),
            ("certified_widths", 2),
            ("gather_patches", 1),
        ]
        for change in (Tensor.int, Tensor.double)
    ),
    *(("edgeconv_matvec", position, change) for position in (1, 5) for change in (Tensor.short, Tensor.double)),
]

WINNERS: list[tuple[str, int, Change]] = [
    ("edgeconv_matvec", position, but_for(value, at))
    for position in (1, 5)
    for value in (5, -1, 2**40, -(2**63))
    for at in (0, -1)
]
RANGES: list[tuple[str, int, Change]] = [
    *(("grow_weights", 1, first(but_for(value))) for value in (3, -1, 2**62)),
    *(("grow_weights", 4, first(but_for(value))) for value in (1, -2, -(2**62))),
    *(("grow_weights", 5, first(but_for(value))) for value in (4, -1, 2**62)),
    *(("tridiagonal_extremes", 2, but_for(value)) for value in (0, 4, -1, 2**62)),
    *(("certified_widths", 2, but_for(value)) for value in (0, 4, -1, 2**62)),
    *(("tied_maps", position, but_for(value)) for position in (2, 3) for value in (20, -1, 2**62)),
    *(("tied_rows_matvec", position, but_for(value)) for position in (3, 4) for value in (4, -1, 2**62)),
    *(("gather_patches", 1, but_for(*change)) for change in ((2, 0), (-1, 0), (2**62, 0), (2**62, -1))),
]

DEVICES = [
    (name, position, to_meta)
    for name, arguments in good_calls().items()
    for position, argument in enumerate(arguments)
    for to_meta in [on_meta if isinstance(argument, Tensor) else first(on_meta)]
    if tensors_of((argument,)) and name not in ("symmetric_extremes", "top_two")
]


def assert_refused(name: str, position: int, change: Change, errors: tuple[type[Exception], ...]) -> None:
    """Check that the call with one argument changed raises and has not changed anything."""
    arguments = list(good_calls()[name])
    arguments[position] = change(arguments[position])
    before = [tensor.clone() for tensor in tensors_of(tuple(arguments))]
    with pytest.raises(errors) as raised:
        getattr(kernels, name)(*arguments)
    assert "INTERNAL ASSERT" not in str(raised.value)
    for tensor, old in zip(tensors_of(tuple(arguments)), before, strict=True):
        if tensor.device.type == "cpu":
            assert torch.equal(tensor, old)


def numbered(changes: list[tuple[str, int, Change]]) -> pytest.MarkDecorator:
    ids = [f"{name}-{position}-{number}" for number, (name, position, _) in enumerate(changes)]
    return pytest.mark.parametrize(("name", "position", "change"), changes, ids=ids)


@numbered(SHAPES)
def test_a_wrong_shape_or_number_is_refused(name: str, position: int, change: Change) -> None:
    assert_refused(name, position, change, (ValueError,))


@numbered(DTYPES)
def test_a_wrong_dtype_is_refused(name: str, position: int, change: Change) -> None:
    assert_refused(name, position, change, (TypeError,))


@numbered(WINNERS)
@pytest.mark.usefixtures("isa")
def test_a_winner_out_of_range_is_refused_by_every_instruction_set(name: str, position: int, change: Change) -> None:
    assert_refused(name, position, change, (IndexError,))


@pytest.mark.parametrize("M", [3, 64], ids=["part-of-a-panel", "whole-panels"])
@pytest.mark.parametrize("ties", ["none", "plain", "sloped"])
@pytest.mark.usefixtures("isa")
def test_an_index_of_32_bits_out_of_range_is_refused_by_every_instruction_set(ties: str, M: int) -> None:
    case = EdgeCase(2, 13, 6, 4, M)
    known = () if ties == "none" else edge_ties(case, ties == "sloped")[:4]
    X, winner, C = case.won()
    good = [X, winner.int(), C, case.vectors(), False, *(known and (known[0].int(), *known[1:]))]
    kernels.edgeconv_matvec(*good)
    for position, value, at in product((1, 5) if known else (1,), (13, -1, 2**31 - 1, -(2**31)), (0, -1)):
        bad = [but_for(value, at)(given) if place == position else given for place, given in enumerate(good)]
        with pytest.raises(IndexError, match="must lie in"):
            kernels.edgeconv_matvec(*bad)


@numbered(RANGES)
def test_an_index_out_of_range_is_refused(name: str, position: int, change: Change) -> None:
    assert_refused(name, position, change, (IndexError,))


@numbered(DEVICES)
def test_one_tensor_on_another_device_is_refused(name: str, position: int, change: Change) -> None:
    assert_refused(name, position, change, (ValueError,))


@pytest.mark.parametrize("name", IN_PLACE)
def test_meta_tensors_are_checked_like_others(name: str) -> None:
    arguments = [on_meta(argument) for argument in good_calls()[name]]
    arguments[1] = arguments[1][:-1]
    with pytest.raises(ValueError, match="must have shape"):
        getattr(kernels, name)(*arguments)


def test_sparse_tensors_are_refused() -> None:
    X, *others = good_calls()["splitting_matvec"]
    with pytest.raises(NotImplementedError, match=r"takes strided tensors, got torch\.sparse_coo"):
        kernels.splitting_matvec(X.to_sparse(), *others)
