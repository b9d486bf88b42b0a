"""The launches that the compile check compiles: those that the operations make for representative tensors.

The tensors are on PyTorch's device "meta" and have no contents. Each operation with products has two variants. The
plain one is for layers without a bias whose sizes are multiples of 16. The "general" one is for layers with a bias and
any sizes; zeros follow their rows where products are made on tensor cores. "Two vectors" are those per filter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from s3d_fast.kernels import (
    configs,
    curvature,
    depthwise,
    edgeconv,
    gated,
    grouped,
    krylov,
    pointwise,
    pointwise_wide,
    surgery,
    tiles,
    tridiagonal,
)
from s3d_fast.kernels.aligned import aligned, split_rows
from s3d_fast.kernels.compiled import Target
from s3d_fast.kernels.launch import Launch
from s3d_fast.kernels.options import TritonOptions
from s3d_fast.kernels.products import product_form, row_storage
from s3d_fast.maths.activations import activation, activation_names
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import DepthwiseStage, EdgeTies, KrylovState, Widening

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# With this many filters every tile has its full size; layers with fewer filters get smaller tiles.
MANY_FILTERS, FEWER_FILTERS = 1024, (64, 32, 16)
MANY_ROWS = 65536
# Sizes that are not multiples of 16 are this much beyond one.
ODD = 5
# Wider than any fused kernel.
WIDE = 512


class CheckedLaunches:
    """The launches for one target and one kind of rows, in their default configurations; each once."""

    def __init__(self, target: Target, kind: str) -> None:
        dtype, precision = (*kind.split(), "highest")[:2]
        self.device, self.kind, self.stored = target.device, kind, STORED[dtype]
        self.number = torch.float64 if dtype == "fp64" else torch.float32
        self.options = TritonOptions(precision=precision, scratch_bytes=1 << 40)
        self.form = product_form(self.stored, precision, self.device)

    def __iter__(self) -> Iterator[Launch]:
        seen = set()
        for launch in self._all():
            # Operations share kernels that split vectors, multiply and sum.
            key = (launch.name, launch.label)
            if key not in seen:
                seen.add(key)
                yield launch

    def _all(self) -> Iterator[Launch]:
        yield from self.split_rows()
        yield from self.biased()
        for is_general in (False, True):
            suffix = ", general" * is_general
            for launches in (self.pointwise, self.wide, self.gated, self.edgeconv, self.grouped, self.depthwise):
                for launch in launches(is_general):
                    yield replace(launch, name=launch.name + suffix)
        yield from self.curvature()
        yield from self.surgery()
        yield from self.lanczos()

    def rows(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.stored, device="meta")

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.number, device="meta")

    def planes(self, N: int, D: int) -> Tensor:
        """Return rows as products read them: (planes, N, D)."""
        X = self.rows(N, D)
        return aligned(self.form, X)[None] if self.reads_rows_as_stored else split_rows(self.form, X)[1]

    @property
    def reads_rows_as_stored(self) -> bool:
        return row_storage(self.form, self.stored) == (1, self.stored)

    def layer(self, D: int, filters: int, is_general: bool, N: int = MANY_ROWS) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Return X, C, V and whether there is a bias; the general variant is a bit narrower."""
        if not is_general:
            return self.planes(N, D), self.rows(N, filters), self.numbers(filters, D), False
        C, V = self.rows(N, filters - ODD), self.numbers(filters - ODD, D - ODD + 1)
        return self.planes(N, D - ODD), aligned(self.form, C), V, True

    def split_rows(self) -> Iterator[Launch]:
        """Yield the launches that write rows as planes."""
        for D in () if self.reads_rows_as_stored else (64, 64 - ODD):
            launch, _ = split_rows(self.form, self.rows(MANY_ROWS, D))
            yield replace(launch, name=launch.name + ", general" * (D != 64))

    def biased(self) -> Iterator[Launch]:
        """Yield the launches of aligned layers with a bias, and with two vectors per filter."""
        for D, vectors in ((64, 1), (WIDE, 1), (64, 2), (WIDE, 2)):
            X, C = self.planes(MANY_ROWS, D), self.rows(MANY_ROWS, MANY_FILTERS)
            layer = X, C, self.numbers(vectors * MANY_FILTERS, D + 1), True, self.form
            found = configs.pointwise(self.device, self.form, self.stored, D, MANY_FILTERS, bias=True)
            pair = configs.wide(self.device, self.form, self.stored, MANY_ROWS)[0]
            if found:
                plan = pointwise.plan(*layer, self.device, self.options, found[0])
            else:
                plan = pointwise_wide.plan(*layer, self.device, self.options, pair)
            for launch in plan.launches:
                variant = ", bias" if vectors == 1 else ", two vectors"
                yield replace(launch, name=launch.name + variant * (len(launch.work) > 0))

    def pointwise(self, is_general: bool) -> Iterator[Launch]:
        for width in tiles.WIDTHS:
            for filters in (MANY_FILTERS, *FEWER_FILTERS):
                found = configs.pointwise(self.device, self.form, self.stored, width, filters, is_general)
                for config in found[:1]:
                    layer = self.layer(width, filters, is_general)
                    for atomic in (False, True) if filters == MANY_FILTERS and not is_general else (False,):
                        options = replace(self.options, atomic=atomic)
                        yield from pointwise.plan(*layer, self.form, self.device, options, config).launches

    def wide(self, is_general: bool) -> Iterator[Launch]:
        for N in (MANY_ROWS, tiles.FEW_ROWS):
            pair = configs.wide(self.device, self.form, self.stored, N)[0]
            layer = self.layer(WIDE, MANY_FILTERS, is_general, N)
            yield from pointwise_wide.plan(*layer, self.form, self.device, self.options, pair).launches

    def gated(self, is_general: bool) -> Iterator[Launch]:
        for width in (*tiles.WIDTHS, WIDE):
            X, C, V, bias = self.layer(width, MANY_FILTERS, is_general)
            vectors = self.numbers(len(V), 2 * V.shape[1])
            coefficients = (C, C, C if is_general else None)
            found = configs.gated(self.device, self.form, self.stored, width, MANY_FILTERS, is_general)
            if found:
                plan = gated.plan(X, coefficients, vectors, bias, self.form, self.device, found[0])
            else:
                pair = configs.wide(self.device, self.form, self.stored, MANY_ROWS)[0]
                plan = gated.wide_plan(X, coefficients, vectors, bias, self.form, self.device, self.options, pair)
            yield from plan.launches
            for filters in FEWER_FILTERS:
                X, C, V, bias = self.layer(width, filters, is_general)
                vectors = self.numbers(len(V), 2 * V.shape[1])
                coefficients = (C, C, C if is_general else None)
                for own in configs.gated(self.device, self.form, self.stored, width, filters, is_general)[:1]:
                    yield from gated.plan(X, coefficients, vectors, bias, self.form, self.device, own).launches

    def edgeconv(self, is_general: bool) -> Iterator[Launch]:
        pair = configs.wide(self.device, self.form, self.stored, MANY_ROWS)[0]
        for F in (16, 128):
            X, C, V, bias = self.layer(F, MANY_FILTERS, is_general)
            clouds, points = 16, len(C) // 16
            winner = torch.empty(clouds, points, C.shape[1], dtype=torch.int32, device="meta")
            incoming = Incoming(winner, winner, winner.new_empty(clouds, points + 1, C.shape[1]))
            c = C.unflatten(0, (clouds, points))
            slope = c if is_general else None
            for atomic, ties in ((False, None), (True, None), (False, EdgeTies(winner, c, slope, slope, incoming))):
                yield from edgeconv.plan(
                    X, incoming, c, self.numbers(len(V), 2 * X.shape[2] + bias), bias, ties, self.form, self.device,
                    replace(self.options, atomic=atomic), pair,
                ).launches  # fmt: skip

    def grouped(self, is_general: bool) -> Iterator[Launch]:
        is_aligned = not is_general or self.form != "ieee"
        default = configs.grouped(self.device, self.form, self.stored, is_aligned)[0]
        few = configs.grouped(self.device, self.form, self.stored, is_aligned, has_few_filters=True)[0]
        for own, filters in ((default, MANY_FILTERS), (few, tiles.FEW_FILTERS)):
            if filters != MANY_FILTERS and own == default:
                continue
            widths = tiles.WIDTHS[: len(own.tiles)]
            layers = [grouped.Layer(*self.layer(width, filters, is_general)) for width in widths]
            table = grouped.make_table(layers, self.form, own, self.device)
            for launch in grouped.plan(layers, table, self.form, self.device, own).launches:
                is_few = launch.name == "grouped" and filters != MANY_FILTERS
                yield replace(launch, name=launch.name + ", few filters" * is_few)

    def depthwise(self, is_general: bool) -> Iterator[Launch]:
        X, C, V, bias = self.layer(64, MANY_FILTERS, is_general)
        images, size, filters = 16, 64, C.shape[1]
        maps, halved = self.rows(images, size, size, filters), self.rows(images, size // 2, size // 2, filters)
        stage = DepthwiseStage(stride=(2, 2), padding=(1, 1))
        pair = configs.wide(self.device, self.form, self.stored, MANY_ROWS)[0]
        yield from depthwise.plan(
            X, [maps, halved], [maps], [self.rows(filters, 3, 3)], [stage], V, bias, self.form, self.device,
            self.options, pair,
        ).launches  # fmt: skip

    def curvature(self) -> Iterator[Launch]:
        entries = self.rows(64, 32, 7)
        acts = [activation(name) for name in activation_names()] + [activation("gelu", approximate="tanh")]
        for act in acts:
            name = "curvature, " + ("gelu, tanh" if act is acts[-1] else act.name)
            for by_width in (False, True) if act.kinks else (False,):
                norms = (self.rows(64 * 7), self.rows(32)) if by_width else (None, None)
                (launch,) = curvature.plan(entries, entries, act, self.rows(32), 1, None, *norms).launches
                yield replace(launch, name=name + ", by width" * by_width)

    def surgery(self) -> Iterator[Launch]:
        weight, index = self.rows(64, 64), torch.empty(80, dtype=torch.int64, device="meta")
        yield from surgery.plan(
            Widening(weight, index, self.rows(80), self.rows(16, 64), index, index, self.rows(80), 0.5)
        ).launches

    def lanczos(self) -> Iterator[Launch]:
        # Vectors are float32, except for float64 rows.
        if self.kind not in ("fp32", "fp64"):
            return
        M, capacity = 64, 45
        length = torch.empty(M, dtype=torch.int64, device="meta")
        coefficients = self.numbers(M, capacity)
        widest = krylov.widest(self.device) // (2 if self.kind == "fp64" else 1)
        usual = [16 << i for i in range(7)]
        for widths in ([64], [1024], [widest], usual, [width - ODD for width in usual]):
            states = [
                KrylovState(
                    basis=self.numbers(M, capacity, width), q=self.numbers(M, width), alpha=coefficients,
                    beta=coefficients, length=length, scale=self.numbers(M),
                )
                for width in widths
            ]  # fmt: skip
            table = krylov.make_table(states)
            yield krylov.plan(states, table, torch.empty((), dtype=torch.int64, device="meta"), table.present)
        doubles = torch.empty(M, 2, dtype=torch.float64, device="meta")
        vectors = doubles.new_empty(M, 2, capacity)
        yield from tridiagonal.extremes_plan(coefficients, coefficients, length, vectors).launches
        growth = doubles.new_empty(M)
        yield from tridiagonal.widths_plan(coefficients, coefficients, length, doubles, growth).launches


def names(launches: Sequence[Launch]) -> set[str]:
    """Return the kernels' names without their variants."""
    return {launch.name.split(",")[0] for launch in launches}
