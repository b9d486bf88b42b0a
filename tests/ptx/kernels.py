"""Small Triton kernels that compile to tensor-core instructions; imported where Triton compiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource


@triton.jit
def product_kernel(
    a, b, out, a_row, a_column, b_row, b_column, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """out = a b, or with TWICE a b b^T, whose first factor is then in registers."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * a_row + k[None, :] * a_column)
    right = tl.load(b + k[:, None] * b_row + n[None, :] * b_column)
    number = out.dtype.element_ty
    total = tl.dot(left, right, input_precision=PRECISION, out_dtype=number)
    if TWICE:
        total = tl.dot(total.to(left.dtype), tl.trans(right), input_precision=PRECISION, out_dtype=number)
        tl.store(out + m[:, None] * K + k[None, :], total)
    else:
        tl.store(out + m[:, None] * N + n[None, :], total)


@triton.jit
def sum_kernel(a, b, out, steps, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """out = sum over the steps of a b, entry by entry, with copies ahead."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in tl.range(steps, num_stages=STAGES):
        left = tl.load(a + (step * BLOCK + i[:, None]) * BLOCK + i[None, :])
        right = tl.load(b + (step * BLOCK + i[:, None]) * BLOCK + i[None, :])
        total += tl.dot(left, right)
    tl.store(out + i[:, None] * BLOCK + i[None, :], total)


@triton.jit
def there_and_back_kernel(
    x, c, v, out, rows, BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """out = ((x v^T) * c)^T x in one loop: both products of a tile read x in shared memory."""
    r, m, d = tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BD)
    right = tl.load(v + m[None, :] * BD + d[:, None])
    total = tl.zeros((BM, BD), tl.float32)
    for first in tl.range(0, rows, BN, num_stages=STAGES):
        left = tl.load(x + (first + r)[:, None] * BD + d[None, :])
        scale = tl.load(c + (first + r)[:, None] * BM + m[None, :])
        u = tl.dot(left, right) * scale
        total += tl.dot(tl.trans(u).to(left.dtype), left)
    tl.store(out + m[:, None] * BD + d[None, :], total)


class Product(NamedTuple):
    """One product of matrices, (M, K) and (K, N)."""

    dtype: torch.dtype
    M: int
    N: int
    K: int
    warps: int = 4
    a_transposed: bool = False
    b_transposed: bool = False
    twice: bool = False


class Ran(NamedTuple):
    """How far a result is off, what was found, and the instructions executed."""

    error: float
    findings: list[str]
    instructions: dict[str, int]
    multiplications: int
    ptx: str


def matrix(rows: int, columns: int, dtype: torch.dtype, is_transposed: bool, seed: int) -> Tensor:
    shape = (columns, rows) if is_transposed else (rows, columns)
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return made.T if is_transposed else made


def multiply(target: str, case: Product) -> Ran:
    """Execute a product in the simulator, and compare it with float64."""
    from s3d_fast.kernels.ptx.launch import simulated

    a = matrix(case.M, case.K, case.dtype, case.a_transposed, 0)
    b = matrix(case.K, case.N, case.dtype, case.b_transposed, 1)
    number = torch.float64 if case.dtype == torch.float64 else torch.float32
    out = torch.full((case.M, case.K if case.twice else case.N), torch.nan, dtype=number)
    precision = "tf32" if case.dtype == torch.float32 else "ieee"
    with simulated(target) as report:
        product_kernel[(1,)](
            a, b, out, *a.stride(), *b.stride(), case.M, case.N, case.K, precision, case.twice, num_warps=case.warps
        )
    expected = a.double() @ b.double()
    if case.twice:
        expected = expected.to(case.dtype).double() @ b.double().T
    (launch,) = report.launches
    error = float((out - expected).abs().max() / expected.abs().max())
    return Ran(error, list(map(str, report.findings)), launch.instructions, launch.multiplications, launch.ptx)


def accumulate(target: str, dtype: torch.dtype, steps: int, stages: int) -> Ran:
    """Execute a loop of products in the simulator, and compare it with float64."""
    from s3d_fast.kernels.ptx.launch import simulated

    a, b = (matrix(64 * steps, 64, dtype, False, seed) for seed in range(2))
    out = torch.full((64, 64), torch.nan)
    with simulated(target) as report:
        sum_kernel[(1,)](a, b, out, steps, BLOCK=64, STAGES=stages)
    expected = (a.double().view(steps, 64, 64) @ b.double().view(steps, 64, 64)).sum(0)
    (launch,) = report.launches
    error = float((out - expected).abs().max() / expected.abs().max())
    return Ran(error, list(map(str, report.findings)), launch.instructions, launch.multiplications, launch.ptx)


def outlined(target: str, rows: int, width: int) -> list[str]:
    """Return what the outline of `there_and_back_kernel` shows, for tiles of so many rows."""
    from s3d_fast.kernels.compiled import TARGETS
    from s3d_fast.kernels.ptx.launch import compile_to_ptx
    from s3d_fast.kernels.ptx.outline import outline

    sizes = {"BN": rows, "BM": 64, "BD": width, "STAGES": 3}
    tensors = dict.fromkeys(("x", "c", "v"), "*bf16") | {"out": "*fp32", "rows": "i32"}
    constants: dict[tuple[int, ...], Any] = {(len(tensors) + i,): size for i, size in enumerate(sizes.values())}
    aligned: dict[tuple[int, ...], Any] = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors))}
    signature = {**tensors, **dict.fromkeys(sizes, "constexpr")}
    source = ASTSource(there_and_back_kernel, signature, constants, aligned)
    ptx, shared_memory = compile_to_ptx(source, TARGETS[target], {"num_warps": 4, "num_stages": sizes["STAGES"]})
    return [finding.kind for finding in outline(ptx, [0, 0, 0, 0, 1 << 16], (1,), shared_memory)]
