"""The shapes, tolerances and memory layouts that tests and benchmarks share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from s3d_fast.maths.reference import DepthwiseStage
from s3d_fast.models.mobilenet import FULL_WIDTHS, STRIDES

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
DTYPES = tuple(DTYPE_NAMES)
COMPUTE_DTYPES = DTYPES[:2]

# The largest error allowed, as a fraction of the largest entry of what is expected. Rows stored in 16 bits are computed
# with in float32, so that against the same stored rows they are as exact as float32 ones.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.bfloat16: 1e-4,
    torch.float16: 1e-4,
}
# The same for results that are stored in these dtypes and take a handful of roundings for each entry: no sums.
ENTRY_TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 3e-6,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-3,
}


class Case:
    """A shape whose name, such as N65-D33-M7-fp32, is made of its fields."""

    M: int
    dtype: torch.dtype
    bias: bool
    # Vectors for each filter; 0 stands for one vector without the leading dimension.
    K: int

    @property
    def width(self) -> int:
        """The number of parameters of a filter, its bias included."""
        raise NotImplementedError

    def tensors(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Return random tensors of these shapes."""
        raise NotImplementedError

    def vectors(self, seed: int = 1) -> Tensor:
        """Return random unit vectors V, (M, width) or (K, M, width)."""
        return random_vectors(*[self.K] * (self.K > 0), self.M, self.width, dtype=self.dtype, seed=seed)

    def __str__(self) -> str:
        return "-".join(self._words())

    def _words(self) -> Iterator[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.dtype):
                yield DTYPE_NAMES[value]
            elif isinstance(value, bool):
                yield from [field.name] * value
            elif isinstance(value, tuple):
                yield field.name + "x".join(map(str, value))
            elif field.name != "K" or value:
                yield f"{field.name}{value}"


@dataclass(frozen=True)
class RowsCase(Case):
    """A linear layer or 1 x 1 convolution: N rows, D inputs, M filters."""

    N: int
    D: int
    M: int
    dtype: torch.dtype = torch.float64
    bias: bool = False
    K: int = 0

    @property
    def width(self) -> int:
        return self.D + self.bias

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random X (N, D) and C (N, M)."""
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(self.N, self.D, generator=generator, dtype=torch.float64)
        C = torch.randn(self.N, self.M, generator=generator, dtype=torch.float64)
        return X.to(self.dtype), C.to(self.dtype)


@dataclass(frozen=True)
class ConvCase(Case):
    """A 2-d convolution: B images of I channels, M filters with kernel k, stride s, padding p and dilation d."""

    B: int
    I: int  # noqa: E741
    H: int
    W: int
    M: int
    k: tuple[int, int]
    s: tuple[int, int] = (1, 1)
    p: tuple[int, int] = (0, 0)
    d: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.float64
    bias: bool = False
    K: int = 0

    @property
    def width(self) -> int:
        return self.I * self.k[0] * self.k[1] + self.bias

    @property
    def geometry(self) -> dict[str, tuple[int, int]]:
        """The keyword arguments of the convolution but for its kernel size."""
        return {"stride": self.s, "padding": self.p, "dilation": self.d}

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random X (B, I, H, W) and C (B, M, H', W')."""
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(self.B, self.I, self.H, self.W, generator=generator, dtype=torch.float64)
        out = torch.nn.functional.conv2d(X, X.new_zeros(self.M, self.I, *self.k), **self.geometry)
        C = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        return X.to(self.dtype), C.to(self.dtype)


@dataclass(frozen=True)
class DepthwiseCase(Case):
    """A pointwise layer on B maps of D channels, with M filters, and stages (kernel size, geometry) behind it."""

    B: int
    H: int
    W: int
    D: int
    M: int
    stages: tuple[tuple[tuple[int, int], DepthwiseStage], ...]
    dtype: torch.dtype = torch.float64
    bias: bool = False
    K: int = 0

    @property
    def width(self) -> int:
        return self.D + self.bias

    def sizes(self) -> list[tuple[int, int]]:
        """Return the height and width of the maps, from the first to the last."""
        sizes = [(self.H, self.W)]
        for kernel_size, stage in self.stages:
            sizes.append(stage.size(sizes[-1], kernel_size))
        return sizes

    def tensors(self, seed: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Return random X (B H W, D), and the lists of C, d and weight."""
        seeds = iter(range(10 * seed, 10 * seed + 100))

        def random(*shape: int) -> Tensor:
            return random_tensor(*shape, dtype=self.dtype, seed=next(seeds))

        X = random(self.B * self.H * self.W, self.D)
        maps = [(self.B, *size, self.M) for size in self.sizes()]
        C, d = [random(*shape) for shape in maps], [random(*shape) for shape in maps[:-1]]
        return X, C, d, [random(self.M, *kernel_size) for kernel_size, _ in self.stages]

    def _words(self) -> Iterator[str]:
        for word in super()._words():
            if word.startswith("stages"):
                yield from (f"{k[0]}x{k[1]}s{s.stride}p{s.padding}d{s.dilation}" for k, s in self.stages)
            else:
                yield word


@dataclass(frozen=True)
class EdgeCase(Case):
    """An EdgeConv layer: B clouds of P points with F features, k neighbours each, M filters."""

    B: int
    P: int
    F: int
    k: int
    M: int
    dtype: torch.dtype = torch.float64
    bias: bool = False
    K: int = 0

    @property
    def width(self) -> int:
        return 2 * self.F + self.bias

    def won(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return random X (B, P, F), winner (B, P, M) and C (B, P, M)."""
        X, neighbours, slot, C = self.tensors(seed)
        return X, neighbours.gather(2, slot), C

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random X (B, P, F), neighbours (B, P, k), slot (B, P, M) in [0, k) and C (B, P, M)."""
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(self.B, self.P, self.F, generator=generator, dtype=torch.float64)
        neighbours = torch.rand(self.B, self.P, self.P, generator=generator).argsort(-1)[..., : self.k]
        slot = torch.randint(self.k, (self.B, self.P, self.M), generator=generator)
        C = torch.randn(self.B, self.P, self.M, generator=generator, dtype=torch.float64)
        return X.to(self.dtype), neighbours, slot, C.to(self.dtype)


def all_pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations in which any two values of two different choices occur together."""
    rng = random.Random(0)
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(choices)), 2)
        for a, b in product(range(len(choices[i])), range(len(choices[j])))
    }

    def pairs(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in combinations(range(len(choices)), 2)}

    found = []
    while missing:
        # One pair that is missing, and the best of some random ways to complete it.
        i, a, j, b = min(missing)
        rows = [[rng.randrange(len(values)) for values in choices] for _ in range(40)]
        for row in rows:
            row[i], row[j] = a, b
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        found.append(tuple(values[index] for values, index in zip(choices, best, strict=True)))
    return found


ROWS = (
    RowsCase(64, 32, 16),
    RowsCase(65, 33, 7),
    RowsCase(65, 33, 7, bias=True),
    RowsCase(1, 5, 3),
    RowsCase(9, 1, 4),
    RowsCase(9, 5, 1, bias=True),
    RowsCase(65, 33, 7, torch.float32),
    RowsCase(65, 33, 7, torch.float32, bias=True),
    RowsCase(65, 33, 7, torch.bfloat16),
    RowsCase(65, 33, 7, torch.float16, bias=True),
)

# Sizes on both sides of every block of the kernels: 96 or 128 rows, panels of up to 32 filters, 16 to 256 inputs.
PAIRWISE_ROWS = [
    RowsCase(N, D, M, dtype, bias, K)
    for D, N, M, dtype, K, bias in all_pairs(
        (1, 5, 16, 20, 33, 128, 256, 300, 520),
        (0, 1, 96, 97, 1040),
        (1, 7, 16, 32, 65),
        DTYPES,
        (0, 1, 2, 3),
        (False, True),
    )
]

# For benchmarks only.
LARGE_ROWS = (
    RowsCase(65536, 32, 32, torch.float32),
    RowsCase(65536, 64, 64, torch.float32),
    RowsCase(65536, 128, 128, torch.float32),
    RowsCase(65536, 256, 256, torch.float32),
    RowsCase(32768, 512, 512, torch.float32),
    RowsCase(65536, 64, 64, torch.bfloat16),
    RowsCase(65536, 64, 64, torch.float64),
)


def mobilenet_layers(widths: Sequence[int], rows: int) -> list[RowsCase]:
    """Return the 13 pointwise layers of MobileNetV1; `widths` begins with the stem, which has `rows` rows."""
    layers = []
    for fan_in, width, stride in zip(widths[:-1], widths[1:], STRIDES, strict=True):
        rows //= stride**2
        layers.append(RowsCase(rows, fan_in, width, torch.float32))
    return layers


# Lists of layers that one grouped call does, by name; for benchmarks only.
NETWORKS = {
    "MobileNetV1, 32 filters, CIFAR, batch 128": mobilenet_layers([32] * 14, 128 * 32 * 32),
    "MobileNetV1 1.0x, ImageNet, batch 8": mobilenet_layers(FULL_WIDTHS, 8 * 112 * 112),
    "DGCNN embedding and head, batch 16": [
        RowsCase(16 * 1024, 512, 1024, torch.float32),
        RowsCase(16, 2048, 512, torch.float32, bias=True),
        RowsCase(16, 512, 256, torch.float32, bias=True),
    ],
}

CONVS = (
    ConvCase(2, 3, 6, 6, 4, k=(3, 3), p=(1, 1)),
    ConvCase(2, 3, 7, 6, 4, k=(3, 3), s=(2, 2), p=(1, 1), bias=True),
    ConvCase(2, 2, 8, 7, 3, k=(2, 3), s=(2, 1), p=(0, 2), d=(3, 2)),
    ConvCase(1, 2, 8, 8, 3, k=(3, 1), s=(3, 2), d=(2, 1), bias=True),
    ConvCase(2, 3, 5, 5, 4, k=(1, 1)),
    ConvCase(2, 3, 6, 6, 4, k=(3, 3), p=(1, 1), dtype=torch.float32, bias=True),
    ConvCase(2, 3, 6, 6, 4, k=(3, 3), p=(1, 1), dtype=torch.bfloat16),
)

SAME, HALVED = DepthwiseStage(padding=(1, 1)), DepthwiseStage((2, 2), (1, 1))
UNEVEN = DepthwiseStage((1, 3), (2, 0), (2, 1))
DEPTHWISE = (
    DepthwiseCase(2, 6, 5, 3, 4, (((3, 3), SAME),)),
    DepthwiseCase(3, 7, 6, 5, 9, (((3, 3), HALVED),), bias=True, K=2),
    DepthwiseCase(2, 9, 8, 3, 5, (((3, 2), UNEVEN), ((2, 3), HALVED), ((1, 1), DepthwiseStage())), bias=True),
    # Places that no tap reaches, a stride beyond the kernel, and a kernel larger than the map.
    DepthwiseCase(2, 4, 5, 2, 3, (((1, 1), DepthwiseStage((3, 2), (2, 1))), ((3, 3), DepthwiseStage(padding=(2, 3))))),
    DepthwiseCase(2, 2, 3, 2, 3, (((5, 5), DepthwiseStage(padding=(2, 2))),)),
    DepthwiseCase(5, 3, 3, 20, 37, (((3, 3), SAME), ((3, 3), HALVED)), torch.float32, K=3),
    DepthwiseCase(1, 14, 13, 17, 33, (((3, 3), HALVED),), torch.float32, bias=True),
    DepthwiseCase(30, 2, 2, 33, 16, (((3, 3), SAME),), torch.bfloat16, bias=True),
    DepthwiseCase(2, 12, 30, 4, 70, (((5, 3), DepthwiseStage((1, 1), (2, 1))),), torch.float16),
)

# For benchmarks only: the EdgeConv layers of DGCNN.
LARGE_EDGES = tuple(
    EdgeCase(16, 1024, F, 20, M, dtype=torch.float32) for F, M in ((3, 64), (64, 64), (64, 128), (128, 256))
)

EDGES = (
    EdgeCase(2, 9, 3, 4, 5),
    EdgeCase(2, 9, 3, 4, 5, bias=True),
    EdgeCase(1, 6, 2, 1, 4, bias=True),
    EdgeCase(3, 5, 1, 5, 1),
    EdgeCase(2, 9, 3, 4, 5, dtype=torch.float32, bias=True),
    EdgeCase(2, 9, 3, 4, 5, dtype=torch.float16),
)

PAIRWISE_EDGES = [
    EdgeCase(B, P, F, min(P, 4), M, dtype, bias, K)
    for P, F, M, dtype, B, K, bias in all_pairs(
        (1, 7, 96, 97, 200),
        (1, 3, 16, 33, 130),
        (1, 7, 16, 33),
        DTYPES,
        (1, 2, 3),
        (0, 1, 2),
        (False, True),
    )
]


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype that rows stored as `stored` are computed with."""
    return torch.float64 if stored == torch.float64 else torch.float32


def random_vectors(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Return random vectors of unit length."""
    V = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (V / V.norm(dim=-1, keepdim=True)).to(compute_dtype(dtype))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error as a fraction of the largest entry of `expected`; NaN counts as infinite."""
    assert actual.shape == expected.shape, f"got shape {tuple(actual.shape)}, wanted {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.double(), expected.double()
    scale = expected.abs().max().item()
    error = (actual - expected).abs().nan_to_num(nan=torch.inf).max().item()
    return error / scale if scale > 0 else error


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return standard normal entries."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


LAYOUTS = ("contiguous", "transposed", "stepped", "offset", "broadcast-first", "broadcast-last")


def embedded(tensor: Tensor, layout: str = "offset") -> tuple[Tensor, Tensor]:
    """Return a view with the entries of `tensor` and the larger buffer around it.

    The rest of the buffer is NaN, or an index that is out of every range.
    """
    step, before = (3, 0) if layout == "stepped" else (1, 2)
    sizes = [max(1, step * size + 2 * before) for size in tensor.shape]
    buffer = tensor.new_full(sizes, torch.nan if tensor.is_floating_point() else 10**9)
    view = buffer[tuple(slice(before, before + step * size, step) for size in tensor.shape)]
    return view.copy_(tensor), buffer


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor of the same shape in the given layout: of equal entries, or with one dimension broadcast."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout in ("stepped", "offset"):
        return embedded(tensor, layout)[0]
    if layout.startswith("broadcast") and tensor.numel():
        return tensor.narrow(0 if layout.endswith("first") else -1, 0, 1).expand_as(tensor)
    return tensor
