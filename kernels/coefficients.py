"""Tiles of coefficients, as the fused kernels multiply them with U or U^T.

For U^T a tile (rows, filters) is transposed on its way through shared memory. Where its rows are multiples of 128 bytes
apart they lie in the same banks, and reading across eight of them takes eight passes. So 16-bit tiles are cut into
pieces of 8 rows and 16 bytes, whose rows follow each other in shared memory: neither the 8 threads that copy a piece
nor the 8 that read it share banks. The compiler lays out a tile with four axes (rows of pieces, pieces, 8 rows, 16
bytes) like that, if every thread copies 16 bytes of it; of larger tiles there are PARTS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from s3d_fast.kernels.launch import loadable, tile_offsets


@triton.jit
def coefficient_offsets(
    C,
    first_filter,
    F,
    M,
    row,
    column,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,  # 0: the tile is not cut
    BN: tl.constexpr,
    BM: tl.constexpr,
):
    """The offsets of the entries of a tile, of its first part if it is cut; their rows; and which filters there are."""
    if PARTS == 0:
        own, r = tl.arange(0, BM), tl.arange(0, BN)
        f = first_filter + own
        # With K vectors per filter, the F = K M rows of V share the M columns of C.
        tile = tile_offsets(r, row, f if K == 1 else f % M, column)
        return tile, r[:, None], (f < loadable(F, WHOLE))[None, :]
    else:
        PIECE: tl.constexpr = 128 // C.dtype.element_ty.primitive_bitwidth
        f = first_filter + (tl.arange(0, BM // PIECE)[:, None] * PIECE + tl.arange(0, PIECE)[None, :])
        r = tl.arange(0, BN // PARTS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        c = f if K == 1 else f % M
        tile = r[:, None, :, None] * row + c[None, :, None, :] * column
        return tile, r[:, None, :, None], (f < loadable(F, WHOLE))[None, :, None, :]


@triton.jit
def load_coefficients(
    C,
    tile,
    r,
    inside,
    rows,  # how many rows from C on there are
    row,
    one,  # see `launch.hidden_one`
    TURNED: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
):
    """A tile of coefficients: (BN, BM), or transposed if TURNED."""
    if PARTS <= 1:
        c = tl.load(C + tile, mask=(r < rows) & inside, other=0.0)
    else:
        STEP: tl.constexpr = BN // PARTS
        first = tl.load(C + tile, mask=(r < rows) & inside, other=0.0)
        second = tl.load(C + STEP * row + tile, mask=(r < rows - STEP) & inside, other=0.0)
        if PARTS == 2:
            c = tl.join(first, second)
        else:
            third = tl.load(C + 2 * STEP * row + tile, mask=(r < rows - 2 * STEP) & inside, other=0.0)
            fourth = tl.load(C + 3 * STEP * row + tile, mask=(r < rows - 3 * STEP) & inside, other=0.0)
            c = tl.join(tl.join(first, third), tl.join(second, fourth))
    if TURNED:
        if one is not None:
            c *= (tl.zeros((), tl.float32) + one).to(c.dtype)
        if PARTS == 0:
            c = tl.trans(c)
        elif PARTS == 1:
            c = tl.reshape(tl.permute(c, (1, 3, 0, 2)), (BM, BN))
        elif PARTS == 2:
            c = tl.reshape(tl.permute(c, (1, 3, 4, 0, 2)), (BM, BN))
        else:
            c = tl.reshape(tl.permute(c, (1, 3, 4, 5, 0, 2)), (BM, BN))
    return c
