"""The operators torch.ops.s3d_fast.* themselves: instruction sets, what PyTorch asks of them, the same bits every time.

That they compute what the reference does is in `test_agreement.py`; what they refuse, in `test_extension_input.py`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast.backends import derivatives
from tests.backends.agreement import edge_ties
from tests.cases import DEPTHWISE, SAME, DepthwiseCase, EdgeCase, RowsCase, random_tensor, relative_error
from tests.extension_cases import IN_PLACE, good_calls, on_meta, tensors_of

_C = pytest.importorskip("s3d_fast._C")
kernels = torch.ops.s3d_fast

OPERATORS = tuple(good_calls())


def test_the_instruction_set_in_use_is_the_one_asked_for(isa: str) -> None:
    assert _C.isa() == isa
    assert set(_C.available_isas()) <= set(_C.compiled_isas())
    for name in {"none", "", *_C.compiled_isas()} - set(_C.available_isas()):
        with pytest.raises(ValueError, match=f"isa must be one that this processor has: .*got {name}"):
            _C.use_isa(name)
    assert _C.isa() == isa


def call(name: str, arguments: tuple) -> list[Tensor]:
    result = getattr(kernels, name)(*arguments)
    return tensors_of(tuple(result) if isinstance(result, tuple | list) else (result,))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_keeps_pytorchs_rules(name: str) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    results = torch.library.opcheck(getattr(kernels, name).default, good_calls()[name], test_utils=tests)
    assert results == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize("name", OPERATORS)
def test_meta_tensors_give_the_shapes_and_dtypes_of_the_result(name: str) -> None:
    arguments = good_calls()[name]
    expected = call(name, arguments)
    found = call(name, tuple(on_meta(argument) for argument in arguments))
    assert len(found) == len(expected)
    assert (len(found) == 0) == (name in IN_PLACE)
    for meta, real in zip(found, expected, strict=True):
        assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")
        assert meta.stride() == real.stride()


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_is_known_to_autograd(name: str) -> None:
    arguments = good_calls()[name]
    changed = arguments[0]
    weight = torch.ones_like(changed, requires_grad=True)
    loss = (weight * changed).sum()
    call(name, arguments)
    assert changed._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_binary_needs_nothing_of_pytorch_but_its_c_functions() -> None:
    """PyTorch keeps C functions from version to version; C++ functions carry the types of one version."""
    printed = subprocess.run(["nm", "-D", "--undefined-only", _C.__file__], capture_output=True, text=True, check=True)
    names = [line.split()[-1].partition("@")[0] for line in printed.stdout.splitlines()]
    demangled = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    assert any(name.startswith("aoti_torch_") for name in names)
    assert not [
        name for name in demangled.stdout.splitlines() if re.search(r"\b(at|c10|torch|caffe2|pybind11)::", name)
    ]


# PyTorch's own forward mode uses it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_a_derivative_that_is_missing_is_refused_and_not_zero(name: str) -> None:
    parameters = [argument.name for argument in getattr(kernels, name).default._schema.arguments]
    for position, parameter in enumerate(parameters[: len(good_calls()[name])]):
        arguments = list(good_calls()[name])
        given = arguments[position]
        tensor = given[0] if isinstance(given, list) else given
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        rest = given[1:] if isinstance(given, list) else None
        if name not in derivatives.RULES or parameter not in derivatives.RULES[name].differentiable:
            arguments[position] = (
                tensor.clone().requires_grad_() if rest is None else [tensor.clone().requires_grad_(), *rest]
            )
            with pytest.raises(NotImplementedError, match=f"not implemented.*{parameter} requires a gradient"):
                call(name, tuple(arguments))
            with torch.no_grad():
                call(name, tuple(arguments))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(tensor.detach(), torch.ones_like(tensor))
            arguments[position] = dual if rest is None else [dual, *rest]
            with pytest.raises(NotImplementedError, match=f"forward-mode.*{parameter}"):
                call(name, tuple(arguments))


@pytest.mark.parametrize("name", OPERATORS)
def test_good_input_is_good(name: str) -> None:
    assert all(tensor.isfinite().all() for tensor in call(name, good_calls()[name]))


@cache
def _rows() -> tuple[Tensor, Tensor, Tensor]:
    case = RowsCase(2100, 65, 33, torch.float32, bias=True, K=2)
    return (*case.tensors(), case.vectors())


def _gated() -> tuple[Any, ...]:
    X, C, V = _rows()
    return X, C, C.flip(0), C.flip(1), torch.cat([V, V.flip(-1)], -1), True


def _joint() -> tuple[Any, ...]:
    X, C, V = _rows()
    return [X, X.flip(0)], [C, C.flip(0), C.flip(1)], torch.cat([V, V.flip(-1)], -1), [True, True]


def _depthwise() -> tuple[Any, ...]:
    cases = DepthwiseCase(40, 9, 8, 17, 40, (((3, 3), SAME),), torch.float32, K=2), DEPTHWISE[6]
    X, C, d, weight = (list(of_layers) for of_layers in zip(*(case.tensors() for case in cases), strict=True))
    flat = [[tensor for own in lists for tensor in own] for lists in (C, d, weight)]
    geometry = [1, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1]
    return X, *flat, [1, 1], geometry, [case.vectors() for case in cases], [False, True]


def _norms() -> tuple[Any, ...]:
    X, _, d, weight = DepthwiseCase(40, 9, 8, 17, 40, (((3, 3), SAME),), torch.float32).tensors()
    return X, d[0], weight[0], [1, 1, 1, 1, 1, 1], True


def _edges() -> tuple[Any, ...]:
    case = EdgeCase(4, 130, 17, 5, 40, torch.float32)
    return (*case.won(), case.vectors(), False)


def _tied_edges() -> tuple[Any, ...]:
    case = EdgeCase(4, 130, 17, 5, 40, torch.float32)
    return (*_edges(), *edge_ties(case, sloped=True)[:4])


def _maps() -> tuple[Any, ...]:
    C, P = (random_tensor(5, M, 30, 31, dtype=torch.float32) for M in (20, 40))
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(930, (5, 20, 200), generator=generator) for _ in range(2))
    return P, C, first, second, random_tensor(5, 20, 200, dtype=torch.float32)


def _windows() -> tuple[Any, ...]:
    X, C, V = (random_tensor(*size, dtype=torch.float32) for size in ((4000, 36), (4000, 40), (40, 37)))
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(4, (1000, 40, 1), generator=generator) for _ in range(2))
    return X, C, V, first, second, random_tensor(1000, 40, 1, dtype=torch.float32), None, None, True


def _lists() -> tuple[Any, ...]:
    X, C, V = _rows()
    return [X, X[:300]], [C, C[:300]], [V, V[0]], [True, True]


def _curvature() -> tuple[Any, ...]:
    g, z = (random_tensor(400, 33, 9, dtype=torch.float32, seed=seed) for seed in (0, 1))
    return g, z, _rows()[1][0], 1, 1, 0.0, 0.0, [], [], 3.0


def _growth() -> tuple[Any, ...]:
    index, none = torch.arange(900) % 300, [None, None]
    weights, scales = [random_tensor(300, 70), random_tensor(300)], [random_tensor(900), None]
    return weights, [index, index], scales, none, none, [torch.arange(70) % 9, None], none, [1.0, 1.0]


# Arguments that are enough work for several threads, by operator.
LARGER_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "splitting_matvec": lambda: (*_rows(), True),
    "splitting_matvec_grouped": _lists,
    "gated_matvec": _gated,
    "joint_matvec": _joint,
    "depthwise_matvec_grouped": _depthwise,
    "depthwise_row_norms": _norms,
    "edgeconv_matvec": _edges,
    "edgeconv_matvec:tied": _tied_edges,
    "tied_maps": _maps,
    "tied_rows_matvec": _windows,
    "splitting_matrices": lambda: (*_rows()[:2], True),
    "curvature_coefficients": _curvature,
    "curvature_coefficients:by-width": lambda: (*_curvature(), _rows()[0].flatten()[:3600].abs(), _rows()[1][0].abs()),
    "curvature_coefficients:by-entry": lambda: (*_curvature(), _curvature()[0].abs(), _rows()[1][0].abs()),
    "activation_slopes": lambda: (_curvature()[1], _rows()[1][0], 1, 1, 0.0, 0.0, [], []),
    "top_two": lambda: (_rows()[0][:100].unflatten(0, (10, 10)),),
    "gather_patches": lambda: (_maps()[0], torch.tensor([[0, 1, 2], [1, -1, 0]]).repeat(500, 1), [3, 3], [1, 1]),
    "grow_weights": _growth,
    "symmetric_extremes": lambda: (kernels.splitting_matrices(*_rows()[:2], True),),
    "tridiagonal_extremes": lambda: (random_tensor(50, 30), random_tensor(50, 30, seed=1), torch.full((50,), 30)),
    "certified_widths": lambda: (
        *(random_tensor(50, 30), random_tensor(50, 30, seed=1), torch.full((50,), 30)),
        *(10 + random_tensor(50, 2, seed=2), torch.full((50,), 1e6, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LARGER_CALLS)
def test_the_same_call_gives_the_same_bits(isa: str, name: str, threads: int) -> None:
    arguments = LARGER_CALLS[name]()
    name = name.partition(":")[0]
    torch.set_num_threads(threads)
    try:
        first, *others = [call(name, arguments) for _ in range(4)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(first, call(name, arguments), strict=True))
