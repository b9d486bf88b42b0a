"""S v for pointwise filters that depthwise stages follow: a product, two passes over the maps per stage, a product.

With r_0 = X v:  r_(i+1) = dw_i(d_i r_i),  y_n = C_n r_n,  y_i = C_i r_i + d_i dw_i^T(y_(i+1)),  S v = X^T y_0.
Maps are (positions, filters) in the dtype of the computation. A pass forth reads r_i with its slopes and writes
r_(i+1), or y_n at the last stage. A pass back writes y_i over r_i, and y_0 as `pointwise_wide` stores its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.base.padding import padded_size
from s3d_fast.kernels import configs, launch
from s3d_fast.kernels.aligned import copied_at_once, in_planes, is_aligned, ready_planes
from s3d_fast.kernels.device import INTERPRETED, Device, describe
from s3d_fast.kernels.launch import Launch, Plan
from s3d_fast.kernels.options import TritonOptions, current
from s3d_fast.kernels.pointwise_wide import (
    accumulate_launches,
    product_memory,
    project_launch,
    slices_of,
)
from s3d_fast.kernels.products import (
    current_form,
    factor_planes,
    factor_storage,
    is_by_single_multiplications,
    split_launch,
    store_planes,
)
from s3d_fast.kernels.tiles import Config
from s3d_fast.maths.reference import DepthwiseStage


@triton.jit
def stage_forth_kernel(
    maps,  # (images height width, m_row): r
    slopes,  # (images height width, M): d
    weight,  # (M, taps)
    C,  # (images out_height out_width, M); not read unless LAST
    out,  # (images out_height out_width, m_row): dw(d r), times C if LAST
    rows,  # of out
    height,
    width,
    out_height,
    out_width,
    F,
    M,
    m_row,
    taps,
    kernel_width,
    stride_h,
    stride_w,
    padding_h,
    padding_w,
    dilation_h,
    dilation_w,
    LAST: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
):
    """out[o] = sum over taps t of weight[t] slopes[o + t] maps[o + t], where it is inside the map."""
    number = maps.dtype.element_ty
    n = tl.program_id(0) * BP + tl.arange(0, BP)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    column = f % M
    inside = (n < rows)[:, None] & (f < F)[None, :]
    top = (n // out_width) % out_height * stride_h - padding_h
    left = n % out_width * stride_w - padding_w
    image = n // (out_width * out_height)
    total = tl.zeros((BP, BF), number)
    for t in range(taps):
        h, w = top + t // kernel_width * dilation_h, left + t % kernel_width * dilation_w
        hit = inside & ((h >= 0) & (h < height) & (w >= 0) & (w < width))[:, None]
        place = ((image * height + h) * width + w).to(tl.int64)[:, None]
        r = tl.load(maps + place * m_row + f[None, :], mask=hit, other=0.0)
        slope = tl.load(slopes + place * M + column[None, :], mask=hit, other=0.0).to(number)
        tap = tl.load(weight + column * taps + t, mask=f < F, other=0.0).to(number)
        total += tap[None, :] * (slope * r)
    place = n.to(tl.int64)[:, None]
    if LAST:
        total *= tl.load(C + place * M + column[None, :], mask=inside, other=0.0).to(number)
    tl.store(out + place * m_row + f[None, :], total, mask=inside)


@triton.jit
def stage_back_kernel(
    maps,  # (images height width, m_row): r
    slopes,  # (images height width, M): d
    weight,  # (M, taps)
    C,  # (images height width, M)
    after,  # (images out_height out_width, m_row): y of the next stage
    out,  # (images height width, m_row), or (planes, images height width, m_row) at the first stage; may be maps
    rows,  # of out
    height,
    width,
    out_height,
    out_width,
    F,
    M,
    m_row,
    plane,
    taps,
    kernel_width,
    stride_h,
    stride_w,
    padding_h,
    padding_w,
    dilation_h,
    dilation_w,
    FORM: tl.constexpr,  # how out is stored; "ieee" is as it is
    BP: tl.constexpr,
    BF: tl.constexpr,
):
    """out[p] = C[p] maps[p] + slopes[p] sum over taps t of weight[t] after[o], where p = o + t."""
    number = maps.dtype.element_ty
    n = tl.program_id(0) * BP + tl.arange(0, BP)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    column = f % M
    inside = (n < rows)[:, None] & (f < F)[None, :]
    bottom, right = (n // width) % height + padding_h, n % width + padding_w
    image = n // (width * height)
    total = tl.zeros((BP, BF), number)
    for t in range(taps):
        h, w = bottom - t // kernel_width * dilation_h, right - t % kernel_width * dilation_w
        # Of a stride, only every so many positions are ones of the next map.
        is_met = (h >= 0) & (w >= 0) & (h % stride_h == 0) & (w % stride_w == 0)
        h, w = h // stride_h, w // stride_w
        hit = inside & (is_met & (h < out_height) & (w < out_width))[:, None]
        place = ((image * out_height + h) * out_width + w).to(tl.int64)[:, None]
        y = tl.load(after + place * m_row + f[None, :], mask=hit, other=0.0)
        tap = tl.load(weight + column * taps + t, mask=f < F, other=0.0).to(number)
        total += tap[None, :] * y
    place = n.to(tl.int64)[:, None]
    own = place * M + column[None, :]
    total *= tl.load(slopes + own, mask=inside, other=0.0).to(number)
    r = tl.load(maps + place * m_row + f[None, :], mask=inside, other=0.0)
    total += tl.load(C + own, mask=inside, other=0.0).to(number) * r
    store_planes(out, plane, place * m_row + f[None, :], total, inside, factor_planes(FORM), FORM)


# Of float64 maps, a tile has half as many positions.
STAGE_POSITIONS, STAGE_FILTERS, STAGE_WARPS = (64, 64, 4) if INTERPRETED else (16, 64, 4)


def supports(X: Tensor, C: Sequence[Tensor]) -> bool:
    """Return whether there is something to compute: rows with columns, and maps that are not empty."""
    return X.numel() > 0 and all(maps.numel() > 0 for maps in C)


def plan(
    X: Tensor,  # (planes, N, D)
    C: Sequence[Tensor],
    d: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Sequence[DepthwiseStage],
    V: Tensor,  # (F, D (+ 1)), contiguous
    bias: bool,
    form: str,
    device: Device,
    options: TritonOptions,
    pair: tuple[Config, Config],
) -> Plan:
    """Return the launches, chunk of images by chunk."""
    D, F, M = X.shape[2], len(V), C[0].shape[3]
    project, accumulate = pair[0], pair[1].for_bias(form) if bias else pair[1]
    count, dtype = factor_storage(form, V.dtype)
    split, parts = split_launch(V, form, (count, dtype), is_by_single_multiplications(form, device), range(D))
    images, m_row = C[0].shape[0], padded_size(F)
    sizes = [own.shape[1] * own.shape[2] for own in C]
    per_image = m_row * (V.itemsize * sum(sizes) + count * dtype.itemsize * sizes[0])
    chunk = launch.part_size(images, max(1, options.scratch_bytes // per_image))
    maps = [V.new_empty(chunk * size, m_row) for size in sizes]
    U = product_memory(form, chunk * sizes[0], F, V)
    per_slice, slices = slices_of(X, chunk * sizes[0], F, accumulate, device)
    out = V.new_empty(slices, *V.shape)
    flat = [[own.reshape(-1, M).contiguous() for own in lists] for lists in (C, d)]
    taps = [own.reshape(M, -1).contiguous() for own in weight]
    positions = STAGE_POSITIONS * torch.float32.itemsize // V.itemsize
    launches = [split]
    for first in range(0, images, chunk):
        last = min(first + chunk, images)
        begin, end = first * sizes[0], last * sizes[0]
        launches.append(
            project_launch("depthwise, project", X, None, V, parts, maps[0], (begin, end), bias, form, project, device)
        )
        coefficients, slopes = (
            [own[first * size : last * size] for own, size in zip(lists, sizes, strict=False)] for lists in flat
        )
        common = [
            dict(
                maps=maps[i], slopes=slopes[i], weight=taps[i], F=F, M=M, m_row=m_row, taps=taps[i].shape[1],
                kernel_width=weight[i].shape[2], height=C[i].shape[1], width=C[i].shape[2],
                out_height=C[i + 1].shape[1], out_width=C[i + 1].shape[2], BP=positions, BF=STAGE_FILTERS,
                **_geometry(stage),
            )
            for i, stage in enumerate(stages)
        ]  # fmt: skip
        for i, own in enumerate(common):
            rows = (last - first) * sizes[i + 1]
            own = dict(own, C=coefficients[i + 1], out=maps[i + 1], rows=rows, LAST=i + 1 == len(stages))
            launches.append(_stage_launch("depthwise, forth", stage_forth_kernel, rows, F, own))
        for i in reversed(range(len(stages))):
            rows = (last - first) * sizes[i]
            own = dict(common[i], C=coefficients[i], after=maps[i + 1], out=maps[i], rows=rows, plane=0, FORM="ieee")
            if i == 0:
                own |= dict(out=U, plane=U.stride(0), FORM=form)
            launches.append(_stage_launch("depthwise, back", stage_back_kernel, rows, F, own))
        launches += accumulate_launches(
            X, U, out, (begin, end), F, 0, range(F * bias), per_slice, form, accumulate, device
        )
    return launch.summed(launches, out)


def _geometry(stage: DepthwiseStage) -> dict[str, int]:
    pairs = {"stride": stage.stride, "padding": stage.padding, "dilation": stage.dilation}
    return {f"{name}_{axis}": size for name, pair in pairs.items() for axis, size in zip("hw", pair, strict=True)}


def _stage_launch(name: str, kernel: object, rows: int, filters: int, arguments: dict[str, Any]) -> Launch:
    grid = (triton.cdiv(rows, arguments["BP"]), triton.cdiv(filters, arguments["BF"]))
    return Launch(name, kernel, grid, arguments, STAGE_WARPS, label="{BP}x{BF}".format(**arguments))


def depthwise_matvec(
    *,
    X: Tensor,
    C: Sequence[Tensor],
    d: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Sequence[DepthwiseStage],
    V: Tensor,
    bias: bool,
) -> Tensor:
    """Return S v for a layer that it `supports`, as `s3d_fast.maths.reference.depthwise_matvec` defines it."""
    if V.numel() == 0:
        return torch.zeros_like(V)
    vectors, options, device = V.reshape(-1, V.shape[-1]).contiguous(), current(), describe(X.device)
    form = current_form(X)
    by_image = X.unflatten(0, (len(C[0]), -1))
    at_once = len(by_image) if ready_planes(form, X) is not None else copied_at_once(form, by_image, options)
    if at_once < len(by_image):
        total = torch.zeros_like(V)
        for first in range(0, len(by_image), at_once):
            own = slice(first, first + at_once)
            maps, slopes = ([one[own] for one in given] for given in (C, d))
            rows = by_image[own].flatten(0, 1)
            total += depthwise_matvec(X=rows, C=maps, d=slopes, weight=weight, stages=stages, V=V, bias=bias)
        return total
    rows = in_planes(form, X)
    candidates = configs.wide(device, form, X.dtype, len(X))
    shapes = (X.shape[1], len(vectors), bias, rows.stride(), *(tuple(own.shape) for own in (*C, *weight)))
    key = ("depthwise", X.device, X.dtype, form, is_aligned(rows), *shapes)
    with launch.on_device(X):
        result = launch.choose(
            key, candidates, lambda pair: plan(rows, C, d, weight, stages, vectors, bias, form, device, options, pair)
        )
    return result.view(V.shape)
