"""Small Triton kernels of single entries, each with one class of instructions, for the interpreter and the simulator.

A kernel writes its results one after the other: result j is row j of `out`, with N entries. Where the interpreter is
wrong, the kernel does what the language says in another way, and a comment says what is wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from s3d_fast.kernels import device

INTERPRETED = tl.constexpr(device.INTERPRETED)
ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def narrowed(x):
    """float32 as bfloat16, rounded to the nearest and even."""
    if INTERPRETED:
        # The interpreter cuts the lower bits off.
        bits = x.to(tl.uint32, bitcast=True).to(tl.uint64)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FFFFFFF)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def widened(x):
    """bfloat16 as float32; other numbers as they are."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        # The interpreter loses subnormal numbers.
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.bfloat16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def larger(x, y, PROPAGATE: tl.constexpr):
    if INTERPRETED:
        # The interpreter leaves open which of 0 and -0 is larger.
        x, y = tl.where((x == y) & (1 / x < 1 / y), y, x), tl.where((x == y) & (1 / y < 1 / x), x, y)
    return tl.maximum(x, y, propagate_nan=PROPAGATE)


@triton.jit
def smaller(x, y, PROPAGATE: tl.constexpr):
    if INTERPRETED:
        # The interpreter leaves open which of 0 and -0 is smaller.
        x, y = tl.where((x == y) & (1 / y < 1 / x), y, x), tl.where((x == y) & (1 / x < 1 / y), x, y)
    return tl.minimum(x, y, propagate_nan=PROPAGATE)


@triton.jit
def fused(x, y, z):
    """x y + z, where the interpreter's product, which it rounds, is exact in float64."""
    if x.dtype == tl.float64:
        return tl.fma(x.to(tl.float32).to(tl.float64), y.to(tl.float32).to(tl.float64), z)
    elif INTERPRETED:
        return tl.fma(x.to(tl.float64), y.to(tl.float64), z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def integer_kernel(a, b, out, SHIFTS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    zero = tl.zeros_like(x)
    tl.store(out + i, tl.add(x, y, sanitize_overflow=False))
    tl.store(out + N + i, tl.sub(x, y, sanitize_overflow=False))
    tl.store(out + 2 * N + i, tl.mul(x, y, sanitize_overflow=False))
    tl.store(out + 3 * N + i, x // y)
    tl.store(out + 4 * N + i, (x ^ 5) % y)
    tl.store(out + 5 * N + i, tl.minimum(x, y))
    tl.store(out + 6 * N + i, tl.maximum(x, y))
    tl.store(out + 7 * N + i, x & y)
    tl.store(out + 8 * N + i, x | y)
    tl.store(out + 9 * N + i, x ^ y)
    tl.store(out + 10 * N + i, tl.sub(zero, x, sanitize_overflow=False))
    tl.store(out + 11 * N + i, x << (y & SHIFTS))
    tl.store(out + 12 * N + i, x >> (y & SHIFTS))
    tl.store(out + 13 * N + i, (x >> 3) & 127)
    # Multiplications by an inverse.
    tl.store(out + 14 * N + i, x // 7)
    tl.store(out + 15 * N + i, x % 24)
    tl.store(out + 16 * N + i, x // 16)
    tl.store(out + 17 * N + i, tl.where((x < y) & (y <= 9) | (x == 5), x, y))
    tl.store(out + 18 * N + i, tl.where(~((x > y) ^ (x >= 0)) & (x != 3), x, y))
    if x.dtype.is_int_signed():
        tl.store(out + 19 * N + i, tl.abs(x) & ~y)
    else:
        tl.store(out + 19 * N + i, tl.umulhi(x, y))


@triton.jit
def wide_product_kernel(a, b, out, factor, N: tl.constexpr):
    """Products and addends of 64 bits from factors of 32."""
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x.to(tl.int64) * y.to(tl.int64))
    tl.store(out + N + i, x.to(tl.int64) * y.to(tl.int64) + factor)
    tl.store(out + 2 * N + i, (x.to(tl.uint32, bitcast=True).to(tl.uint64) * 3000000019).to(tl.int64))
    tl.store(out + 3 * N + i, i.to(tl.int64) * factor + x)
    tl.store(out + 4 * N + i, (x.to(tl.int64) << 32) | (y.to(tl.int64) & 0xFFFFFFFF))


@triton.jit
def random_kernel(out, seed, N: tl.constexpr):
    """Triton's random numbers: products of 32 bits, their upper halves, and conversion to float32."""
    i = tl.arange(0, N)
    tl.store(out + i, tl.rand(seed, i))
    tl.store(out + N + i, (tl.randint(seed, i) & 0xFFFFFF).to(tl.float32))


@triton.jit
def float_kernel(a, b, c, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y, z = tl.load(a + i), tl.load(b + i), tl.load(c + i)
    tl.store(out + i, x + y)
    tl.store(out + N + i, x - y)
    tl.store(out + 2 * N + i, x * y)
    tl.store(out + 3 * N + i, fused(x, y, z))
    tl.store(out + 4 * N + i, -x)
    tl.store(out + 5 * N + i, tl.abs(x))
    tl.store(out + 6 * N + i, tl.floor(z))
    tl.store(out + 7 * N + i, tl.ceil(z))
    tl.store(out + 8 * N + i, larger(x, y, tl.PropagateNan.NONE))
    tl.store(out + 9 * N + i, smaller(x, y, tl.PropagateNan.NONE))
    tl.store(out + 10 * N + i, larger(x, y, ALL))
    tl.store(out + 11 * N + i, smaller(x, y, ALL))
    tl.store(out + 12 * N + i, tl.clamp(x, -1.5, 2.25))
    tl.store(out + 13 * N + i, tl.clamp(x, -1.5, 2.25, propagate_nan=ALL))
    if x.dtype == tl.float32:
        tl.store(out + 14 * N + i, tl.div_rn(x, y))
        tl.store(out + 15 * N + i, tl.sqrt_rn(tl.abs(x)))
    else:
        tl.store(out + 14 * N + i, x / y)
        tl.store(out + 15 * N + i, tl.sqrt(tl.abs(x)))


@triton.jit
def half_kernel(a, b, out, N: tl.constexpr):
    """Arithmetic of 16-bit numbers."""
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + 5 * N + i, tl.abs(x))
    if INTERPRETED and x.dtype == tl.bfloat16:
        # The interpreter calculates with the raw bits.
        x, y = widened(x), widened(y)
        tl.store(out + i, narrowed(x + y))
        tl.store(out + N + i, narrowed(x - y))
        tl.store(out + 2 * N + i, narrowed(x * y))
        tl.store(out + 3 * N + i, narrowed(larger(x, y, ALL)))
        tl.store(out + 4 * N + i, narrowed(smaller(x, y, ALL)))
    else:
        tl.store(out + i, x + y)
        tl.store(out + N + i, x - y)
        tl.store(out + 2 * N + i, x * y)
        tl.store(out + 3 * N + i, larger(x, y, ALL))
        tl.store(out + 4 * N + i, smaller(x, y, ALL))


@triton.jit
def compare_kernel(a, b, c, out, chosen, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y, z = tl.load(a + i), tl.load(b + i), tl.load(c + i)
    if INTERPRETED:
        # The interpreter compares the raw bits of bfloat16 numbers.
        x, y, z = widened(x), widened(y), widened(z)
    tl.store(out + i, x == y)
    tl.store(out + N + i, x != y)
    tl.store(out + 2 * N + i, x < y)
    tl.store(out + 3 * N + i, x <= y)
    tl.store(out + 4 * N + i, x > y)
    tl.store(out + 5 * N + i, x >= y)
    tl.store(out + 6 * N + i, ~(x < y) & (y > 0))
    tl.store(out + 7 * N + i, (x != x) | ~(y >= z))
    tl.store(chosen + i, tl.where(x < y, x, z))
    tl.store(chosen + N + i, tl.where(~(x < y) & tl.load(out + 8 * N + i), x, y))
    # One of the numbers is a constant.
    tl.store(chosen + 2 * N + i, tl.where(x != 1, tl.where(y <= 0, z, y), x))


@triton.jit
def function_kernel(a, out, N: tl.constexpr):
    """Functions whose last bits are not determined."""
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, tl.exp(x))
    tl.store(out + N + i, tl.exp2(x))
    tl.store(out + 2 * N + i, tl.log(tl.abs(x)))
    tl.store(out + 3 * N + i, tl.log2(tl.abs(x)))
    tl.store(out + 4 * N + i, tl.erf(x))
    tl.store(out + 5 * N + i, tl.sqrt(tl.abs(x)))
    tl.store(out + 6 * N + i, tl.rsqrt(tl.abs(x)))
    tl.store(out + 7 * N + i, 1 / (1 + tl.exp(-x)))
    tl.store(out + 8 * N + i, tl.where(x > 0, x, tl.exp(x) - 1) / (x + 11))


@triton.jit
def convert_kernel(a, f64, f32, f16, bf16, i64, i32, i8, u8, N: tl.constexpr):
    """Every number in every dtype; without integers where None stands for their tensors."""
    i = tl.arange(0, N)
    x = widened(tl.load(a + i))
    tl.store(f64 + i, x.to(tl.float64))
    tl.store(f32 + i, x.to(tl.float32))
    tl.store(f16 + i, x.to(tl.float16))
    tl.store(bf16 + i, narrowed(x.to(tl.float32)))
    if i64 is not None:
        tl.store(i64 + i, x.to(tl.int64))
        tl.store(i32 + i, x.to(tl.int32))
        tl.store(i8 + i, x.to(tl.int8))
        tl.store(u8 + i, tl.abs(x).to(tl.uint8))


@triton.jit
def bits_kernel(a, out, N: tl.constexpr):
    """The bits of float32 numbers as integers, and back: the exponent, the mantissa, and the neighbour."""
    i = tl.arange(0, N)
    bits = tl.load(a + i).to(tl.int32, bitcast=True)
    tl.store(out + i, ((bits >> 23) & 255).to(tl.float32))
    tl.store(out + N + i, ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True))
    tl.store(out + 2 * N + i, (bits ^ 1).to(tl.float32, bitcast=True))
    tl.store(out + 3 * N + i, (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
