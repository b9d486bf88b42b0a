"""Random calls of all operations: sizes, layouts, biases, vectors per filter, precisions, activations."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from s3d_fast.maths import reference
from s3d_fast.maths.activations import activation, activation_names
from s3d_fast.maths.reference import DepthwiseStage, Widening
from tests.backends.agreement import Arguments, kink_widths
from tests.cases import LAYOUTS, compute_dtype, laid_out, random_tensor
from tests.ptx.families import (
    DTYPES,
    PRECISION_TOLERANCE,
    Call,
    Outcome,
    edges,
    gated,
    krylov_of,
    layers,
    rows,
    simulate_call,
    stages,
)

# Sums over fewer rows may have the error of one product, which two planes bound by this.
FEW, FEW_TOLERANCE = 128, 2.0**-14
# The arguments that get a layout of their own.
LAID_OUT = ("X", "C", "V", "c11", "c12", "c22", "d")


def size(rng: random.Random, most: int) -> int:
    """Return a size of any magnitude, often a multiple of 16 or next to one."""
    drawn = int(2 ** rng.uniform(0, torch.tensor(most).log2().item()))
    return min(most, max(1, rng.choice((drawn, -(-drawn // 16) * 16, -(-drawn // 16) * 16 + rng.choice((-1, 1))))))


class Drawn(NamedTuple):
    """A random call."""

    name: str
    call: Call
    dtype: str  # of its rows
    summed: int  # the different rows that are summed, of the shortest layer

    @property
    def tolerance(self) -> float:
        """The largest error, as a fraction of the largest entry."""
        if self.call.options.get("precision") == "medium":
            return 2 * PRECISION_TOLERANCE["medium"]
        # "High" makes no difference to rows of 16 bits.
        own = self.call._replace(options={}).tolerance(DTYPES[self.dtype])
        if self.summed >= FEW:
            return own
        return max(own, FEW_TOLERANCE) if self.dtype in ("bf16", "fp16") else 4 * own


def drawn(seed: int) -> Drawn:
    """Return the call of a seed."""
    rng = random.Random(seed)
    return (_product if rng.random() < 0.7 else _other)(rng)


def _product(rng: random.Random) -> Drawn:
    form = rng.choice(("rows", "wide rows", "layers", "gated", "edges", "stages"))
    bias, K = rng.random() < 0.5, rng.choice((0, 0, 1, 2, 3))
    dtype = rng.choice(list(DTYPES))
    N, M = size(rng, 500), size(rng, 130)
    summed = N
    if form == "rows":
        sizes: tuple = (N, size(rng, 270), M)
        call = Call("splitting_matvec", rows(*sizes, bias=bias, K=K), set())
    elif form == "wide rows":
        summed = min(N, 200)
        sizes = (summed, 250 + size(rng, 400), min(M, 64))
        call = Call("splitting_matvec", rows(*sizes, bias=bias, K=K), set())
    elif form == "layers":
        sizes = tuple((size(rng, 200), size(rng, 256), size(rng, 70)) for _ in range(rng.randrange(1, 4)))
        summed = min(own[0] for own in sizes)
        call = Call("splitting_matvec_grouped", layers(*sizes, bias=bias, K=K), set())
    elif form == "gated":
        summed = min(N, 250)
        sizes = (summed, size(rng, 150), min(M, 70))
        call = Call("gated_matvec", gated(*sizes, full=rng.random() < 0.5, bias=bias, K=K), set())
    elif form == "edges":
        P, ties = size(rng, 90), rng.choice(("none", "plain", "sloped"))
        sizes = (rng.randrange(1, 4), P, size(rng, 80), min(P, rng.randrange(1, 9)), size(rng, 70))
        summed = sizes[0] * P
        call = Call("edgeconv_matvec", edges(*sizes, ties=ties, bias=bias, K=K), set())
    else:
        # Maps stay as large as the next kernel.
        chain = tuple((_pair(rng, 1, 4), _stage(rng)) for _ in range(rng.randrange(1, 3)))
        sizes = (rng.randrange(1, 4), rng.randrange(7, 12), rng.randrange(7, 12), size(rng, 80), size(rng, 40), chain)
        summed = sizes[0] * sizes[1] * sizes[2]
        call = Call("depthwise_matvec", stages(*sizes, bias=bias, K=K), set())
    options = {"atomic": True} if form in ("rows", "edges") and rng.random() < 0.2 else {}
    if dtype != "fp64" and form != "stages" and rng.random() < 0.4:
        options = {**options, "precision": rng.choice(list(PRECISION_TOLERANCE))}
    chosen = {name: rng.choice(LAYOUTS) for name in LAID_OUT}
    if form == "layers":
        # A copy of these is found by its address, which the simulator does not know.
        del chosen["V"]
    if any(layout.startswith("broadcast") for layout in chosen.values()):
        # Equal rows cancel: as many roundings, and a smaller sum.
        summed = 1
    call = call._replace(
        arguments=_laid_out(call.arguments, chosen), options=options, processors=rng.choice((1, 2, 5, 108))
    )
    words = (form, *sizes, dtype, *["bias"] * bias, f"K{K}", *options.values(), *chosen.values(), call.processors)
    return Drawn(" ".join(map(str, words)), call, dtype, summed)


def _pair(rng: random.Random, least: int, end: int) -> tuple[int, int]:
    return rng.randrange(least, end), rng.randrange(least, end)


def _stage(rng: random.Random) -> DepthwiseStage:
    return DepthwiseStage(_pair(rng, 1, 3), _pair(rng, 0, 3))


def _other(rng: random.Random) -> Drawn:
    """An operation without products."""
    form = rng.choice(("curvature", "krylov", "tridiagonal", "certificate", "surgery"))
    dtype = rng.choice(("fp32", "fp64") if form in ("krylov", "tridiagonal", "certificate") else list(DTYPES))
    if form == "curvature":
        name, shape = rng.choice(activation_names()), tuple(size(rng, 40) for _ in range(rng.randrange(2, 5)))
        axis, by_width = rng.choice((1, len(shape) - 1)), bool(activation(name).kinks) and rng.random() < 0.5
        words: tuple = (name, shape, axis, by_width)
        call = Call("curvature_coefficients", partial(_curvature, name, shape, axis, by_width), set())
    elif form == "krylov":
        words = tuple((size(rng, 5), size(rng, 600)) for _ in range(rng.randrange(1, 4))), rng.randrange(4)
        call = Call("krylov_extend_grouped", krylov_of(*words), set())
    elif form in ("tridiagonal", "certificate"):
        words = (size(rng, 20), size(rng, 12), rng.randrange(100))
        make = _tridiagonal if form == "tridiagonal" else _certificate
        call = Call(
            "tridiagonal_extremes" if form == "tridiagonal" else "certified_widths", partial(make, *words), set()
        )
    else:
        words = (tuple(size(rng, 30) for _ in range(rng.randrange(1, 5))), size(rng, 40), rng.randrange(100))
        call = Call("grow_weights", partial(_surgery, *words), set())
    return Drawn(" ".join(map(str, (form, *words, dtype))), call, dtype, FEW)


def _curvature(name: str, shape: tuple[int, ...], axis: int, by_width: bool, dtype: torch.dtype) -> Arguments:
    g, z = random_tensor(*shape, dtype=dtype), 4 * random_tensor(*shape, dtype=dtype, seed=1)
    rows, channels = z.numel() // shape[axis], shape[axis]
    scale = random_tensor(channels, dtype=dtype, seed=2)
    widths = kink_widths(rows, channels, dtype) if by_width else {}
    return {"g": g, "z": z, "activation": activation(name), "scale": scale, "axis": axis, "inplace": False, **widths}


def _tridiagonal(M: int, k: int, seed: int, dtype: torch.dtype) -> Arguments:
    alpha, beta = (random_tensor(M, k, dtype=compute_dtype(dtype), seed=seed + more) for more in range(2))
    length = torch.randint(1, k + 1, (M,), generator=torch.Generator().manual_seed(seed))
    return {"alpha": alpha, "beta": beta, "length": length}


def _certificate(M: int, k: int, seed: int, dtype: torch.dtype) -> Arguments:
    T = _tridiagonal(M, k, seed, dtype)
    values, _ = reference.tridiagonal_extremes(**T)
    return {**T, "values": values, "growth": torch.logspace(2, 9, M, dtype=torch.float64)}


def _surgery(shape: tuple[int, ...], rows: int, seed: int, dtype: torch.dtype) -> Arguments:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def index(least: int, end: int, count: int) -> Tensor:
        return torch.randint(least, end, (count,), generator=generator)

    def perhaps(own: Tensor) -> Tensor | None:
        return own if rng.random() < 0.5 else None

    columns = rng.randrange(1, 40)
    widening = Widening(
        random_tensor(*shape, dtype=dtype, seed=seed),
        index(0, shape[0], rows),
        perhaps(random_tensor(rows, dtype=dtype, seed=seed + 1)),
        columns=index(0, shape[1], columns) if len(shape) > 1 and rng.random() < 0.5 else None,
        shift_scale=rng.uniform(-1, 1),
    )
    if widening.columns is not None:
        widening = widening._replace(column_scale=perhaps(random_tensor(columns, dtype=dtype, seed=seed + 2)))
    if rng.random() < 0.5:
        moved = rng.randrange(1, 9)
        shift = random_tensor(moved, *shape[1:], dtype=dtype, seed=seed + 3)
        widening = widening._replace(shift=shift, shift_rows=index(-1, moved, rows))
    return {"widenings": [widening]}


def _laid_out(
    make: Callable[[torch.dtype], Arguments], chosen: Mapping[str, str]
) -> Callable[[torch.dtype], Arguments]:
    def arguments(dtype: torch.dtype) -> Arguments:
        given = make(dtype)
        return {name: _in_layout(own, chosen[name]) if name in chosen else own for name, own in given.items()}

    return arguments


def _in_layout(own: Any, layout: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: laid_out(tensor, layout), own)


def simulate_drawn(target: str, seed: int) -> Outcome:
    """Run a random call in the simulator and compare it with the reference in float64."""
    own = drawn(seed)
    return simulate_call(target, own.name, own.call, DTYPES[own.dtype], own.tolerance)
