"""The configurations of all kernels with products, by GPU and arithmetic; the default one first.

A table that misses a width has no configuration for it that neither spills registers nor exceeds the shared memory of
small GPUs: rows of this width take the two launches of `pointwise_wide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from s3d_fast.kernels.device import Device
from s3d_fast.kernels.launch import power_of_two
from s3d_fast.kernels.products import plane_storage

WIDTHS = (16, 32, 64, 128, 256)
AMD_SHARED_MEMORY = 65536


@dataclass(frozen=True)
class Config:
    """The sizes of a program's tile, and how it is compiled."""

    rows: int
    filters: int
    depth: int  # entries of a row
    warps: int
    stages: int
    # Whether a fused kernel computes U^T instead of U. Its layout in registers is then that of the left factor of
    # U^T X; every 16 filters need a warp.
    turned: bool = True

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
        # Every warp needs its own part of both products. With fewer warps, each thread holds a larger part of a tile of
        # rows; with 64 filters, four warps would multiply together (wgmma) and spill.
        if form not in ("split", "rounded"):
            own = min(own, 32)
            if own == 32 and self.depth <= 32:
                rows, warps = (16, 1) if self.depth == 16 else (32, 2)
            else:
                rows, warps = 16, own // (16 if self.depth == 16 else 8)
            return replace(self, rows=rows, filters=own, warps=warps, turned=False)
        own = min(own, 32) if self.depth == 256 else own
        rows = 16 if self.depth >= 64 else min(32, self.rows)
        # Four warps with 16 rows would repeat work if they computed U^T.
        turned = self.turned and not (own == 64 and rows == 16)
        return replace(self, rows=rows, filters=own, warps=max(1, self.warps * own // self.filters), turned=turned)

    def for_two_products(self) -> Config:
        """Return this configuration of launch 1 of `pointwise_wide` with half the filters: each has two products."""
        return replace(self, filters=max(16, self.filters // 2))

    def for_gathers(self) -> Config:
        """Return this configuration of launch 1 of `pointwise_wide` with tiles small enough for EdgeConv's epilogue."""
        return replace(self, filters=min(32, self.filters))

    def for_bias(self, form: str) -> Config:
        """Return this configuration of launch 2 of `pointwise_wide` for rows of sums that a bias makes unaligned."""
        if form == "split":
            return self
        warps = self.warps if form == "ieee" else min(self.warps, self.filters // 16)
        return replace(self, rows=max(32, self.rows // 2), warps=warps)

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


def arithmetic(form: str, stored: torch.dtype) -> str:
    """Return the kind of arithmetic, which selects the table of configurations.

    "fp64"; "fp32" (IEEE); "bf16" (bfloat16 products); "tf32"; "tf32x3"; or "widened" (16-bit rows as 32 bits, which
    need twice the space).
    """
    if stored == torch.float64:
        return "fp64"
    if form in ("split", "rounded"):
        return "bf16"
    if stored == torch.float16:
        return "widened"
    return "fp32" if form == "ieee" else form


def is_aligned(*tensors: Tensor) -> bool:
    """Return whether addresses, widths and strides of these matrices are multiples of 16, and rows contiguous."""
    return all(
        tensor.stride(1) == 1
        and all(number % 16 == 0 for number in (tensor.data_ptr(), *tensor.shape[1:], tensor.stride(0)))
        for tensor in tensors
    )


Tile = tuple[int, int, int, int] | tuple[int, int, int, int, bool]
Tiles = dict[int, tuple[Tile, ...]]

FLAT = False
# (GPU, arithmetic) -> width -> (rows, filters, warps, stages). Tiles of IEEE products are small: each multiplication
# is a separate instruction with its operands in registers. On AMD, a thread has 512 registers with four warps, and half
# as many with eight.
POINTWISE: dict[tuple[str, str], Tiles] = {
    ("nvidia", "fp32"): {
        16: ((32, 64, 4, 3, FLAT), (16, 128, 8, 3, FLAT)),
        32: ((32, 64, 8, 3, FLAT), (16, 128, 8, 3, FLAT)),
        64: ((32, 64, 8, 3, FLAT), (16, 128, 8, 3, FLAT), (16, 64, 8, 4, FLAT)),
        128: ((16, 64, 8, 3, FLAT), (32, 32, 8, 3, FLAT)),
        256: ((16, 32, 8, 3, FLAT), (16, 64, 8, 3, FLAT), (16, 16, 8, 4, FLAT)),
    },
    ("nvidia", "bf16"): {
        16: ((64, 64, 4, 3), (32, 64, 4, 3)),
        32: ((64, 64, 4, 3), (32, 64, 4, 3)),
        64: ((32, 64, 4, 3), (64, 64, 4, 3)),
        128: ((32, 64, 4, 3), (64, 64, 4, 3)),
        256: ((32, 64, 4, 3), (32, 64, 4, 2), (16, 64, 4, 2)),
    },
    ("hopper", "bf16"): {
        16: ((64, 64, 4, 3), (64, 128, 8, 3)),
        32: ((64, 64, 4, 3), (64, 128, 8, 3)),
        64: ((64, 64, 4, 3), (64, 128, 8, 3)),
        128: ((64, 64, 4, 3), (64, 128, 8, 3)),
        256: ((32, 128, 8, 3), (16, 128, 8, 3)),
    },
    ("nvidia", "tf32"): {
        16: ((64, 64, 4, 3, FLAT),),
        32: ((64, 64, 4, 3, FLAT), (32, 32, 4, 3, FLAT)),
        64: ((32, 32, 4, 3, FLAT),),
        128: ((32, 64, 8, 3, FLAT), (16, 64, 8, 3, FLAT)),
        256: ((16, 64, 8, 3, FLAT), (16, 64, 8, 2, FLAT)),
    },
    ("hopper", "tf32"): {
        16: ((64, 64, 4, 3),),
        32: ((64, 64, 4, 3),),
        64: ((64, 64, 4, 3), (32, 64, 4, 3)),
        128: ((32, 64, 4, 3),),
        256: ((32, 128, 8, 2), (16, 128, 8, 2)),
    },
    ("nvidia", "tf32x3"): {
        16: ((64, 64, 4, 2, FLAT), (32, 32, 4, 2, FLAT)),
        32: ((64, 64, 4, 2, FLAT), (32, 32, 4, 2, FLAT)),
        64: ((32, 32, 4, 2, FLAT), (16, 32, 4, 3, FLAT)),
        128: ((16, 32, 4, 2, FLAT), (16, 64, 8, 2, FLAT)),
    },
    ("hopper", "tf32x3"): {
        16: ((32, 64, 4, 3),),
        32: ((32, 64, 4, 3),),
        64: ((32, 64, 4, 2), (32, 128, 8, 2)),
        128: ((32, 64, 4, 2), (32, 128, 8, 2)),
    },
    ("nvidia", "widened"): {
        16: ((32, 64, 4, 3),),
        32: ((32, 64, 4, 3),),
        64: ((16, 64, 4, 2), (32, 32, 4, 2, FLAT)),
        128: ((16, 64, 4, 2, FLAT),),
        256: ((16, 32, 4, 2, FLAT),),
    },
    ("hopper", "widened"): {
        16: ((32, 64, 4, 3),),
        32: ((32, 64, 4, 3),),
        64: ((32, 64, 4, 3), (64, 64, 4, 2)),
        128: ((32, 64, 4, 2), (32, 128, 8, 2)),
        256: ((16, 32, 4, 2, FLAT),),
    },
    ("nvidia", "fp64"): {
        16: ((16, 32, 4, 3, FLAT),),
        32: ((16, 32, 4, 3, FLAT),),
        64: ((16, 32, 4, 3, FLAT),),
        128: ((16, 16, 8, 3, FLAT),),
        256: ((16, 16, 8, 2, FLAT),),
    },
    ("amd", "fp32"): {
        16: ((32, 64, 4, 2), (32, 128, 4, 2)),
        32: ((32, 64, 4, 2), (64, 64, 4, 2)),
        64: ((32, 64, 4, 2), (16, 64, 4, 2)),
        128: ((32, 64, 4, 2), (16, 64, 4, 2)),
        256: ((16, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
    },
    ("amd", "fp64"): {width: ((16, 16, 4, 2),) for width in WIDTHS},
    ("interpreter", "fp64"): {width: ((128, 64, 1, 1), (64, 32, 1, 1)) for width in WIDTHS},
}
# Where the compiler for B200 would spill.
POINTWISE["blackwell", "fp32"] = {**POINTWISE["nvidia", "fp32"], 256: ((16, 32, 8, 2, FLAT), (16, 16, 8, 3, FLAT))}
POINTWISE["blackwell", "tf32x3"] = {
    **POINTWISE["nvidia", "tf32x3"],
    16: ((32, 32, 2, 2, FLAT),),
    32: ((32, 32, 2, 2, FLAT),),
}
POINTWISE["blackwell", "bf16"] = {**POINTWISE["nvidia", "bf16"], 32: ((64, 64, 4, 2),)}
# Used instead if rows may be unaligned: every entry of a tile then needs its own address.
POINTWISE_UNALIGNED: dict[tuple[str, str], Tiles] = {
    ("nvidia", "bf16"): {
        16: ((32, 64, 4, 2),),
        32: ((32, 64, 4, 2),),
        64: ((32, 64, 4, 2), (32, 32, 4, 2, FLAT)),
        128: ((16, 128, 8, 2),),
    },
    ("hopper", "bf16"): {
        16: ((32, 64, 4, 2),),
        32: ((32, 64, 4, 2),),
        64: ((32, 64, 4, 2),),
        128: ((16, 64, 4, 2),),
    },
    ("nvidia", "tf32"): {width: POINTWISE["nvidia", "tf32"][width] for width in WIDTHS[:4]},
    ("nvidia", "tf32x3"): {
        16: ((64, 64, 4, 2, FLAT),),
        32: ((32, 64, 4, 2),),
        64: ((32, 32, 4, 2, FLAT),),
    },
    ("blackwell", "tf32x3"): {
        16: ((32, 64, 4, 2),),
        32: ((32, 64, 4, 2),),
        64: ((32, 32, 4, 2, FLAT),),
    },
    ("nvidia", "widened"): {width: POINTWISE["nvidia", "widened"][width] for width in WIDTHS[:4]},
}
# A program of the gated kernel has the vectors and sums of two halves.
GATED: dict[tuple[str, str], Tiles] = {
    ("nvidia", "fp32"): {
        16: ((32, 32, 4, 3, FLAT), (16, 64, 8, 3, FLAT)),
        32: ((32, 32, 8, 3, FLAT), (16, 64, 8, 3, FLAT)),
        64: ((16, 32, 8, 3, FLAT), (32, 32, 8, 3, FLAT)),
        128: ((16, 32, 8, 3, FLAT), (16, 16, 8, 3, FLAT)),
        256: ((16, 16, 8, 2, FLAT),),
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
        64: ((32, 64, 4, 3), (64, 64, 4, 3)),
        128: ((16, 64, 4, 3), (32, 64, 4, 3)),
    },
    ("nvidia", "tf32"): {},
    ("nvidia", "tf32x3"): {},
    ("nvidia", "widened"): {},
    ("nvidia", "fp64"): {
        16: ((16, 16, 4, 3, FLAT),),
        32: ((16, 16, 4, 3, FLAT),),
        64: ((16, 16, 4, 3, FLAT),),
        128: ((16, 16, 8, 2, FLAT),),
    },
    ("amd", "fp32"): {
        16: ((32, 32, 4, 2), (32, 64, 4, 2)),
        32: ((32, 32, 4, 2), (32, 64, 4, 2)),
        64: ((32, 32, 4, 2), (16, 32, 4, 2)),
        128: ((16, 32, 4, 2), (16, 16, 4, 2)),
        256: ((16, 16, 4, 2),),
    },
    ("amd", "tf32x3"): {},
    ("amd", "widened"): {},
    ("amd", "fp64"): {width: ((16, 16, 4, 2),) for width in WIDTHS[:4]},
    ("interpreter", "fp64"): {width: ((128, 64, 1, 1), (64, 32, 1, 1)) for width in WIDTHS},
}
GATED["blackwell", "fp32"] = {**GATED["nvidia", "fp32"], 32: ((32, 32, 4, 3, FLAT),)}
GATED_UNALIGNED: dict[tuple[str, str], Tiles] = {
    ("nvidia", "bf16"): {16: ((16, 64, 4, 2),), 32: ((16, 64, 4, 2),), 64: ((16, 64, 4, 2),)},
    ("hopper", "bf16"): {16: ((16, 64, 4, 2),), 32: ((16, 64, 4, 2),), 64: ((16, 64, 4, 2),)},
}
# One grouped kernel contains the code for every width that occurs and needs as many registers as the widest.
GROUPED: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "fp32"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (16, 64), (16, 32)), 8, 3, 1, FLAT),),
    ("nvidia", "bf16"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 64), (32, 64)), 4, 3, 2),),
    ("hopper", "bf16"): (GroupedConfig(((64, 128), (64, 128), (64, 128), (64, 128), (32, 128)), 8, 3, 1),),
    ("blackwell", "bf16"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 64)), 4, 3, 2),),
    ("nvidia", "tf32"): (GroupedConfig(((64, 64), (64, 64), (32, 32), (32, 32), (16, 32)), 4, 2, 2, FLAT),),
    ("hopper", "tf32"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 64)), 4, 2, 2),),
    ("nvidia", "tf32x3"): (GroupedConfig(((64, 64), (64, 64), (32, 32), (16, 32)), 4, 2, 2, FLAT),),
    ("hopper", "tf32x3"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (16, 32, FLAT)), 4, 2, 2),),
    ("nvidia", "widened"): (GroupedConfig(((32, 64), (32, 64), (16, 64), (16, 64, FLAT), (16, 32, FLAT)), 4, 2, 2),),
    ("hopper", "widened"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 64)), 4, 2, 2),),
    ("nvidia", "fp64"): (GroupedConfig(((16, 16),) * 5, 8, 2, 1, FLAT),),
    ("amd", "fp32"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 64), (16, 32)), 4, 2, 1),),
    ("amd", "widened"): (GroupedConfig(((16, 32), (16, 32), (16, 32), (16, 32), (16, 16)), 4, 2, 1),),
    ("amd", "fp64"): (GroupedConfig(((16, 16),) * 5, 4, 2, 1),),
    ("interpreter", "fp64"): (
        GroupedConfig(((128, 64),) * 5, 1, 1, 1),
        GroupedConfig(((64, 32),) * 5, 1, 1, 2),
    ),
}
# For lists of layers with at most FEW_FILTERS filters.
FEW_FILTERS = 64
GROUPED_FEW: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("hopper", "bf16"): (GroupedConfig(((64, 64), (64, 64), (64, 64), (64, 64)), 4, 3, 2),),
}
# For lists in which C may be unaligned, but not X.
GROUPED_ANY_C: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "fp32"): (GroupedConfig(((32, 32), (32, 32), (32, 32), (32, 32), (16, 16)), 8, 3, 1, FLAT),),
    ("nvidia", "bf16"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 64)), 4, 3, 2),),
}
GROUPED_UNALIGNED: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "fp32"): (GroupedConfig(((32, 32), (32, 32), (32, 32), (32, 32), (16, 16)), 8, 3, 1, FLAT),),
    ("nvidia", "bf16"): (GroupedConfig(((32, 64), (32, 64), (32, 64)), 4, 2, 2),),
    ("hopper", "bf16"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (16, 64)), 4, 2, 2),),
    ("nvidia", "tf32"): (GroupedConfig(((64, 64), (64, 64), (32, 32)), 4, 2, 2, FLAT),),
    ("nvidia", "tf32x3"): (GroupedConfig(((64, 64, FLAT), (32, 64), (32, 32, FLAT)), 4, 2, 2),),
    ("blackwell", "tf32x3"): (GroupedConfig(((32, 64), (32, 64), (32, 32, FLAT)), 4, 2, 2),),
    ("nvidia", "widened"): (GroupedConfig(((32, 64), (32, 64), (16, 64)), 4, 2, 2),),
    ("amd", "fp32"): (GroupedConfig(((16, 32), (16, 32), (16, 32), (16, 32), (16, 16)), 4, 2, 1),),
    ("amd", "fp64"): (GroupedConfig(((16, 16),) * 4, 4, 2, 1),),
}
# (project, accumulate), as in `pointwise_wide`. In the second, `rows` counts columns of X and `depth` counts rows.
WIDE: dict[tuple[str, str], tuple[tuple[Config, Config], ...]] = {
    ("nvidia", "fp32"): (
        (Config(128, 64, 16, 8, 3), Config(128, 64, 16, 8, 3)),
        (Config(64, 64, 16, 4, 3), Config(64, 64, 16, 8, 3)),
    ),
    ("nvidia", "bf16"): (
        (Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),
        (Config(128, 64, 32, 8, 3), Config(128, 64, 32, 8, 3)),
    ),
    ("hopper", "bf16"): (
        (Config(128, 128, 64, 8, 3), Config(128, 128, 64, 8, 3)),
        (Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),
    ),
    ("nvidia", "tf32"): ((Config(128, 64, 32, 8, 3), Config(128, 64, 32, 8, 3)),),
    ("hopper", "tf32"): ((Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),),
    ("nvidia", "tf32x3"): ((Config(128, 64, 32, 8, 3), Config(128, 64, 16, 8, 3)),),
    ("hopper", "tf32x3"): ((Config(128, 64, 32, 8, 3), Config(128, 128, 32, 8, 3)),),
    ("nvidia", "widened"): ((Config(64, 64, 16, 4, 3), Config(64, 64, 32, 4, 3)),),
    ("hopper", "widened"): ((Config(128, 64, 32, 8, 3), Config(128, 128, 32, 8, 3)),),
    ("nvidia", "fp64"): ((Config(32, 32, 16, 4, 3), Config(32, 32, 16, 4, 3)),),
    ("amd", "fp32"): (
        (Config(128, 64, 32, 4, 2), Config(128, 64, 32, 4, 2)),
        (Config(64, 64, 32, 4, 2), Config(64, 64, 32, 4, 2)),
    ),
    ("amd", "bf16"): (
        (Config(128, 64, 64, 4, 2), Config(128, 128, 32, 4, 2)),
        (Config(128, 64, 32, 4, 2), Config(128, 64, 32, 4, 2)),
    ),
    ("amd", "fp64"): ((Config(32, 32, 16, 4, 2), Config(32, 32, 16, 4, 2)),),
    ("interpreter", "fp64"): ((Config(128, 64, 128, 1, 1), Config(128, 64, 128, 1, 1)),) * 2,
}
WIDE_UNALIGNED: dict[tuple[str, str], tuple[tuple[Config, Config], ...]] = {
    ("nvidia", "bf16"): ((Config(128, 64, 32, 8, 2), Config(32, 64, 32, 4, 2)),),
    ("hopper", "tf32"): ((Config(64, 64, 32, 4, 2), Config(64, 64, 32, 4, 2)),),
    ("hopper", "tf32x3"): ((Config(64, 64, 32, 4, 2), Config(64, 64, 32, 4, 2)),),
    ("hopper", "widened"): ((Config(64, 64, 32, 4, 2), Config(64, 64, 32, 4, 2)),),
    ("blackwell", "tf32x3"): ((Config(64, 64, 32, 8, 2), Config(64, 64, 32, 4, 2)),),
}
# Used instead of the first of a pair for at most FEW_ROWS rows: most reads are then of V, and small tiles spread them
# over many programs.
FEW_ROWS, FEW_ROWS_CONFIG = 64, Config(16, 16, 64, 1, 3)
FEW_ROWS_UNALIGNED = Config(16, 16, 32, 1, 2)


Table = dict[tuple[str, str], Any]


def _entry(table: Table, device: Device, kind: str) -> Any:
    """Return what a table has for the GPU, or for its vendor; None if it has nothing."""
    # AMD's matrix cores and the interpreter make no difference between most kinds of arithmetic.
    others = {"amd": ("fp32",), "interpreter": ("fp64",)}.get(device.vendor, ())
    keys = [(name, own) for own in (kind, *others) for name in (device.family, device.vendor)]
    return next((table[key] for key in keys if key in table), None)


def _chosen(aligned: Table, unaligned: Table, device: Device, kind: str, is_aligned: bool) -> Any:
    exact = (device.family, kind) in unaligned or (device.vendor, kind) in unaligned or device.vendor == "amd"
    return _entry(unaligned if not is_aligned and exact else aligned, device, kind) or _entry(aligned, device, kind)


def _tiles(entry: Tiles, device: Device, form: str, width: int, filters: int) -> list[Config]:
    """Return the configurations of one width for a layer, each once."""
    found = [Config(tile[0], tile[1], width, *tile[2:]) for tile in entry.get(width, ())]
    if device.vendor == "interpreter":
        # As on a GPU: single multiplications are of U, tensor cores compute U^T.
        found = [replace(config, turned=form != "ieee") for config in found]
    # AMD's matrix cores work on tiles of any number of warps.
    own = form if device.vendor == "nvidia" else "ieee"
    return list(dict.fromkeys(config.for_filters(filters, own) for config in found))


def pointwise(
    device: Device, form: str, stored: torch.dtype, width: int, filters: int, is_aligned: bool = True
) -> list[Config]:
    """Return the configurations for a layer that fit the device, the default one first; none if it is too wide."""
    entry = _chosen(POINTWISE, POINTWISE_UNALIGNED, device, arithmetic(form, stored), is_aligned)
    found = _tiles(entry, device, form, width, filters)
    if device.has_tensor_memory and not is_aligned:
        # One warp would spill if it computed U^T.
        found = [replace(own, turned=False) if own.warps == 1 and own.depth <= 64 else own for own in found]
    return [own for own in found if fused_memory(own, device, form, stored, 1) <= device.shared_memory]


def gated(
    device: Device, form: str, stored: torch.dtype, width: int, filters: int, is_aligned: bool = True
) -> list[Config]:
    """Return the configurations for gated units that fit the device, the default one first; none if too wide."""
    entry = _chosen(GATED, GATED_UNALIGNED, device, arithmetic(form, stored), is_aligned)
    # Two warps with unaligned rows would have 16 barriers in a pass.
    least = 64 if filters > 16 and not is_aligned else 1
    found = _tiles(entry, device, form, width, max(filters, least))
    return [own for own in found if fused_memory(own, device, form, stored, 2) <= device.shared_memory]


def grouped(
    device: Device,
    form: str,
    stored: torch.dtype,
    alignment: tuple[bool, bool] = (True, True),
    has_few_filters: bool = False,
) -> list[GroupedConfig]:
    """Return the configurations of lists of layers that fit the device, the default one first.

    `alignment` says whether X is aligned, and whether C is.
    """
    kind, (x_aligned, c_aligned) = arithmetic(form, stored), alignment
    found = _chosen(GROUPED, GROUPED_UNALIGNED, device, kind, x_aligned)
    if x_aligned and has_few_filters:
        found = _entry(GROUPED_FEW, device, kind) or found
    elif x_aligned and not c_aligned:
        found = _chosen(GROUPED, GROUPED_ANY_C, device, kind, False)
    if device.vendor == "interpreter":
        found = tuple(replace(config, turned=form != "ieee") for config in found)
    return [own for own in found if grouped_memory(own, device, form, stored) <= device.shared_memory]


def wide(
    device: Device, form: str, stored: torch.dtype, rows: int, is_aligned: bool = True
) -> list[tuple[Config, Config]]:
    """Return the pairs of configurations that fit the device, the default one first."""
    found = _chosen(WIDE, WIDE_UNALIGNED, device, arithmetic(form, stored), is_aligned)
    if rows <= FEW_ROWS:
        found = [(FEW_ROWS_CONFIG if is_aligned else FEW_ROWS_UNALIGNED, accumulate) for _, accumulate in found]
    return [
        pair
        for pair in found
        if all(wide_memory(config, device, form, stored) <= device.shared_memory for config in pair)
    ]


def _bound(device: Device, kept: Sequence[int], buffered: Sequence[int], stages: int, epilogue: int = 0) -> int:
    """Return an upper bound on the shared memory of a program. All sizes are in bytes.

    `buffered` tiles are loaded ahead: while the program works on one stage, the others are loaded. After the loop, the
    result (`epilogue`) takes the place of the tiles. On AMD, tiles that are kept also take each other's place.
    """
    # The products of B200 take place behind barriers in memory, and may be a stage late.
    ahead, barriers = (stages + 1, 256) if device.has_tensor_memory else (stages, 0)
    bound = max(sum(kept) + ahead * sum(buffered), epilogue) + barriers
    # Every AMD GPU has the same, and the compile check shows that all configurations fit.
    return min(bound, AMD_SHARED_MEMORY) if device.vendor == "amd" else bound


def _copies(tile: int, device: Device, form: str, stored: torch.dtype) -> int:
    """Return the size of a tile of rows that is copied on its way to tensor cores: widened, transposed or in parts."""
    if form in ("split", "rounded", "ieee") and not (form == "ieee" and stored.itemsize == 2):
        return 0
    if stored.itemsize == 2:
        return 4 * tile
    return (2 if form == "tf32x3" else 1) * 4 * tile if device.has_wgmma or device.has_tensor_memory else 0


def fused_memory(config: Config, device: Device, form: str, stored: torch.dtype, halves: int) -> int:
    """Return an upper bound on the shared memory of a fused kernel; gated units have two halves."""
    BN, BM, BD, size = config.rows, config.filters, config.depth, stored.itemsize
    planes, dtype = plane_storage(form, stored)
    vectors = halves * planes * BM * BD * dtype.itemsize
    # The product while it becomes an operand, in as many parts as it has.
    stays = config.turned and dtype.itemsize == 2 and not device.has_tensor_memory
    moved = 0 if stays else 2 * halves * planes * BN * BM * max(4, size)
    coefficients = (1 if halves == 1 else 3) * BN * BM * size
    copies = 2 * _copies(BN * BD, device, form, stored)
    return _bound(device, [vectors, moved, copies], [BN * BD * size, coefficients], config.stages)


def grouped_memory(config: GroupedConfig, device: Device, form: str, stored: torch.dtype) -> int:
    """Return an upper bound on the shared memory of the grouped kernel: the maximum over its tiles."""
    return max(fused_memory(own, device, form, stored, 1) for own in config.configs)


def wide_memory(config: Config, device: Device, form: str, stored: torch.dtype) -> int:
    """Return an upper bound on the shared memory of a program of either kernel."""
    rows, filters, depth = config.rows, config.filters, config.depth
    planes, dtype = plane_storage(form, stored)
    factor = planes * filters * depth * dtype.itemsize
    copies = [_copies(depth * rows, device, form, stored)]
    epilogue = rows * filters * max(4, stored.itemsize)
    return _bound(device, copies, [rows * depth * stored.itemsize, factor], config.stages, epilogue)
