"""The tiles of all kernels with products, by GPU and arithmetic; the default one first.

A table that misses a width has no tile for it that neither spills registers nor exceeds the shared memory of small
GPUs: rows of this width take the two launches of `pointwise_wide`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from s3d_fast.kernels.launch import power_of_two

WIDTHS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Config:
    """The sizes of a program's tile, and how it is compiled."""

    rows: int
    filters: int
    depth: int  # entries of a row
    warps: int
    stages: int
    # Whether a fused kernel computes U^T instead of U. Its layout in registers is then that of the left factor of
    # U^T X; every warp has 16 or 32 filters of its own.
    turned: bool = True

    @property
    def has_large_tiles(self) -> bool:
        """Whether every warp has a tile of 32 x 32 entries of a product of its own."""
        return self.rows >= 32 and self.rows * self.filters >= 32 * 32 * self.warps

    @property
    def label(self) -> str:
        """The configuration in words."""
        sizes = f"{self.rows}x{self.filters}x{self.depth}, {self.warps} warps, {self.stages} stages"
        return sizes if self.turned else f"{sizes}, flat"

    def for_filters(self, filters: int, form: str) -> Config:
        """Return this configuration with smaller tiles for layers with few filters; a product needs at least 16."""
        own = power_of_two(filters, 16, self.filters)
        if own == self.filters or form == "ieee":
            return replace(self, filters=own)
        # Every warp needs its own part of both products.
        own = min(own, 32) if self.depth == 256 else own
        has_many_each = self.filters >= 32 * self.warps
        rows = min(self.rows, 32 if self.depth < (128 if has_many_each else 64) else 16)
        warps = max(1, self.warps * own // self.filters)
        # Four warps with 16 rows would repeat work if they computed U^T; if not, the compiler for Hopper lets copies
        # overwrite what a wgmma still reads.
        return replace(self, rows=self.rows if warps == 4 else rows, filters=own, warps=warps)

    def for_row_sums(self) -> Config:
        """Return this configuration of a fused kernel for layers with a bias: it also sums a tile of U in registers."""
        return replace(self, rows=min(32, self.rows)) if self.depth >= (128 if self.turned else 64) else self

    def for_atomic_sums(self) -> Config:
        """Return this configuration of a fused kernel for sums that are added atomically, entry by entry.

        Their addresses take registers, where every warp has many sums.
        """
        has_many_sums = self.depth >= 128 and self.filters >= 32 * self.warps
        return replace(self, rows=2 * self.rows, filters=self.filters // 2) if has_many_sums else self

    def for_two_products(self, is_by_columns: bool) -> Config:
        """Return this configuration of launch 1 of `pointwise_wide` with half the filters: each has two products.

        Rows that lie along the other axis take more registers, as do deep tiles on Hopper. (Its tiles with two stages
        are for rows in two planes.) A product needs 16 filters: tiles that have no more get the least depth.
        """
        rows = self.rows // 2 if is_by_columns else self.rows
        if self.filters <= 16:
            return replace(self, rows=max(16, rows), depth=16)
        is_deep = self.depth > 32 and self.warps > 4
        depth = (16 if self.stages == 2 else 32) if is_deep else self.depth
        return replace(self, rows=rows, filters=self.filters // 2, depth=depth)

    def for_gathers(self) -> Config:
        """Return this configuration of launch 1 of `pointwise_wide` with tiles small enough for EdgeConv's epilogue."""
        return replace(self, filters=min(32, self.filters))

    def for_bias(self, form: str) -> Config:
        """Return this configuration of launch 2 of `pointwise_wide` for rows of sums that a bias makes unaligned."""
        if form in ("bf16x1", "bf16x6") and self.filters > 64:
            return replace(self, rows=self.rows // 2)
        if form != "ieee":
            return replace(self, depth=min(32, self.depth))
        return replace(self, rows=max(32, self.rows // 2))

    def for_inputs(self, inputs: int) -> Config:
        """Return this configuration of launch 2 of `pointwise_wide` with smaller tiles for few inputs."""
        rows = power_of_two(inputs, 32, self.rows)
        return self if rows == self.rows else replace(self, rows=rows, warps=min(self.warps, self.filters // 16))


@dataclass(frozen=True)
class GroupedConfig:
    """How the grouped kernel is compiled."""

    tiles: tuple[tuple[int, int] | tuple[int, int, bool], ...]  # (rows, filters) for each of WIDTHS that it supports
    warps: int
    stages: int
    per_processor: int  # programs on one processor
    turned: bool = True  # unless a tile says otherwise

    @property
    def label(self) -> str:
        """The configuration in words."""
        tiles = " ".join(f"{own.rows}x{own.filters}" + " flat" * (not own.turned) for own in self.configs)
        return f"{tiles}, {self.warps} warps, {self.stages} stages"

    @property
    def configs(self) -> list[Config]:
        """The configuration of each width."""
        return [
            Config(tile[0], tile[1], width, self.warps, self.stages, tile[2] if len(tile) > 2 else self.turned)
            for width, tile in zip(WIDTHS, self.tiles, strict=False)
        ]


Tile = tuple[int, int, int, int] | tuple[int, int, int, int, bool]
Tiles = dict[int, tuple[Tile, ...]]

FLAT = False
# (GPU, arithmetic) -> width -> (rows, filters, warps, stages). Tiles of IEEE products are small: each multiplication
# is a separate instruction with its operands in registers. On AMD, a thread has 512 registers with four warps, and half
# as many with eight.
POINTWISE: dict[tuple[str, str], Tiles] = {
    # For a multiplication, a tile of the fused kernel reads twice as many bytes of shared memory as the tiles of
    # `pointwise_wide`, more with wider rows: these take two launches.
    ("nvidia", "fp32"): {
        16: ((32, 64, 4, 3, FLAT), (16, 128, 8, 3, FLAT)),
        32: ((64, 64, 8, 2, FLAT), (32, 64, 8, 3, FLAT)),
        64: ((64, 64, 8, 2, FLAT), (32, 64, 8, 3, FLAT)),
    },
    # Before Hopper every warp reads all rows of a tile: with 32 filters per warp, half as often as with 16.
    ("nvidia", "bf16"): {
        16: ((64, 64, 4, 3), (32, 64, 2, 3)),
        32: ((32, 64, 2, 3), (32, 128, 4, 3)),
        64: ((32, 64, 2, 3), (32, 128, 4, 3)),
        128: ((16, 128, 4, 3), (32, 64, 4, 3)),
        256: ((32, 64, 4, 3), (32, 64, 4, 2)),
    },
    ("hopper", "bf16"): {
        16: ((64, 64, 4, 3), (64, 128, 8, 3)),
        32: ((64, 64, 4, 3), (64, 128, 8, 3)),
        64: ((64, 64, 4, 3), (64, 128, 8, 3)),
        128: ((64, 64, 4, 3), (64, 128, 8, 3)),
        256: ((32, 128, 8, 3), (16, 128, 8, 3)),
    },
    ("nvidia", "bf16x3"): {
        16: ((32, 64, 2, 3), (64, 64, 4, 3)),
        32: ((32, 64, 2, 3), (64, 64, 4, 3)),
        64: ((16, 64, 2, 3), (32, 64, 4, 3)),
    },
    ("hopper", "bf16x3"): {
        16: ((64, 64, 4, 3),),
        32: ((64, 64, 4, 3),),
        64: ((64, 64, 4, 3),),
        128: ((64, 64, 4, 2),),
    },
    ("nvidia", "bf16x6"): {
        16: ((32, 64, 2, 3), (32, 64, 4, 3)),
        32: ((32, 64, 2, 3), (32, 64, 4, 3)),
        64: ((16, 64, 2, 2), (32, 64, 4, 2)),
    },
    ("hopper", "bf16x6"): {
        16: ((64, 64, 4, 3),),
        32: ((64, 64, 4, 3),),
        64: ((32, 64, 4, 2),),
    },
    ("nvidia", "fp64"): {
        16: ((16, 32, 4, 3, FLAT),),
        32: ((16, 32, 4, 3, FLAT),),
        64: ((16, 32, 4, 3, FLAT),),
        128: ((16, 16, 8, 3, FLAT),),
        256: ((16, 16, 8, 2, FLAT),),
    },
    # One warp alone: with more, every tile crosses shared memory behind barriers.
    ("amd", "fp32"): {
        16: ((16, 64, 1, 2), (32, 64, 1, 2)),
        32: ((16, 64, 1, 2), (32, 64, 1, 2)),
        64: ((16, 64, 1, 2), (16, 32, 1, 2)),
        128: ((16, 32, 1, 2),),
    },
    ("amd", "bf16"): {
        16: ((16, 64, 1, 2), (32, 64, 1, 2)),
        32: ((16, 64, 1, 2), (32, 64, 1, 2)),
        64: ((16, 64, 1, 2), (16, 32, 1, 2)),
        128: ((16, 64, 1, 2), (16, 32, 1, 2)),
        256: ((16, 32, 1, 2), (16, 16, 1, 2)),
    },
    ("amd", "bf16x3"): {
        16: ((16, 64, 1, 2),),
        32: ((16, 64, 1, 2),),
        64: ((16, 32, 1, 2),),
        128: ((16, 16, 1, 2),),
    },
    ("amd", "fp64"): {width: ((16, 16, 1, 2),) for width in WIDTHS[:4]},
    ("interpreter", "fp64"): {width: ((128, 64, 1, 1), (64, 32, 1, 1)) for width in WIDTHS},
}
# Where the compiler for B200 would spill.
POINTWISE["blackwell", "bf16"] = {
    16: ((64, 64, 4, 3), (32, 64, 4, 3)),
    32: ((16, 64, 4, 3),),
    64: ((32, 64, 4, 3), (64, 64, 4, 3)),
    128: ((32, 64, 4, 3),),
}
POINTWISE["blackwell", "bf16x3"] = {width: ((32, 64, 4, 2),) for width in (16, 32, 64)}
POINTWISE["blackwell", "bf16x6"] = {16: ((32, 64, 4, 2),)}
# A program of the gated kernel has the vectors and sums of two halves.
GATED: dict[tuple[str, str], Tiles] = {
    ("nvidia", "fp32"): {
        16: ((32, 32, 4, 3, FLAT), (16, 64, 8, 3, FLAT)),
        32: ((32, 32, 8, 3, FLAT), (16, 64, 8, 3, FLAT)),
    },
    ("nvidia", "bf16"): {
        16: ((32, 64, 4, 3),),
        32: ((32, 64, 4, 3),),
        64: ((32, 64, 4, 3),),
        128: ((32, 64, 4, 3), (32, 64, 4, 2)),
    },
    ("hopper", "bf16"): {
        16: ((32, 64, 4, 3),),
        32: ((32, 64, 4, 3),),
        64: ((32, 64, 4, 3),),
        128: ((16, 64, 4, 3),),
    },
    ("nvidia", "bf16x3"): {16: ((32, 64, 4, 3),), 32: ((32, 64, 4, 2),)},
    ("hopper", "bf16x3"): {16: ((32, 64, 4, 3),), 32: ((32, 64, 4, 3),), 64: ((32, 64, 4, 2),)},
    ("nvidia", "bf16x6"): {},
    ("hopper", "bf16x6"): {16: ((32, 64, 4, 2),), 32: ((32, 64, 4, 2),)},
    ("nvidia", "fp64"): {
        16: ((16, 16, 4, 3, FLAT),),
        32: ((16, 16, 4, 3, FLAT),),
        64: ((16, 16, 4, 3, FLAT),),
        128: ((16, 16, 8, 2, FLAT),),
    },
    ("amd", "fp32"): {
        16: ((16, 64, 1, 2), (16, 32, 1, 2)),
        32: ((16, 32, 1, 2), (16, 16, 1, 2)),
        64: ((16, 32, 1, 2), (16, 16, 1, 2)),
    },
    ("amd", "bf16"): {
        16: ((16, 64, 1, 2), (16, 32, 1, 2)),
        32: ((16, 64, 1, 2), (16, 32, 1, 2)),
        64: ((16, 32, 1, 2), (16, 16, 1, 2)),
        128: ((16, 16, 1, 2),),
    },
    ("amd", "bf16x3"): {16: ((16, 32, 1, 2),), 32: ((16, 16, 1, 2),)},
    ("amd", "fp64"): {width: ((16, 16, 1, 2),) for width in WIDTHS[:3]},
    ("interpreter", "fp64"): {width: ((128, 64, 1, 1), (64, 32, 1, 1)) for width in WIDTHS},
}
GATED["blackwell", "bf16"] = {width: GATED["nvidia", "bf16"][width] for width in (16, 32)}
GATED["blackwell", "bf16x1"] = {16: GATED["nvidia", "bf16"][16]}
GATED["blackwell", "bf16x3"] = {}
GATED["blackwell", "fp32"] = {**GATED["nvidia", "fp32"], 32: ((32, 32, 4, 3, FLAT),)}
# One grouped kernel contains the code for every width that occurs and needs as many registers as the widest.
GROUPED: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "fp32"): (GroupedConfig(((32, 64), (64, 64), (64, 64)), 8, 2, 1, FLAT),),
    ("nvidia", "bf16"): (GroupedConfig(((32, 128), (32, 128), (32, 128), (16, 128), (32, 64)), 4, 3, 2),),
    ("hopper", "bf16"): (GroupedConfig(((64, 128), (64, 128), (64, 128), (64, 128), (32, 128)), 8, 3, 1),),
    ("blackwell", "bf16"): (GroupedConfig(((32, 64), (32, 64), (32, 64)), 4, 3, 2),),
    ("blackwell", "bf16x3"): (GroupedConfig(((32, 64), (32, 64)), 4, 2, 2),),
    ("blackwell", "bf16x6"): (GroupedConfig(((32, 64),), 4, 2, 2),),
    ("nvidia", "bf16x3"): (GroupedConfig(((32, 128), (32, 128), (16, 128)), 4, 3, 2),),
    ("hopper", "bf16x3"): (GroupedConfig(((64, 64), (64, 64), (64, 64), (32, 64)), 4, 2, 2),),
    ("nvidia", "bf16x6"): (GroupedConfig(((32, 128), (32, 128), (16, 128)), 4, 2, 2),),
    ("hopper", "bf16x6"): (GroupedConfig(((64, 64), (64, 64), (32, 64)), 4, 2, 2),),
    ("nvidia", "fp64"): (GroupedConfig(((16, 16),) * 5, 8, 2, 1, FLAT),),
    ("amd", "fp32"): (GroupedConfig(((16, 64), (16, 64), (16, 64)), 1, 2, 4),),
    ("amd", "bf16"): (GroupedConfig(((16, 64), (16, 64), (16, 64), (16, 32)), 1, 2, 4),),
    ("amd", "bf16x3"): (GroupedConfig(((16, 64), (16, 64), (16, 32)), 1, 2, 4),),
    ("amd", "fp64"): (GroupedConfig(((16, 16),) * 3, 1, 2, 4),),
    ("interpreter", "fp64"): (
        GroupedConfig(((128, 64),) * 5, 1, 1, 1),
        GroupedConfig(((64, 32),) * 5, 1, 1, 2),
    ),
}
# For lists of layers with at most FEW_FILTERS filters.
FEW_FILTERS = 64
GROUPED_FEW: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "bf16"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (16, 64)), 2, 3, 4),),
    ("hopper", "bf16"): (GroupedConfig(((64, 64), (64, 64), (64, 64), (64, 64)), 4, 3, 2),),
    ("nvidia", "bf16x3"): (GroupedConfig(((32, 64), (32, 64), (16, 64)), 2, 3, 4),),
    ("nvidia", "bf16x6"): (GroupedConfig(((32, 64), (32, 64), (32, 64)), 4, 2, 2),),
}
# Hopper and B200 do not take those of older GPUs.
GROUPED_FEW |= {key: GROUPED[key] for key in GROUPED if key[0] in ("hopper", "blackwell") and key not in GROUPED_FEW}
# For lists in which X or C may be unaligned.
GROUPED_UNALIGNED: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "fp32"): (GroupedConfig(((32, 32), (32, 32), (32, 32)), 8, 3, 1, FLAT),),
}
# (project, accumulate), as in `pointwise_wide`. In the second, `rows` counts columns of X and `depth` counts rows.
WIDE: dict[tuple[str, str], tuple[tuple[Config, Config], ...]] = {
    ("nvidia", "fp32"): ((Config(128, 128, 16, 8, 3), Config(128, 128, 16, 8, 3)),),
    ("blackwell", "fp32"): ((Config(128, 64, 16, 8, 3), Config(128, 64, 16, 8, 3)),),
    ("nvidia", "bf16"): ((Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),),
    ("blackwell", "bf16"): ((Config(128, 64, 32, 8, 3), Config(128, 64, 32, 8, 3)),),
    ("hopper", "bf16"): (
        (Config(128, 128, 64, 8, 3), Config(128, 128, 64, 8, 3)),
        (Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),
    ),
    ("blackwell", "bf16x1"): ((Config(64, 64, 32, 4, 2), Config(64, 64, 32, 4, 2)),),
    ("blackwell", "bf16x3"): ((Config(128, 64, 32, 8, 2), Config(128, 64, 32, 8, 3)),),
    ("blackwell", "bf16x6"): ((Config(128, 64, 32, 8, 2), Config(64, 64, 32, 4, 2)),),
    ("nvidia", "bf16x3"): ((Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),),
    ("hopper", "bf16x3"): ((Config(128, 128, 64, 8, 2), Config(128, 128, 64, 8, 2)),),
    ("nvidia", "bf16x6"): (
        (Config(128, 128, 32, 8, 3), Config(128, 64, 32, 8, 3)),
        (Config(64, 64, 32, 4, 3), Config(64, 64, 32, 4, 3)),
    ),
    ("hopper", "bf16x6"): ((Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),),
    ("nvidia", "fp64"): ((Config(32, 32, 16, 4, 3), Config(32, 32, 16, 4, 3)),),
    ("amd", "fp32"): (
        (Config(128, 64, 32, 4, 2), Config(128, 64, 32, 4, 2)),
        (Config(64, 64, 32, 4, 2), Config(64, 64, 32, 4, 2)),
    ),
    ("amd", "bf16"): (
        (Config(128, 64, 64, 4, 2), Config(128, 128, 32, 4, 2)),
        (Config(128, 64, 32, 4, 2), Config(128, 64, 32, 4, 2)),
    ),
    ("amd", "bf16x3"): ((Config(128, 64, 32, 4, 2), Config(128, 64, 32, 4, 2)),),
    ("amd", "fp64"): ((Config(32, 32, 16, 4, 2), Config(32, 32, 16, 4, 2)),),
    ("interpreter", "fp64"): ((Config(128, 64, 128, 1, 1), Config(128, 64, 128, 1, 1)),) * 2,
}
# Used instead of the first of a pair for at most FEW_ROWS rows: most reads are then of V, and small tiles spread them
# over many programs.
FEW_ROWS, FEW_ROWS_CONFIG = 64, Config(16, 16, 64, 1, 3)
