"""Weights after splits: gather, scale and shift rows, repeat and scale columns; each new entry is written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.launch import Launch, Plan
from s3d_fast.maths.reference import Widening

ROWS, COLUMNS, WARPS = 4, 256, 4


@triton.jit
def grow_kernel(
    weight,  # (M, old_size)
    rows,  # (M',), int64
    row_scale,  # (M',)
    shift,  # (R, old_size)
    shift_rows,  # (M',), int64; -1 for none
    columns,  # (I',), int64
    column_scale,  # (I',)
    shift_scale,  # (1,)
    out,  # (M', new_size)
    new_rows,
    old_size,
    new_size,
    inner,  # entries per column
    ROW_SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    SHIFT_ROWS: tl.constexpr,
    REPEAT: tl.constexpr,  # whether columns are given
    COLUMN_SCALE: tl.constexpr,
    NUMBER: tl.constexpr,  # the dtype of the arithmetic
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """out = (row_scale * weight[rows] + shift_scale * shift[shift_rows])[:, columns] * column_scale."""
    # One dimension of programs: a grid has at most 65535 in any other.
    across = tl.cdiv(new_size, BC)
    r = (tl.program_id(0) // across).to(tl.int64) * BR + tl.arange(0, BR)
    c = (tl.program_id(0) % across).to(tl.int64) * BC + tl.arange(0, BC)
    inside_r, inside_c = r < new_rows, c < new_size
    inside = inside_r[:, None] & inside_c[None, :]
    source = tl.load(columns + c // inner, mask=inside_c, other=0) * inner + c % inner if REPEAT else c
    row = tl.load(rows + r, mask=inside_r, other=0)
    value = tl.load(weight + row[:, None] * old_size + source[None, :], mask=inside, other=0.0).to(NUMBER)
    if ROW_SCALE:
        value *= tl.load(row_scale + r, mask=inside_r, other=0.0).to(NUMBER)[:, None]
    if SHIFT:
        moved = tl.load(shift_rows + r, mask=inside_r, other=-1) if SHIFT_ROWS else r
        present = inside & (moved >= 0)[:, None]
        step = tl.load(shift + moved[:, None] * old_size + source[None, :], mask=present, other=0.0).to(NUMBER)
        value += tl.load(shift_scale).to(NUMBER) * step
    if COLUMN_SCALE:
        value *= tl.load(column_scale + c // inner, mask=inside_c, other=0.0).to(NUMBER)[None, :]
    tl.store(out + r[:, None] * new_size + c[None, :], value.to(out.dtype.element_ty), mask=inside)


def plan(widening: Widening) -> Plan:
    """Return the launch for a weight with at least one entry after the splits."""
    weight, rows, columns = widening.weight.contiguous(), widening.rows.contiguous(), widening.columns
    shape = [len(rows), *weight.shape[1:]]
    if columns is not None:
        shape[1] = len(columns)
    out = weight.new_empty(shape)
    if out.numel() == 0:
        return Plan([], out)
    row_scale, shift, shift_rows, columns, column_scale = (
        tensor if tensor is None else tensor.contiguous() for tensor in widening[2:7]
    )
    given = dict(
        row_scale=row_scale, shift=shift, shift_rows=shift_rows, columns=columns, column_scale=column_scale
    )  # fmt: skip
    # A tensor, because Triton would round a number to float32.
    shift_scale = torch.full((1,), widening.shift_scale, dtype=torch.float64, device=weight.device)
    new_size = out[0].numel()
    arguments = dict(
        {name: weight if tensor is None else tensor for name, tensor in given.items()},
        weight=weight, rows=rows, shift_scale=shift_scale, out=out, new_rows=len(rows), old_size=weight[0].numel(),
        new_size=new_size, inner=weight.shape[2:].numel(), ROW_SCALE=row_scale is not None, SHIFT=shift is not None,
        SHIFT_ROWS=shift_rows is not None, REPEAT=columns is not None, COLUMN_SCALE=column_scale is not None,
        NUMBER=tl.float64 if weight.dtype == torch.float64 else tl.float32, BR=ROWS, BC=COLUMNS,
    )  # fmt: skip
    grid = (triton.cdiv(new_size, COLUMNS) * triton.cdiv(len(rows), ROWS),)
    return Plan([Launch("surgery", grow_kernel, grid, arguments, WARPS, label=f"{ROWS}x{COLUMNS}")], out)


def grow_weight(widening: Widening) -> Tensor:
    """Return a weight after splits, as `s3d_fast.maths.reference.grow_weight` does. Indices must be in range."""
    with launch.on_device(widening.weight):
        return plan(widening).run()
