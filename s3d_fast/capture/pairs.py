"""Lengths of differences between rows: how far a step moves the gap between a winner and its runner-up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from s3d_fast.network.calls import Call, pair

# Rows of winners and runners-up are gathered only if they have at most this many numbers.
MOST_NUMBERS = 50_000_000

Pair = tuple[Tensor, Tensor]  # of winners, of runners-up


def difference_norms(
    call: fx.Node, x: Tensor, output: Tensor, factors: Pair, places: Pair, bias: bool, rows: Tensor | None = None
) -> Tensor | None:
    """Return |c_1 x_1 - c_2 x_2| for the rows x of winners and runners-up; None if that is not known for this layer.

    Args:
        call: the layer's call, a convolution or a linear layer.
        x: what it reads.
        output: what it makes.
        factors: c_1 and c_2.
        places: of winners and runners-up in the flat output.
        bias: whether rows end in a 1.
        rows: all rows, (N, D), if they are laid out already, with few positions in every map.
    """
    name = Call(call).operation
    (c1, c2), (winner, runner) = factors, places
    if name == "aten.linear" and 2 * winner.numel() * x.shape[-1] <= MOST_NUMBERS:
        rows = x.flatten(0, -2)
        first, second = rows[winner // output.shape[-1]], rows[runner // output.shape[-1]]
        squares = (c1.unsqueeze(-1) * first - c2.unsqueeze(-1) * second).square().sum(-1)
        return (squares + (c1 - c2).square() if bias else squares).sqrt()
    if name != "aten.conv2d" or output.dim() != 4 or isinstance(Call(call)["padding"], str):
        return None
    height, width = output.shape[2:]
    positions = height * width
    first_of_sample = winner // (output.shape[1] * positions) * positions
    at, other = winner % positions, runner % positions
    if rows is not None:
        own_rows = rows.view(len(output), positions, -1)
        gram = own_rows @ own_rows.mT + float(bias)

        def product(one: Tensor, two: Tensor) -> Tensor:
            return gram.take((first_of_sample + one) * positions + two)

        total = c1 * c1 * product(at, at) + c2 * c2 * product(other, other) - 2 * c1 * c2 * product(at, other)
        return total.clamp(min=0).sqrt()
    squares = _inner_products(call, x, 0, 0, bias)
    own, others = squares.take(first_of_sample + at), squares.take(first_of_sample + other)
    # A shift is a number of rows and a number of columns. Few of all that there might be occur.
    across = 2 * width - 1
    shift = (other // width - at // width + height - 1) * across + (other % width - at % width + width - 1)
    occurring = shift.flatten().bincount().nonzero().flatten()
    number = shift.new_zeros((2 * height - 1) * across).index_put_((occurring,), torch.arange(len(occurring)).to(shift))
    shifts = [(one // across - height + 1, one % across - width + 1) for one in occurring.tolist()]
    products = torch.stack([_inner_products(call, x, down, right, bias) for down, right in shifts])
    inner = products.take(number[shift] * squares.numel() + first_of_sample + at)
    return (c1 * c1 * own + c2 * c2 * others - 2 * c1 * c2 * inner).clamp(min=0).sqrt()


def _inner_products(call: fx.Node, x: Tensor, down: int, right: int, bias: bool) -> Tensor:  # (B, H', W')
    """Return the inner product of every patch with the patch so many positions away; zero beyond the border."""
    bound = Call(call)
    kernel = bound["weight"].meta["val"].shape[2:]
    stride, padding, dilation = (pair(bound[name]) for name in ("stride", "padding", "dilation"))
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    steps = (down * stride[0], right * stride[1])
    moved = F.pad(padded, (-min(0, steps[1]), max(0, steps[1]), -min(0, steps[0]), max(0, steps[0])))
    top, left = max(0, steps[0]), max(0, steps[1])
    moved = moved[:, :, top : top + padded.shape[2], left : left + padded.shape[3]]
    products = (padded * moved).sum(1, keepdim=True)
    ones = products.new_ones(1, 1, *(int(size) for size in kernel))
    return F.conv2d(products, ones, stride=stride, dilation=dilation)[:, 0] + float(bias)
