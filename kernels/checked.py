"""The launches that the compile check compiles: those that the operations make for representative tensors.

The tensors are on PyTorch's device "meta" and have no contents. Each operation with products has two variants. The
plain one is for layers without a bias whose sizes are multiples of 16. The "general" one is for layers with a bias and
any sizes; zeros follow their rows where products are made on tensor cores. Further ones are for what occurs seldom:
"two vectors" per filter; "tuned", configurations that only `tune=True` takes; "of one", layers with one input and one
filter; "columns", rows that are contiguous along the other axis.
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
from s3d_fast.kernels.compiled import Target, fingerprint
from s3d_fast.kernels.launch import Launch, power_of_two
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
CLOUDS = 16


class CheckedLaunches:
    """The launches for one target and one kind of rows, in all of their configurations; each once."""

    def __init__(self, target: Target, kind: str) -> None:
        dtype, precision = (*kind.split(), "highest")[:2]
        self.target, self.device, self.kind, self.stored = target, target.device, kind, STORED[dtype]
        self.number = torch.float64 if dtype == "fp64" else torch.float32
        self.options = TritonOptions(precision=precision, scratch_bytes=1 << 40)
        self.form = product_form(self.stored, precision, self.device)

    def __iter__(self) -> Iterator[Launch]:
        seen = set()
        for launch in self._all():
            # Operations share kernels that split vectors, multiply and sum.
            key = (launch.name, launch.label, fingerprint(launch, self.target))
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
        yield from self.seldom()
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
        """Yield the launches of aligned layers with a bias."""
        for D in (64, WIDE):
            X, C, _, _ = self.layer(D, MANY_FILTERS, is_general=False)
            for launch in self.one_product(X, C, self.numbers(MANY_FILTERS, D + 1), True):
                yield replace(launch, name=launch.name + ", bias" * (len(launch.work) > 0))

    def one_product(self, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Iterator[Launch]:
        """Yield the launches of S v of plain rows, by one launch if they are narrow enough, else by two."""
        width = power_of_two(X.shape[2], tiles.WIDTHS[0], 1 << 30)
        found = configs.pointwise(self.device, self.form, self.stored, width, len(V), bias)
        if found:
            yield from pointwise.plan(X, C, V, bias, self.form, self.device, self.options, found[0]).launches
        else:
            yield from self.two_launches(X, C, V, bias)

    def atomic_sums(self, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Iterator[Launch]:
        """Yield the launches that add sums atomically."""
        width = power_of_two(X.shape[2], tiles.WIDTHS[0], 1 << 30)
        options = replace(self.options, atomic=True)
        found = configs.pointwise(self.device, self.form, self.stored, width, len(V), bias, options.atomic)
        for config in found:
            yield from pointwise.plan(X, C, V, bias, self.form, self.device, options, config).launches

    def two_launches(self, X: Tensor, C: Tensor, V: Tensor, bias: bool, choice: int = 0) -> Iterator[Launch]:
        """Yield the launches of S v of rows of any width."""
        pair = configs.wide(self.device, self.form, self.stored, len(C))[choice]
        yield from pointwise_wide.plan(X, C, V, bias, self.form, self.device, self.options, pair).launches

    def gated_product(self, X: Tensor, C: Tensor, V: Tensor, bias: bool, choice: int = 0) -> Iterator[Launch]:
        """Yield the launches of S v of gated units, with and without c22; V is that of one half."""
        width = power_of_two(X.shape[2], tiles.WIDTHS[0], 1 << 30)
        found = configs.gated(self.device, self.form, self.stored, width, len(V), bias)
        vectors = self.numbers(len(V), 2 * V.shape[1])
        for coefficients in ((C, C, C), (C, C, None)):
            if found:
                own = found[min(choice, len(found) - 1)]
                plan = gated.plan(X, coefficients, vectors, bias, self.form, self.device, own)
            else:
                pair = configs.wide(self.device, self.form, self.stored, len(C))[choice]
                plan = gated.wide_plan(X, coefficients, vectors, bias, self.form, self.device, self.options, pair)
            yield from plan.launches

    def edge_products(
        self, X: Tensor, C: Tensor, V: Tensor, bias: bool, has_slopes: bool, choice: int = 0
    ) -> Iterator[Launch]:
        """Yield the launches of S v of EdgeConv: as usual, with atomic sums, and with ties; V is that of one half."""
        pair = configs.wide(self.device, self.form, self.stored, MANY_ROWS)[choice]
        clouds, points, M = CLOUDS, len(C) // CLOUDS, C.shape[1]
        winner = torch.empty(clouds, points, M, dtype=torch.int32, device="meta")
        incoming = Incoming(winner, winner, winner.new_empty(clouds, points + 1, M))
        c = C.unflatten(0, (clouds, points))
        slope = c if has_slopes else None
        vectors = self.numbers(len(V), 2 * X.shape[2] + bias)
        for atomic, ties in ((False, None), (True, None), (False, EdgeTies(winner, c, slope, slope, incoming))):
            options = replace(self.options, atomic=atomic)
            yield from edgeconv.plan(
                X, incoming, c, vectors, bias, ties, self.form, self.device, options, pair
            ).launches

    def chain_product(self, X: Tensor, C: Tensor, V: Tensor, bias: bool, choice: int = 0) -> Iterator[Launch]:
        """Yield the launches of S v of a layer before a depthwise one."""
        images, size, M = 16, 64, C.shape[1]
        maps, halved = self.rows(images, size, size, M), self.rows(images, size // 2, size // 2, M)
        stage = DepthwiseStage(stride=(2, 2), padding=(1, 1))
        pair = configs.wide(self.device, self.form, self.stored, MANY_ROWS)[choice]
        yield from depthwise.plan(
            X, [maps, halved], [maps], [self.rows(M, 3, 3)], [stage], V, bias, self.form, self.device, self.options,
            pair,
        ).launches  # fmt: skip

    def list_product(self, layers: Sequence[grouped.Layer], config: tiles.GroupedConfig) -> Iterator[Launch]:
        """Yield the launches of S v of a list of layers."""
        table = grouped.make_table(layers, self.form, config, self.device)
        yield from grouped.plan(layers, table, self.form, self.device, config).launches

    def seldom(self) -> Iterator[Launch]:
        """Yield the launches of what occurs seldom."""
        for name, launches in (
            ("tuned", self.tuned()),
            ("two vectors", self.two_vectors()),
            ("of one", self.of_one(bias=False)),
            ("of one, bias", self.of_one(bias=True)),
            ("columns", self.columns()),
        ):
            for launch in launches:
                yield replace(launch, name=f"{launch.name}, {name}")

    def tuned(self) -> Iterator[Launch]:
        """Yield the launches of all configurations but the default ones."""
        for is_general in (False, True):
            for width, filters in ((width, own) for width in tiles.WIDTHS for own in (MANY_FILTERS, *FEWER_FILTERS)):
                X, C, V, bias = self.layer(width, filters, is_general)
                own = self.device, self.form, self.stored, width, len(V), bias
                for config in configs.pointwise(*own)[1:]:
                    yield from pointwise.plan(X, C, V, bias, self.form, self.device, self.options, config).launches
                for choice in range(1, len(configs.gated(*own))):
                    yield from self.gated_product(X, C, V, bias, choice)
            layer = self.layer(WIDE, MANY_FILTERS, is_general)
            for choice in range(1, len(configs.wide(self.device, self.form, self.stored, MANY_ROWS))):
                for product in (self.two_launches, self.gated_product, self.chain_product):
                    yield from product(*layer, choice)
                yield from self.edge_products(*layer, is_general, choice)

    def two_vectors(self) -> Iterator[Launch]:
        """Yield the launches for two vectors per filter."""
        for D in (64, WIDE):
            X, C, _, _ = self.layer(D, MANY_FILTERS, is_general=False)
            layer = X, C, self.numbers(2 * MANY_FILTERS, D + 1), True
            for product in (self.one_product, self.gated_product, self.chain_product):
                yield from product(*layer)
            yield from self.edge_products(*layer, has_slopes=True)
        config, layers = configs.grouped(self.device, self.form, self.stored)[0], []
        for width in tiles.WIDTHS[: len(config.tiles)]:
            X, C, _, bias = self.layer(width, MANY_FILTERS, is_general=False)
            layers.append(grouped.Layer(X, C, self.numbers(2 * MANY_FILTERS, width), bias))
        yield from self.list_product(layers, config)

    def of_one(self, bias: bool) -> Iterator[Launch]:
        """Yield the launches for layers with one input and one filter: sizes of 1 are constants of the compiler."""
        X, C = self.planes(MANY_ROWS, 1), aligned(self.form, self.rows(MANY_ROWS, 1))
        layer = X, C, self.numbers(1, 1 + bias), bias
        for product in (self.one_product, self.two_launches, self.gated_product, self.chain_product):
            yield from product(*layer)
        yield from self.edge_products(*layer, has_slopes=bias)

    def columns(self) -> Iterator[Launch]:
        """Yield the launches for rows that lie along the other axis; tensor cores take copies of these."""
        if self.form != "ieee":
            return
        for D in (*tiles.WIDTHS, WIDE):
            X, C = self.rows(D, MANY_ROWS).T[None], self.rows(MANY_FILTERS, MANY_ROWS).T
            for product in (self.one_product, self.gated_product):
                yield from product(X, C, self.numbers(MANY_FILTERS, D + 1), True)

    def pointwise(self, is_general: bool) -> Iterator[Launch]:
        for width in tiles.WIDTHS:
            for filters in (MANY_FILTERS, *FEWER_FILTERS):
                layer = self.layer(width, filters, is_general)
                yield from self.one_product(*layer)
                # Elsewhere these programs have fewer sums than those with many filters.
                if filters == MANY_FILTERS or (width >= 128 and not is_general):
                    yield from self.atomic_sums(*layer)

    def wide(self, is_general: bool) -> Iterator[Launch]:
        for N in (MANY_ROWS, tiles.FEW_ROWS):
            yield from self.two_launches(*self.layer(WIDE, MANY_FILTERS, is_general, N))

    def gated(self, is_general: bool) -> Iterator[Launch]:
        for width in (*tiles.WIDTHS, WIDE):
            for filters in (MANY_FILTERS, *FEWER_FILTERS):
                yield from self.gated_product(*self.layer(width, filters, is_general))
        yield from self.gated_product(*self.layer(WIDE, MANY_FILTERS, is_general, tiles.FEW_ROWS))

    def edgeconv(self, is_general: bool) -> Iterator[Launch]:
        for F in (16, 128):
            yield from self.edge_products(*self.layer(F, MANY_FILTERS, is_general), has_slopes=is_general)

    def grouped(self, is_general: bool) -> Iterator[Launch]:
        is_aligned = not is_general or self.form != "ieee"
        default = configs.grouped(self.device, self.form, self.stored, is_aligned)[0]
        few = configs.grouped(self.device, self.form, self.stored, is_aligned, has_few_filters=True)[0]
        for own, filters in ((default, MANY_FILTERS), (few, tiles.FEW_FILTERS)):
            if filters != MANY_FILTERS and own == default:
                continue
            widths = tiles.WIDTHS[: len(own.tiles)]
            layers = [grouped.Layer(*self.layer(width, filters, is_general)) for width in widths]
            for launch in self.list_product(layers, own):
                is_few = launch.name == "grouped" and filters != MANY_FILTERS
                yield replace(launch, name=launch.name + ", few filters" * is_few)

    def depthwise(self, is_general: bool) -> Iterator[Launch]:
        yield from self.chain_product(*self.layer(64, MANY_FILTERS, is_general))

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
