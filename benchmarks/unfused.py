"""The best unfused form of S v that we know: a library's matrix products and elementwise kernels, in a CUDA graph.

bfloat16 rows: V is split into two bfloat16 planes, which are stacked: X [V1; V2]^T is one product of 2 M filters. One
kernel adds both halves, multiplies by C and splits the result in the same way; [U1, U2]^T X is the second product, and
one kernel adds its halves. float32 rows: the same without planes. float32 rows by TF32 products: X is in two planes,
which were made before, and each product takes two calls: X1 [V1; V2]^T, and X2 V1^T, which is added. EdgeConv: both
products over points are one; one kernel gathers, one scatters by atomic additions, one splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.launches import Shape

FLOAT = 4
# The type of the factors of the library's products.
FACTORS = {"fp32": "fp32", "fp32 high": "tf32", "bf16": "bf16"}
# The bytes of a stored number, the planes of V and of U, and the products that they take.
STORED = {"fp32": (4, 1, 1), "fp32 high": (4, 2, 3), "bf16": (2, 2, 2)}


@dataclass(frozen=True)
class Operation:
    """One kernel: its multiply-adds on the fast units, and the tensors it touches: (name, bytes, writes)."""

    multiply_adds: float
    touched: tuple[tuple[str, float, bool], ...]


def read(name: str, size: float) -> tuple[str, float, bool]:
    return name, size, False


def write(name: str, size: float) -> tuple[str, float, bool]:
    return name, size, True


def operations(layer: int, shape: Shape, kind: str) -> Iterator[Operation]:
    """Yield the kernels of one layer with this kind of rows."""
    size, planes, products = STORED[kind]
    N, D, M = shape.N, shape.D, shape.M
    # EdgeConv multiplies by A and by B - A, and has twice as many sums.
    halves = 2 if shape.clouds else 1
    tensors = ("X", "X2", "C", "V", "planes", "wide", "U", "parts", "out", "t", "received")
    names = {name: f"{layer} {name}" for name in tensors}
    X, C = read(names["X"], N * D * size), read(names["C"], N * M * size)
    vectors, product = FLOAT * halves * M * D, FLOAT * planes * halves * N * M
    U = planes * halves * N * M * size
    if planes > 1 or shape.clouds:
        yield Operation(0, (read(names["V"], vectors), write(names["planes"], planes * halves * M * D * size)))
    factor = read(names["planes"], planes * halves * M * D * size) if planes > 1 else read(names["V"], vectors)
    once = halves * N * D * M
    yield Operation(planes * once, (X, factor, write(names["wide"], product)))
    X2 = read(names["X2"], N * D * size)
    if products > planes:
        half = product // planes
        yield Operation(once, (X2, factor, read(names["wide"], half), write(names["wide"], half)))
    if shape.clouds:
        t = FLOAT * N * M
        winner = read(names["C"] + " winner", 4 * N * M)
        yield Operation(0, (read(names["wide"], product), C, winner, write(names["t"], t)))
        # The received sums are zeroed, read and written.
        yield Operation(
            0, (read(names["t"], t), winner, write(names["received"], t), read(names["received"], t),
                write(names["received"], t)),
        )  # fmt: skip
        yield Operation(0, (read(names["t"], t), read(names["received"], t), write(names["U"], U)))
    else:
        yield Operation(0, (read(names["wide"], product), C, write(names["U"], U)))
    sums = planes * vectors
    yield Operation(planes * once, (X, read(names["U"], U), write(names["parts"], sums)))
    if products > planes:
        halved = read(names["U"], U // planes), read(names["parts"], vectors), write(names["parts"], vectors)
        yield Operation(once, (X2, *halved))
    if planes > 1:
        yield Operation(0, (read(names["parts"], sums), write(names["out"], vectors)))
