"""Single instructions of the simulator, on hand-written PTX, against PyTorch and Python's own integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from s3d_fast.kernels.ptx.execute import execute
from s3d_fast.kernels.ptx.findings import Fault
from tests.ptx.programs import floats, integers, program

LOAD = "ld.global.b32 %r{register}, [%rd{tensor}];"


def run(body: str, *tensors: Tensor, threads: int = 32, shared: int = 0) -> None:
    """Execute a program and require that nothing is found."""
    launch = execute(program(body, len(tensors), threads), tensors, (1,), shared)
    assert launch.findings == []


def applied(instruction: str, *inputs: Tensor) -> Tensor:
    """Return %r9 after an instruction on %r1, %r2, ..., which hold the entries of the inputs."""
    out = torch.zeros(32, dtype=torch.int32)
    loads = "\n".join(LOAD.format(register=i + 1, tensor=i) for i in range(len(inputs)))
    run(f"{loads}\n{instruction}\nst.global.b32 [%rd{len(inputs)}], %r9;", *inputs, out)
    return out


def wrapped(number: int) -> int:
    """Return an integer as signed 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


def unsigned(number: int) -> int:
    return number % 2**32


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER: dict[str, Callable[[int, int, int], int]] = {
    "add.s32 %r9, %r1, %r2;": lambda a, b, c: a + b,
    "sub.s32 %r9, %r1, %r2;": lambda a, b, c: a - b,
    "mul.lo.s32 %r9, %r1, %r2;": lambda a, b, c: a * b,
    "mul.hi.s32 %r9, %r1, %r2;": lambda a, b, c: (a * b) >> 32,
    "mul.hi.u32 %r9, %r1, %r2;": lambda a, b, c: (unsigned(a) * unsigned(b)) >> 32,
    "mul.wide.s32 %rd9, %r1, %r2; shr.s64 %rd9, %rd9, 32; cvt.u32.u64 %r9, %rd9;": lambda a, b, c: (a * b) >> 32,
    "mul.wide.u32 %rd9, %r1, %r2; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r9, %rd9;": (
        lambda a, b, c: (unsigned(a) * unsigned(b)) >> 32
    ),
    "mad.lo.s32 %r9, %r1, %r2, %r3;": lambda a, b, c: a * b + c,
    "cvt.s64.s32 %rd9, %r3; mad.wide.s32 %rd9, %r1, %r2, %rd9; shr.s64 %rd9, %rd9, 7; cvt.u32.u64 %r9, %rd9;": (
        lambda a, b, c: (a * b + c) >> 7
    ),
    "div.s32 %r9, %r1, %r2;": lambda a, b, c: truncated(a, b),
    "div.u32 %r9, %r1, %r2;": lambda a, b, c: unsigned(a) // unsigned(b),
    "rem.s32 %r9, %r1, %r2;": lambda a, b, c: a - truncated(a, b) * b,
    "rem.u32 %r9, %r1, %r2;": lambda a, b, c: unsigned(a) % unsigned(b),
    "min.s32 %r9, %r1, %r2;": lambda a, b, c: min(a, b),
    "max.u32 %r9, %r1, %r2;": lambda a, b, c: max(unsigned(a), unsigned(b)),
    "neg.s32 %r9, %r1;": lambda a, b, c: -a,
    "not.b32 %r9, %r1;": lambda a, b, c: ~a,
    "and.b32 %r9, %r1, %r2;": lambda a, b, c: a & b,
    "or.b32 %r9, %r1, %r2;": lambda a, b, c: a | b,
    "xor.b32 %r9, %r1, %r2;": lambda a, b, c: a ^ b,
    "lop3.b32 %r9, %r1, %r2, %r3, 0x96;": lambda a, b, c: a ^ b ^ c,
    "shl.b32 %r9, %r1, 5;": lambda a, b, c: a << 5,
    "shl.b32 %r9, %r1, 40;": lambda a, b, c: 0,
    "shr.s32 %r9, %r1, 5;": lambda a, b, c: a >> 5,
    "shr.s32 %r9, %r1, 77;": lambda a, b, c: a >> 31,
    "shr.u32 %r9, %r1, 5;": lambda a, b, c: unsigned(a) >> 5,
    "shf.l.wrap.b32 %r9, %r1, %r2, 9;": lambda a, b, c: ((unsigned(b) << 32 | unsigned(a)) << 9) >> 32,
    "shf.r.wrap.b32 %r9, %r1, %r2, 9;": lambda a, b, c: (unsigned(b) << 32 | unsigned(a)) >> 9,
    "bfe.u32 %r9, %r1, 3, 7;": lambda a, b, c: unsigned(a) >> 3 & 127,
    "bfe.s32 %r9, %r1, 3, 7;": lambda a, b, c: ((unsigned(a) >> 3 & 127) + 64) % 128 - 64,
    "bfe.s32 %r9, %r1, 28, 7;": lambda a, b, c: a >> 28,
    "bfe.s32 %r9, %r1, 40, 7;": lambda a, b, c: a >> 31,
    "bfe.u32 %r9, %r1, 28, 7;": lambda a, b, c: unsigned(a) >> 28,
    "bfe.u32 %r9, %r1, 40, 7;": lambda a, b, c: 0,
    "popc.b32 %r9, %r1;": lambda a, b, c: bin(unsigned(a)).count("1"),
    "clz.b32 %r9, %r1;": lambda a, b, c: 32 - unsigned(a).bit_length(),
    "prmt.b32 %r9, %r1, %r2, 0x5410;": lambda a, b, c: unsigned(b) << 16 | unsigned(a) & 65535,
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, %r1, %r3, %p1;": lambda a, b, c: a if a < b else c,
    "setp.gt.u32 %p1|%p2, %r1, %r2; selp.b32 %r9, 1, 2, %p2;": lambda a, b, c: 2 if unsigned(a) > unsigned(b) else 1,
    "setp.ne.s32 %p3, %r3, 0; setp.ge.and.s32 %p1, %r1, %r2, %p3; selp.b32 %r9, 1, 0, %p1;": (
        lambda a, b, c: int(a >= b and c != 0)
    ),
    "mov.b64 %rd9, {%r1, %r2}; mov.b64 {_, %r9}, %rd9;": lambda a, b, c: b,
    "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};": (
        lambda a, b, c: (unsigned(a) & 65535) << 16 | unsigned(a) >> 16
    ),
    "cvt.u32.u64 %r9, %rd40; sub.s32 %r9, %r9, %r9;": lambda a, b, c: 0,
    "setp.lt.s32 %p1, %r1, 0; mov.b32 %r9, 7; @%p1 mov.b32 %r9, 9;": lambda a, b, c: 9 if a < 0 else 7,
    "setp.lt.s32 %p1, %r1, 0; @%p1 bra $L1; mov.b32 %r9, 7; bra.uni $L2; $L1: mov.b32 %r9, 9; $L2:": (
        lambda a, b, c: 9 if a < 0 else 7
    ),
}


@pytest.mark.parametrize("instruction", INTEGER)
def test_integers_are_those_of_python(instruction: str) -> None:
    a, b, c = (integers(seed=seed) for seed in range(3))
    b[b == 0] = 3
    expected = [wrapped(INTEGER[instruction](*entry)) for entry in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert applied(instruction, a, b, c).tolist() == expected


FLOAT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add.f32 %r9, %r1, %r2;": lambda a, b, c: a + b,
    "sub.rn.f32 %r9, %r1, %r2;": lambda a, b, c: a - b,
    "mul.f32 %r9, %r1, %r2;": lambda a, b, c: a * b,
    "fma.rn.f32 %r9, %r1, %r2, %r3;": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "div.rn.f32 %r9, %r1, %r2;": lambda a, b, c: a / b,
    "neg.f32 %r9, %r1;": lambda a, b, c: -a,
    "abs.f32 %r9, %r1;": lambda a, b, c: a.abs(),
    "min.f32 %r9, %r1, %r2;": torch.fmin,
    "max.NaN.f32 %r9, %r1, %r2;": lambda a, b, c: torch.maximum(a, b),
    "abs.f32 %r8, %r1; sqrt.rn.f32 %r9, %r8;": lambda a, b, c: a.abs().double().sqrt().float(),
    "cvt.rn.bf16.f32 %rs1, %r1; cvt.f32.bf16 %r9, %rs1;": lambda a, b, c: a.bfloat16().float(),
    "cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r9, %rs1;": lambda a, b, c: a.half().float(),
    "cvt.rn.bf16x2.f32 %r8, %r1, %r2; and.b32 %r9, %r8, 0xFFFF0000;": lambda a, b, c: a.bfloat16().float(),
    "cvt.rn.bf16x2.f32 %r8, %r1, %r2; abs.bf16x2 %r8, %r8; and.b32 %r9, %r8, 0xFFFF0000;": (
        lambda a, b, c: a.bfloat16().abs().float()
    ),
    "cvt.rn.f16x2.f32 %r8, %r1, %r2; add.f16x2 %r8, %r8, %r8; mov.b32 {%rs1, _}, %r8; cvt.f32.f16 %r9, %rs1;": (
        lambda a, b, c: (2 * b.half()).float()
    ),
    "cvt.f64.f32 %rd8, %r1; add.f64 %rd8, %rd8, 0d3FF0000000000000; cvt.rn.f32.f64 %r9, %rd8;": (
        lambda a, b, c: (a.double() + 1).float()
    ),
    "cvt.rzi.s32.f32 %r8, %r1; cvt.rn.f32.s32 %r9, %r8;": lambda a, b, c: a.trunc() + 0.0,
    "setp.lt.f32 %p1, %r1, %r2; selp.f32 %r9, %r3, 0f40490FDB, %p1;": (
        lambda a, b, c: torch.where(a < b, c, torch.tensor(torch.pi))
    ),
    "copysign.f32 %r9, %r1, %r2;": lambda a, b, c: torch.copysign(b, a),
}


@pytest.mark.parametrize("instruction", FLOAT)
def test_float32_numbers_are_those_of_torch(instruction: str) -> None:
    a, b, c = (3 * floats(seed=seed) for seed in range(3))
    expected = FLOAT[instruction](*(a, b) if "min" in instruction else (a, b, c))
    assert torch.equal(applied(instruction, a, b, c).view(torch.float32), expected)


CONSTANT: dict[str, int] = {
    # What is no number, as an integer.
    "cvt.rzi.s32.f32 %r9, 0f7FC00000;": 0,
    "cvt.rni.u32.f32 %r9, 0f7FC00000;": 0,
    "cvt.rzi.s32.f64 %r9, 0d7FF8000000000000;": -(2**31),
    "cvt.rzi.u16.f64 %rs1, 0d7FF8000000000000; cvt.u32.u16 %r9, %rs1;": 2**15,
    "cvt.rzi.s64.f32 %rd9, 0f7FC00000; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r9, %rd9;": -(2**31),
    # Subnormal numbers are zero before and after a conversion that flushes.
    "cvt.rpi.f32.f32 %r9, 0f00000001;": 0x3F800000,
    "cvt.rpi.ftz.f32.f32 %r9, 0f00000001;": 0,
    "cvt.rn.f32.f64 %r9, 0d3700000000000000;": 0x40,
    "cvt.rn.ftz.f32.f64 %r9, 0d3700000000000000;": 0,
    "cvt.ftz.f64.f32 %rd9, 0f00000001; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r9, %rd9;": 0,
    # A little more than a tie, which is one in float32.
    "cvt.rn.bf16.s32 %rs1, 16842753; cvt.u32.u16 %r9, %rs1;": 0x4B81,
    "cvt.rn.bf16.s64 %rs1, 4629700416936869889; cvt.u32.u16 %r9, %rs1;": 0x5E81,
    "cvt.rn.bf16.s64 %rs1, -4629700416936869889; cvt.u32.u16 %r9, %rs1;": 0xDE81,
    "cvt.rn.bf16.f64 %rs1, 0d3FF0100000000001; cvt.u32.u16 %r9, %rs1;": 0x3F81,
    "cvt.rn.bf16.f64 %rs1, 0d3FF0100000000000; cvt.u32.u16 %r9, %rs1;": 0x3F80,
    "cvt.rn.bf16.f64 %rs1, 0d47EFF00000000000; cvt.u32.u16 %r9, %rs1;": 0x7F80,
}


@pytest.mark.parametrize("instruction", CONSTANT)
def test_conversions_at_the_edges(instruction: str) -> None:
    assert set(applied(instruction).tolist()) == {CONSTANT[instruction]}


def nearest(exact: Fraction, bits: int) -> float:
    """Round to so many bits, to the nearest and even."""
    step = Fraction(2) ** (math.frexp(exact)[1] - bits)
    return float(round(exact / step) * step)


# Two factors whose product is a tie of the type, and a much smaller addend.
TIES = {
    "f32": (torch.float32, 24, 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80),
    "f16": (torch.float16, 11, 1 + 2.0**-5, 1 + 2.0**-6, 2.0**-24),
    "bf16": (torch.bfloat16, 8, 1 + 2.0**-4, 1 + 2.0**-4, 2.0**-80),
}


@pytest.mark.parametrize("kind", [*TIES, "f16x2", "bf16x2"])
def test_fma_rounds_once(kind: str) -> None:
    dtype, bits, a, b, c = TIES[kind.removesuffix("x2")]
    count = 128 // dtype.itemsize
    signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]]).repeat(count // 4, 1).T
    A, B, C = (x.to(dtype) for x in (a * signs[0], torch.full((count,), b), c * signs[1]))
    body = f"fma.rn.{kind} %r9, %r1, %r2, %r3;"
    if kind in ("f16", "bf16"):
        halves = "mov.b32 {{%rs{0}, %rs1{0}}}, %r{0};"
        body = " ".join(halves.format(i) for i in (1, 2, 3)) + " mov.b32 %r9, {%rs4, %rs14};"
        body = body.replace("mov.b32 %r9", f"fma.rn.{kind} %rs4, %rs1, %rs2, %rs3; mov.b32 %r9")
        body = body.replace("mov.b32 %r9", f"fma.rn.{kind} %rs14, %rs11, %rs12, %rs13; mov.b32 %r9")
    found = applied(body, *(x.view(torch.int32) for x in (A, B, C))).view(dtype)
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(*(t.tolist() for t in (A, B, C)), strict=True)]
    assert found.tolist() == [nearest(x, bits) for x in exact]


PAIRS = {"f16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("name", "compared"), [("gt", torch.gt), ("ne", torch.ne), ("leu", lambda a, b: ~torch.gt(a, b))]
)
def test_pairs_are_compared_half_by_half(kind: str, name: str, compared: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b = (floats(64, seed).to(PAIRS[kind]).view(32, 2) for seed in range(2))
    a[3], b[5], a[7, 1] = b[3], -a[5], torch.nan
    found = applied(
        f"setp.{name}.{kind}x2 %p1|%p2, %r1, %r2; selp.b32 %r9, 1, 0, %p1; @%p2 add.s32 %r9, %r9, 2;",
        a.view(torch.int32), b.view(torch.int32),
    )  # fmt: skip
    wanted = compared(a, b)
    # Not equal is false for NaN, too.
    wanted &= ~(a.isnan() | b.isnan()) | (name == "leu")
    assert found.tolist() == (wanted[:, 0].int() + 2 * wanted[:, 1].int()).tolist()


@pytest.mark.parametrize(
    ("instruction", "function"),
    [("ex2.approx.f32", torch.exp2), ("lg2.approx.f32", torch.log2), ("rsqrt.approx.f32", torch.rsqrt)],
)
def test_approximate_functions_are_correctly_rounded(instruction: str, function: Callable[[Tensor], Tensor]) -> None:
    x = floats().abs() + 0.1
    found = applied(f"{instruction} %r9, %r1;", x).view(torch.float32)
    torch.testing.assert_close(found, function(x.double()).float(), rtol=2e-7, atol=0)


def test_float64_fma_rounds_once() -> None:
    # The residual of a rounded product, which a product and a sum cannot give.
    a = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(16, dtype=torch.float64)
    body = """
    setp.lt.u32 %p1, %r0, 16;
    mov.b64 %rd10, 0; mov.b64 %rd11, 0;
    mul.wide.u32 %rd21, %r0, 4; add.s64 %rd0, %rd0, %rd21; add.s64 %rd1, %rd1, %rd21; add.s64 %rd2, %rd2, %rd21;
    @%p1 ld.global.b64 %rd10, [%rd0];
    @%p1 ld.global.b64 %rd11, [%rd1];
    mul.f64 %rd12, %rd10, %rd11;
    neg.f64 %rd13, %rd12;
    fma.rn.f64 %rd14, %rd10, %rd11, %rd13;
    @%p1 st.global.b64 [%rd2], %rd14;
    """
    run(body, a, b, out)
    exact = [_residual(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert out.tolist() == exact
    assert any(exact)


def _residual(x: float, y: float) -> float:
    """Return x y - fl(x y), from integers."""
    return float(Fraction(x) * Fraction(y) - Fraction(x * y))


def test_shuffles_and_reductions_of_a_warp() -> None:
    x = integers(64)
    for instruction, expected in {
        "shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;": x.view(2, 32)[:, torch.arange(32) ^ 5],
        "shfl.sync.idx.b32 %r9, %r1, 7, 31, -1;": x.view(2, 32)[:, 7:8].expand(2, 32),
        "shfl.sync.down.b32 %r9, %r1, 3, 31, -1;": x.view(2, 32)[:, [*range(3, 32), 29, 30, 31]],
        "shfl.sync.up.b32 %r9, %r1, 3, 0, -1;": x.view(2, 32)[:, [0, 1, 2, *range(29)]],
        "redux.sync.max.s32 %r9, %r1, -1;": x.view(2, 32).amax(1, keepdim=True).expand(2, 32),
        "redux.sync.add.s32 %r9, %r1, -1;": x.view(2, 32).sum(1, keepdim=True).to(torch.int32).expand(2, 32),
        "setp.lt.s32 %p1, %r1, 0; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;": torch.ones(2, 32),
    }.items():
        out = torch.zeros(64, dtype=torch.int32)
        run(f"ld.global.b32 %r1, [%rd0]; {instruction} st.global.b32 [%rd1], %r9;", x, out, threads=64)
        assert torch.equal(out.view(2, 32), expected.to(torch.int32)), instruction


def test_threads_that_have_returned_take_no_part() -> None:
    out = torch.full((32,), 7, dtype=torch.int32)
    body = "setp.ge.u32 %p1, %r0, 16; @%p1 ret; setp.lt.u32 %p2, %r0, 16; vote.sync.all.pred %p3, %p2, -1;"
    body += "selp.b32 %r9, 1, 0, %p3; add.s32 %r8, %r0, 3; redux.sync.min.u32 %r7, %r8, -1; add.s32 %r9, %r9, %r7;"
    run(f"{body} redux.sync.and.b32 %r7, -1, -1; and.b32 %r9, %r9, %r7; st.global.b32 [%rd0], %r9;", out)
    assert out.tolist() == [4] * 16 + [7] * 16


@pytest.mark.parametrize(
    "instruction",
    [
        "vote.sync.all.pred %p2, %p1, {};", "redux.sync.add.s32 %r9, %r0, {};", "bar.warp.sync {};",
        "shfl.sync.bfly.b32 %r9, %r0, 1, 31, {};",
    ],
)  # fmt: skip
def test_parts_of_warps_are_refused(instruction: str) -> None:
    half = "setp.lt.u32 %p1, %r0, 16;"
    run(half + instruction.format(-1))
    with pytest.raises(Fault, match="the mask does not name all threads of the warp"):
        run(half + instruction.format("0xffff"))
    for members in (-1, "0xffff"):
        with pytest.raises(Fault, match=r"a part of a warp executes .* thread 16"):
            run(f"{half} @%p1 {instruction.format(members)}")


def test_parameters_are_loaded_from_any_place() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    load = "ld.param.b32 %r9, [kernel_param_1+{}]; st.global.b32 [%rd0], %r9;"
    for offset, expected in ((0, 0x1ABCDEF0), (4, 0x12345678), (2, 0x56781ABC)):
        execute(program(load.format(offset), 2), (out, 0x12345678_1ABCDEF0), (1,))
        assert set(out.tolist()) == {expected}
    with pytest.raises(Fault, match="load of 4 bytes at 6 of a parameter of 8"):
        execute(program(load.format(6), 2), (out, 0), (1,))


def test_tables_of_constants_have_places_of_their_own() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    tables = "".join(
        f".global .align 4 .b8 {name}[4] = {{{first}, 1, 0, 0}};\n" for name, first in (("a", 7), ("b", 9))
    )
    body = "mov.b64 %rd8, a; mov.b64 %rd9, b; ld.global.b32 %r8, [%rd8]; ld.global.b32 %r9, [%rd9];"
    execute(tables + program(f"{body} sub.s32 %r9, %r9, %r8; st.global.b32 [%rd0], %r9;", 1), (out,), (1,))
    assert set(out.tolist()) == {2}


def test_threads_have_one_axis() -> None:
    text = program("mov.b32 %r9, %ntid.x;")
    execute(text.replace(".reqntid 32", ".reqntid 32, 1, 1"), (), (1,))
    with pytest.raises(Fault, match="more than one axis"):
        execute(text.replace(".reqntid 32", ".reqntid 32, 2"), (), (1,))


def test_an_indexed_branch_takes_every_thread_to_its_place() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = """
    and.b32 %r1, %r0, 1;
    $L_table: .branchtargets $L_even, $L_odd;
    brx.idx %r1, $L_table;
    $L_even: mov.b32 %r9, 10; bra.uni $L_end;
    $L_odd: mov.b32 %r9, 20;
    $L_end: st.global.b32 [%rd0], %r9;
    """
    run(body, out)
    assert out.tolist() == [10, 20] * 16


def test_atomic_additions_add_up() -> None:
    out, x = torch.zeros(1), floats()
    launch = execute(
        program("ld.global.b32 %r1, [%rd1]; atom.global.gpu.relaxed.add.f32 %r2, [%rd40], %r1;", 2), (out, x), (3,)
    )
    assert launch.findings == []
    torch.testing.assert_close(out, 3 * x.sum(0, keepdim=True))


@pytest.mark.parametrize(("name", "function"), [("rcp", torch.reciprocal), ("rsqrt", torch.rsqrt)])
def test_a_first_guess_of_float64_has_20_bits(name: str, function: Callable[[Tensor], Tensor]) -> None:
    out, x = torch.zeros(32, dtype=torch.float64), torch.rand(32, dtype=torch.float64) + 0.1
    load = "mul.wide.u32 %rd20, %r0, 8; add.s64 %rd21, %rd40, %rd20; add.s64 %rd22, %rd41, %rd20;"
    body = f"{load} ld.global.b64 %rd23, [%rd22]; {name}.approx.ftz.f64 %rd24, %rd23; st.global.b64 [%rd21], %rd24;"
    assert execute(program(body, 2), (out, x), (1,)).findings == []
    assert (out.view(torch.int64) & 0xFFFFFFFF == 0).all()
    torch.testing.assert_close(out, function(x), rtol=2e-6, atol=0)


@pytest.mark.parametrize("places", ["[%rd40]", "[%rd0]"], ids=["one", "each"])
def test_atomic_additions_of_float32_take_subnormal_numbers_for_zeros(places: str) -> None:
    tiny = torch.finfo(torch.float32).tiny
    out, x = torch.full((32,), -tiny / 2), torch.full((32,), tiny / 2)
    x[0] = 1.5 * tiny
    execute(program(f"ld.global.b32 %r1, [%rd1]; red.global.gpu.relaxed.add.f32 {places}, %r1;", 2), (out, x), (1,))
    assert out[0] == 1.5 * tiny
    assert out[1] == (0 if places == "[%rd0]" else -tiny / 2)
    # The sum of two normal numbers may be subnormal.
    out, x = torch.full((32,), -tiny), torch.full((32,), 1.5 * tiny)
    execute(program("ld.global.b32 %r1, [%rd1]; red.global.gpu.relaxed.add.f32 [%rd0], %r1;", 2), (out, x), (1,))
    assert (out == 0).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "tex.2d.v4.f32.s32 %r1, %r2;",
        "add.sat.s32 %r1, %r0, %r0;",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r4};",
        "cp.async.bulk.commit_group;",
        "bar.sync 1, 64;",
        "bar.cta.arrive 0, 128;",
        "barrier.cta.arrive 0, 128;",
        "cvt.rz.f32.f64 %r1, %rd1;",
        "cvt.rz.bf16x2.f32 %r1, %r2, %r3;",
        "cvt.rz.f16x2.f32 %r1, %r2, %r3;",
        "cvt.s32.f32 %r1, %r2;",
        "cp.async.ca.shared.global.L2::cache_hint [%r1], [%rd1], 4, %rd2;",
        "fence.proxy.alias;",
        "ldmatrix.sync.aligned.m8n8.shared.b16 {%r1}, [%r2];",
        "shfl.sync.all.b32 %r1, %r0, 1, 31, -1;",
        "vote.sync.uni.pred %p1, %p2, -1;",
        "atom.global.cta.relaxed.add.u32 %r1, [%rd1], %r0;",
        "atom.global.exch.b32 %r1, [%rd1], %r0;",
        "atom.global.gpu.relaxed.add.noftz.bf16 %rs1, [%rd1], %rs2;",
    ],
)
def test_an_unknown_instruction_is_an_error_that_names_it(instruction: str) -> None:
    with pytest.raises(Fault, match="unknown instruction") as error:
        execute(program(instruction, threads=128), (), (1,))
    assert instruction.rstrip(";") in str(error.value)
    assert "PTX line" in str(error.value)
