"""Small Triton kernels give the same results in the simulator as in Triton's interpreter.

The interpreter calculates with numpy, and knows neither threads nor instructions. Results are the same bit for bit
where the language determines them; sums of floating-point numbers are of small integers, and exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.ptx import small_kernels as small
from tests.ptx import tile_kernels as tiles
from tests.ptx.inputs import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I32,
    I64,
    U32,
    U64,
    converted,
    divisors,
    dotted,
    floats,
    generator,
    integers,
    matrix,
    numbers,
    out,
    small_integers,
)

Array = NDArray[Any]

NAMES = {
    BF16: "bf16", F16: "fp16", F32: "fp32", F64: "fp64", I8: "int8", I32: "int32", U32: "uint32", I64: "int64",
    U64: "uint64",
}  # fmt: skip
TARGETS = ("sm_80", "sm_90")


class Case(NamedTuple):
    """One launch of a kernel."""

    kernel: Any
    arguments: Callable[[], Sequence[Any]]
    constants: Mapping[str, Any] = MappingProxyType({})
    grid: tuple[int, ...] = (1,)
    uses: str = ""  # words, each of which an executed opcode begins with, or contains after its first dot
    tolerance: float = 0.0  # of the results that are floating-point, relative; 0 means bit for bit


class Ran(NamedTuple):
    """The tensors of a launch after it, what was found, and the opcodes that were executed."""

    tensors: list[Array]
    findings: list[str]
    opcodes: set[str]


CASES: dict[str, Case] = {}


def add(name: str, *case: Any, **settings: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(*case, **settings)


for dtype in (I32, I64, U32, U64):
    add(
        f"integer-{NAMES[dtype]}",
        small.integer_kernel,
        lambda dtype=dtype: (integers(256, dtype, 0), divisors(256, dtype, 1), out(20, 256, dtype=dtype)),
        {"SHIFTS": 8 * dtype.itemsize - 1, "N": 256},
        uses="add sub mul.lo mul.hi div rem min max and or xor shl shr bfe setp selp",
    )
add(
    "wide-product",
    small.wide_product_kernel,
    lambda: (integers(256, I32, 0), integers(256, I32, 1), out(5, 256, dtype=I64), -(2**41) + 12345),
    {"N": 256},
    uses="mul.wide.s32 mul.wide.u32 mad.wide",
)
add("random", small.random_kernel, lambda: (out(2, 256, dtype=F32), 2**40 + 3), {"N": 256}, uses="mul.hi cvt.rn.f32")
for dtype in (F32, F64):
    add(
        f"float-{NAMES[dtype]}",
        small.float_kernel,
        lambda dtype=dtype: (*(floats(dtype, seed) for seed in range(3)), out(16, 256, dtype=dtype)),
        {"N": 256},
    )
for dtype in (F16, BF16):
    add(
        f"half-{NAMES[dtype]}",
        small.half_kernel,
        lambda dtype=dtype: (floats(dtype, 0, 512), floats(dtype, 1, 512), out(6, 512, dtype=dtype)),
        {"N": 512, "num_warps": 1},
    )
for dtype in (BF16, F16, F32, F64, I64, U64):
    add(
        f"compare-{NAMES[dtype]}",
        small.compare_kernel,
        lambda dtype=dtype: (
            *(numbers(dtype, seed) for seed in range(3)),
            torch.cat([torch.zeros(8, 256), torch.arange(256)[None] % 3 == 0]).bool(),
            out(3, 256, dtype=dtype),
        ),
        {"N": 256},
    )
for dtype, tolerance in ((F32, 1e-6), (F64, 1e-14)):
    add(
        f"function-{NAMES[dtype]}",
        small.function_kernel,
        lambda dtype=dtype: (
            torch.cat([torch.linspace(-9, 9, 250), 1e-3 * torch.randn(6, generator=generator(0))]).to(dtype),
            out(9, 256, dtype=dtype),
        ),
        {"N": 256},
        tolerance=tolerance,
    )
for dtype in (F64, F32, F16, BF16, I64, I32, U32, I8):
    add(f"convert-{NAMES[dtype]}", small.convert_kernel, converted(dtype, False), {"N": 64})
    if dtype.is_floating_point:
        add(f"convert-{NAMES[dtype]}-to-integers", small.convert_kernel, converted(dtype, True), {"N": 64})
add("bits", small.bits_kernel, lambda: (floats(F32, 0), out(4, 256, dtype=F32)), {"N": 256})

for dtype in (I8, F16, F32, F64):
    for count in (1000, 1024) if dtype == F16 else (1000,):
        add(
            f"masked-{NAMES[dtype]}-{count}",
            tiles.masked_kernel,
            lambda dtype=dtype, count=count: (
                small_integers(1024, dtype=dtype),
                torch.arange(1024) % 5 < 3,
                out(5, 1024, dtype=dtype),
                count,
                3,
            ),
            {"N": 1024},
        )
    for is_transposed in (False, True) if dtype in (F16, F64) else (True,):
        add(
            f"tile-{NAMES[dtype]}-{'transposed' if is_transposed else 'straight'}",
            tiles.tile_kernel,
            lambda dtype=dtype, is_transposed=is_transposed: (
                a := matrix(45, 72, dtype, is_transposed),
                made := out(45, 72, dtype=dtype),
                45, 72, *a.stride(), *made.stride(),
            ),
            {"BLOCK": 16, "WIDTH": 32},
            (3, 3),
        )  # fmt: skip
add(
    "far",
    tiles.far_kernel,
    lambda: (
        small_integers(512),
        torch.randint(0, 256, (256,), generator=generator(0)) + 2**36,
        out(256, dtype=F32),
        2,
        2**37,
    ),
    {"N": 256},
)
add(
    "address",
    tiles.address_kernel,
    lambda: (small_integers(5, 64), 256 * torch.tensor([4, 0, 3]), out(3, 64, dtype=F32)),
    {"N": 64},
    (3,),
)

for dtype, warps in ((I8, 4), (F16, 1), (F32, 1), (F32, 8), (F64, 4)):
    add(
        f"layout-{NAMES[dtype]}-{warps}-warps",
        tiles.layout_kernel,
        lambda dtype=dtype: (small_integers(512, dtype=dtype, largest=60), out(8, 512, dtype=dtype)),
        {"M": 16, "N": 32, "num_warps": warps},
    )
for dtype, warps in ((I8, 4), (F16, 1), (F64, 4)):
    add(
        f"gather-{NAMES[dtype]}-{warps}-warps",
        tiles.gather_kernel,
        lambda dtype=dtype: (
            small_integers(512, dtype=dtype, largest=60),
            torch.randint(0, 16, (512,), generator=generator(0)).to(I32),
            torch.randint(0, 32, (512,), generator=generator(1)).to(I32),
            out(2, 512, dtype=dtype),
        ),
        {"M": 16, "N": 32, "num_warps": warps},
    )
for dtype, warps in product((F32, F64, I32, I64), (1, 4, 8)):
    if warps == (8 if dtype == F32 else 4) or (dtype == F32 and warps == 1):
        add(
            f"reduce-{NAMES[dtype]}-{warps}-warps",
            tiles.reduce_kernel,
            lambda dtype=dtype: (
                small_integers(512, dtype=dtype),
                out(3 * (16 + 32 + 1), dtype=dtype),
                out(2 * (16 + 32), dtype=I32),
            ),
            {"M": 16, "N": 32, "num_warps": warps},
        )
for dtype, tolerance in ((F32, 1e-6), (F64, 1e-14)):
    add(
        f"softmax-{NAMES[dtype]}",
        tiles.softmax_kernel,
        lambda dtype=dtype: (torch.randn(768, generator=generator(0), dtype=F64).to(dtype), out(768, dtype=dtype)),
        {"N": 256},
        (3,),
        tolerance=tolerance,
    )
for warps in (1, 4):
    add(
        f"custom-reduce-{warps}-warps",
        tiles.custom_reduce_kernel,
        lambda: (small_integers(256, dtype=I32), out(8, dtype=I32), out(8, dtype=I32)),
        {"M": 8, "N": 32, "num_warps": warps},
    )
for dtype, warps in ((I32, 1), (I64, 4), (F64, 4)):
    add(
        f"scan-{NAMES[dtype]}-{warps}-warps",
        tiles.scan_kernel,
        lambda dtype=dtype: (
            small_integers(256, dtype=dtype),
            1 - 2 * (small_integers(256, dtype=dtype, seed=1) > 0).to(dtype),
            out(6, 256, dtype=dtype),
        ),
        {"M": 8, "N": 32, "num_warps": warps},
    )
add(
    "sort",
    tiles.sort_kernel,
    lambda: (small_integers(128, largest=99), out(2, 128, dtype=F32)),
    {"M": 4, "N": 32},
)
for dtype in (I32, I64, F16, F32, F64):
    add(
        f"atomic-add-{NAMES[dtype]}",
        tiles.atomic_add_kernel,
        lambda dtype=dtype: (
            small_integers(768, dtype=dtype),
            torch.randint(0, 20, (768,), generator=generator(0)),
            torch.zeros(20, dtype=dtype),
            small_integers(768, dtype=dtype, seed=1),
            out(768, dtype=dtype),
            700,
        ),
        {"N": 256},
        (3,),
    )
add(
    "loop",
    tiles.loop_kernel,
    lambda: (small_integers(9, 64, dtype=I32), torch.tensor([5, 0, 9, 1]).to(I32), out(4, 2, 64, dtype=I32)),
    {"N": 64},
    (4,),
)
add(
    "switch",
    tiles.switch_kernel,
    lambda: (small_integers(64, dtype=I32), torch.tensor([4, 1, 6, 0, 3, 5, 2]).to(I32), out(7, 64, dtype=I32)),
    {"N": 64},
    (7,),
    uses="brx.idx",
)
add("while", tiles.while_kernel, lambda: (torch.arange(7, 27), out(20, dtype=I64), 17), {}, (20,))
add(
    "branch",
    tiles.branch_kernel,
    lambda: (small_integers(64, dtype=I32), torch.tensor([0, 3]).to(I32), out(3 * 4 * 2, 64, dtype=I32), 3),
    {"N": 64},
    (3, 4, 2),
)

for dtype, transposed in product((BF16, F16, F32, F64), product((False, True), repeat=2)):
    if dtype != BF16 and transposed[0] != transposed[1]:
        continue
    add(
        f"dot-{NAMES[dtype]}-{'t' if transposed[0] else 'n'}{'t' if transposed[1] else 'n'}",
        tiles.dot_kernel,
        dotted(dtype, 64 if dtype in (BF16, F16) else 16, 32, 32, transposed),
        {"M": 64 if dtype in (BF16, F16) else 16, "N": 32, "K": 32, "PRECISION": "ieee", "TWICE": False},
    )
for width in (16, 128):
    add(
        f"dot-bf16-{width}-columns",
        tiles.dot_kernel,
        dotted(BF16, 64, width, 32, (False, False)),
        {"M": 64, "N": width, "K": 32, "PRECISION": "ieee", "TWICE": False},
    )
for dtype, precision in ((BF16, "ieee"), (F16, "ieee"), (F32, "ieee"), (F32, "tf32"), (F64, "ieee")):
    for size in (32, 64):
        if size == 32 or dtype in (BF16, F16):
            add(
                f"dot-twice-{NAMES[dtype]}-{precision}-{size}",
                tiles.dot_kernel,
                dotted(dtype, size, 32, 32, (False, True), True),
                {"M": size, "N": 32, "K": 32, "PRECISION": precision, "TWICE": True},
            )
for dtype, stages in (*product((BF16,), (1, 2, 3, 4)), (F32, 1), (F32, 3)):
    width = 64 if dtype == BF16 else 16
    add(
        f"pipeline-{NAMES[dtype]}-{stages}-stages",
        tiles.pipeline_kernel,
        lambda dtype=dtype, width=width: (
            small_integers(170, width, dtype=dtype),
            small_integers(170, width, dtype=dtype, seed=1),
            small_integers(170, width, seed=2),
            out(2, width, width, dtype=F32),
            out(2, width, dtype=F32),
            85,
        ),
        {"BLOCK": 16, "N": width, "STAGES": stages},
        (2,),
        uses=f"cp.async.{'cg' if dtype == BF16 else 'ca'} cp.async.commit_group cp.async.wait_group"
        if stages > 1
        else "",
    )


def launched(name: str) -> list[Array]:
    """Launch a kernel, and return its tensors; bfloat16 as float32."""
    case = CASES[name]
    arguments = case.arguments()
    # The interpreter's numpy warns of overflow and of what is no number.
    with np.errstate(all="ignore"):
        case.kernel[case.grid](*arguments, **case.constants)
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return [(tensor.float() if tensor.dtype == BF16 else tensor).numpy() for tensor in tensors]


interpreted = cache(launched)


def simulate(target: str, name: str) -> Ran:
    """Launch a kernel in the simulator."""
    from s3d_fast.kernels.ptx.launch import simulated
    from s3d_fast.kernels.ptx.parse import parse

    with simulated(target) as report:
        tensors = launched(name)
    (launch,) = report.launches
    opcodes = {".".join(one.parts) for one in parse(launch.ptx).code if launch.executed[one.line]}
    return Ran(tensors, [str(one) for one in report.findings + report.ambiguities], opcodes)


def assert_same(found: Array, expected: Array, tolerance: float) -> None:
    """Check that numbers are the same: every bit, but for the bits of what is no number."""
    assert found.dtype == expected.dtype
    if tolerance and found.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        return
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        is_number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found)[is_number], np.signbit(expected)[is_number])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_results_are_those_of_the_interpreter(target: str, name: str, compiled: Callable[..., Ran]) -> None:
    ran = compiled(simulate, target, name)
    for found, expected in zip(ran.tensors, interpreted(name), strict=True):
        assert_same(found, expected, CASES[name].tolerance)
    assert ran.findings == []
    missing = [one for one in CASES[name].uses.split() if not any(opcode.startswith(one) for opcode in ran.opcodes)]
    assert missing == []
