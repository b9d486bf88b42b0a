"""Which of the `tiles` a layer takes on a GPU, and the shared memory that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from s3d_fast.kernels import tiles
from s3d_fast.kernels.device import Device
from s3d_fast.kernels.products import factor_storage, row_storage
from s3d_fast.kernels.tiles import Config, GroupedConfig, Tiles

AMD_SHARED_MEMORY = 65536


def arithmetic(form: str, stored: torch.dtype) -> str:
    """Return the kind of arithmetic, which selects the table of configurations.

    "fp64"; "fp32" (IEEE); "bf16" (rows in one bfloat16 plane); "bf16x3" (in two planes); "bf16x6" (in three); "bf16x1"
    (vectors in one plane, too), which takes what "bf16" takes where it has no table of its own.
    """
    if stored == torch.float64:
        return "fp64"
    return {"ieee": "fp32", "bf16x2": "bf16"}.get(form, form)


Table = dict[tuple[str, str], Any]


def _entry(table: Table, device: Device, kind: str) -> Any:
    """Return what a table has for the GPU, or for its vendor; None if it has nothing."""
    # AMD's matrix cores and the interpreter make no difference between most kinds of arithmetic.
    others = {"amd": ("fp32",), "interpreter": ("fp64",)}.get(device.vendor, ())
    alike = ("bf16",) if kind == "bf16x1" else ()
    keys = [(name, own) for own in (kind, *alike, *others) for name in (device.family, device.vendor)]
    return next((table[key] for key in keys if key in table), None)


def _tiles(entry: Tiles, device: Device, form: str, width: int, filters: int) -> list[Config]:
    """Return the configurations of one width for a layer, each once."""
    found = [Config(tile[0], tile[1], width, *tile[2:]) for tile in entry.get(width, ())]
    if device.vendor == "interpreter":
        # As on a GPU: single multiplications are of U, tensor cores compute U^T.
        found = [replace(config, turned=form != "ieee") for config in found]
    # AMD's matrix cores work on tiles of any number of filters.
    own = form if device.vendor == "nvidia" else "ieee"
    return list(dict.fromkeys(config.for_filters(filters, own) for config in found))


def pointwise(
    device: Device, form: str, stored: torch.dtype, width: int, filters: int, bias: bool = False, atomic: bool = False
) -> list[Config]:
    """Return the configurations for a layer that fit the device, the default one first; none if it is too wide."""
    found = _tiles(_entry(tiles.POINTWISE, device, arithmetic(form, stored)), device, form, width, filters)
    if bias:
        found = list(dict.fromkeys(own.for_row_sums() for own in found))
    if atomic and device.vendor == "nvidia":
        found = [own.for_atomic_sums() for own in found[:1]]
    return [own for own in found if fused_memory(own, device, form, stored, 1) <= device.shared_memory]


def gated(device: Device, form: str, stored: torch.dtype, width: int, filters: int, bias: bool = False) -> list[Config]:
    """Return the configurations for gated units that fit the device, the default one first; none if too wide."""
    found = _tiles(_entry(tiles.GATED, device, arithmetic(form, stored)), device, form, width, filters)
    if bias and device.family == "nvidia" and form != "ieee":
        # Two tiles of U are summed in registers, too.
        found = [own for own in found if own.depth < 128]
    return [own for own in found if fused_memory(own, device, form, stored, 2) <= device.shared_memory]


def grouped(
    device: Device, form: str, stored: torch.dtype, is_aligned: bool = True, has_few_filters: bool = False
) -> list[GroupedConfig]:
    """Return the configurations of lists of layers that fit the device, the default one first."""
    kind = arithmetic(form, stored)
    special = {} if is_aligned and not has_few_filters else tiles.GROUPED_FEW if is_aligned else tiles.GROUPED_UNALIGNED
    found = _entry(special, device, kind) or _entry(tiles.GROUPED, device, kind)
    if device.vendor == "interpreter":
        found = tuple(replace(config, turned=form != "ieee") for config in found)
    return [own for own in found if grouped_memory(own, device, form, stored) <= device.shared_memory]


def wide(device: Device, form: str, stored: torch.dtype, rows: int) -> list[tuple[Config, Config]]:
    """Return the pairs of configurations that fit the device, the default one first."""
    found = _entry(tiles.WIDE, device, arithmetic(form, stored))
    if rows <= tiles.FEW_ROWS:
        found = [(tiles.FEW_ROWS_CONFIG, accumulate) for _, accumulate in found]
    return [
        pair
        for pair in found
        if all(wide_memory(config, device, form, stored) <= device.shared_memory for config in pair)
    ]


def compiler_options(device: Device, config: Config | GroupedConfig) -> dict[str, int]:
    """Return what the compiler has to know besides warps and stages.

    AMD's matrix cores multiply tiles of 32 x 32 or of 16 x 16. The compiler takes the larger ones, and warps that have
    no such tile of their own then repeat the work of others.
    """
    if device.vendor != "amd" or (isinstance(config, Config) and config.has_large_tiles):
        return {}
    return {"matrix_instr_nonkdim": 16}


def coefficient_parts(config: Config, device: Device, stored: torch.dtype) -> int:
    """Return how many parts a fused kernel's tile of coefficients is cut into (`coefficients`); 0 if it is not cut."""
    if not config.turned or stored.itemsize != 2 or device.vendor == "amd" or device.has_tensor_memory:
        return 0
    if device.vendor == "interpreter":
        return min(max(1, config.rows // 32), 4)
    # In these tiles the compiler lets warps share out the rows, not the filters; a wgmma has a part of the filters.
    is_by_wgmma = device.family == "hopper" and config.warps >= 4
    if not is_by_wgmma and max(config.rows, config.depth) > config.filters:
        return 0
    parts = max(1, config.rows * config.filters * stored.itemsize // (16 * 32 * config.warps))
    return parts if parts in (1, 2, 4) and config.rows // parts >= 8 else 0


def adds_atomically(config: Config, device: Device) -> bool:
    """Return whether a fused kernel can add its sums atomically, which takes registers for their places."""
    return not (device.family == "hopper" and config.depth == 256)


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


def _stages(config: Config, device: Device, form: str) -> int:
    """Return how many stages are loaded ahead; the six products of B200 may be two more stages late."""
    return config.stages + 2 * (form == "bf16x6" and device.has_tensor_memory)


def _sizes(form: str, stored: torch.dtype) -> tuple[int, int]:
    """Return the bytes of an entry of the rows, and of the other factor, in all planes."""
    number = torch.float64 if stored == torch.float64 else torch.float32
    (rows, row_dtype), (factors, factor_dtype) = row_storage(form, stored), factor_storage(form, number)
    return rows * row_dtype.itemsize, factors * factor_dtype.itemsize


def _widened(tile: int, form: str, stored: torch.dtype) -> int:
    """Return the size of a tile of 16-bit rows that is widened on its way to IEEE products."""
    return 4 * tile if form == "ieee" and stored.itemsize == 2 else 0


def fused_memory(config: Config, device: Device, form: str, stored: torch.dtype, halves: int) -> int:
    """Return an upper bound on the shared memory of a fused kernel; gated units have two halves."""
    BN, BM, BD = config.rows, config.filters, config.depth
    row, factor = _sizes(form, stored)
    # The product while it becomes an operand, in as many planes as it has.
    stays = config.turned and form != "ieee" and not device.has_tensor_memory
    moved = 0 if stays else 2 * halves * BN * BM * max(4, factor)
    coefficients = (1 if halves == 1 else 3) * BN * BM * stored.itemsize
    kept = [halves * BM * BD * factor, moved, 2 * _widened(BN * BD, form, stored)]
    return _bound(device, kept, [BN * BD * row, coefficients], _stages(config, device, form))


def grouped_memory(config: GroupedConfig, device: Device, form: str, stored: torch.dtype) -> int:
    """Return an upper bound on the shared memory of the grouped kernel: the maximum over its tiles."""
    return max(fused_memory(own, device, form, stored, 1) for own in config.configs)


def wide_memory(config: Config, device: Device, form: str, stored: torch.dtype) -> int:
    """Return an upper bound on the shared memory of a program of either kernel."""
    rows, filters, depth = config.rows, config.filters, config.depth
    row, factor = _sizes(form, stored)
    epilogue = rows * filters * max(4, stored.itemsize)
    buffered = [rows * depth * row, filters * depth * factor]
    return _bound(device, [_widened(depth * rows, form, stored)], buffered, _stages(config, device, form), epilogue)
