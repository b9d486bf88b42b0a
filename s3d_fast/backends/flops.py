"""How many floating-point operations the operators torch.ops.s3d_fast.* take, for `torch.utils.flop_counter`.

As PyTorch does, these formulas count the additions and multiplications of products, and no elementwise operations. A
tensor among their arguments is its shape.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = Sequence[int]
_COUNTER = "torch.utils.flop_counter"


def splitting_matvec(X: Shape, C: Shape, V: Shape, bias: bool, rounded: bool = False, **_: Any) -> int:
    return 4 * X[0] * _entries(V)


def splitting_matvec_grouped(
    X: list[Shape], C: list[Shape], V: list[Shape], bias: list[bool], rounded: bool = False, **_: Any
) -> int:
    return sum(splitting_matvec(*layer) for layer in zip(X, C, V, bias, strict=True))


def gated_matvec(X: Shape, c11: Shape, c12: Shape, c22: Shape | None, V: Shape, bias: bool, **_: Any) -> int:
    # Both halves of V take two products each.
    return 4 * X[0] * _entries(V)


def tied_rows_matvec(X: Shape, C: Shape, V: Shape, *_: Any, **__: Any) -> int:
    return 4 * X[0] * _entries(V)


def joint_matvec(X: list[Shape], C: list[Shape], V: Shape, bias: list[bool], rounded: bool = False, **_: Any) -> int:
    return 4 * X[0][0] * _entries(V)


def depthwise_matvec_grouped(
    X: list[Shape],
    C: list[Shape],
    d: list[Shape],
    weight: list[Shape],
    stages: list[int],
    geometry: list[int],
    V: list[Shape],
    bias: list[bool],
    **_: Any,
) -> int:
    total, at = 0, 0
    for layer, count in enumerate(stages):
        sets = V[layer][0] if len(V[layer]) == 3 else 1
        total += 4 * X[layer][0] * _entries(V[layer])
        for stage in range(at, at + count):
            # A stage goes forward and back over the maps that follow it.
            total += 4 * sets * _entries(C[stage + layer + 1]) * weight[stage][1] * weight[stage][2]
        at += count
    return total


def depthwise_row_norms(X: Shape, d: Shape, weight: Shape, geometry: list[int], bias: bool, **_: Any) -> int:
    # Products of neighbouring rows, for all offsets between two taps but one of two that mirror each other.
    return 2 * _entries(X) * weight[1] * (2 * weight[2] - 1)


def edgeconv_matvec(X: Shape, winner: Shape, C: Shape, V: Shape, bias: bool, *_: Any, **__: Any) -> int:
    return 4 * X[0] * X[1] * _entries(V)


def splitting_matrices(X: Shape, C: Shape, bias: bool, **_: Any) -> int:
    # One triangle of S.
    width = X[1] + bias
    return X[0] * C[1] * width * (width + 1)


def add_splitting_matrices(out: Shape, X: Shape, C: Shape, bias: bool, weight: float, **_: Any) -> int:
    return splitting_matrices(X, C, bias)


def krylov_extend(
    basis: Shape, product: Shape, alpha: Shape, beta: Shape, length: Shape, scale: Shape, step: int, **_: Any
) -> int:
    # Two passes of Gram-Schmidt over step + 1 vectors.
    return 8 * basis[0] * (step + 1) * basis[2]


def symmetric_extremes(S: Shape, **_: Any) -> int:
    # The reduction to tridiagonal form.
    return 4 * S[0] * S[1] ** 3 // 3


FLOPS: dict[str, Callable[..., int]] = {
    formula.__name__: formula
    for formula in (
        splitting_matvec,
        splitting_matvec_grouped,
        gated_matvec,
        joint_matvec,
        tied_rows_matvec,
        depthwise_matvec_grouped,
        depthwise_row_norms,
        edgeconv_matvec,
        splitting_matrices,
        add_splitting_matrices,
        krylov_extend,
        symmetric_extremes,
    )
}


def register() -> None:
    """Give the formulas to PyTorch's counter, once somebody imports it: its import takes long and imports Triton."""
    if _COUNTER in sys.modules:
        _register_now()
    else:
        sys.meta_path.insert(0, _AfterImport())


def _register_now() -> None:
    counter = importlib.import_module(_COUNTER)
    for name, formula in FLOPS.items():
        counter.register_flop_formula(getattr(torch.ops.s3d_fast, name))(formula)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the formulas right after PyTorch's counter has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            _register_now()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _entries(shape: Shape) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
