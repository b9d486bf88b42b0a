"""One Lanczos step for all layers in one launch: orthogonalize S q against the basis twice, then normalize.

A program takes one filter of one layer, which a table describes. The number of the step is on the device, and S q comes
in the place of q: a step makes the same launches with the same arguments as the one before, so that a CUDA graph can
repeat it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.device import Device, describe
from s3d_fast.kernels.launch import Launch
from s3d_fast.kernels.products import DTYPES
from s3d_fast.kernels.tables import Tables, layer_of, on_device, padded_layers
from s3d_fast.maths.reference import KrylovState

# The longest float32 vector that a program keeps in registers; a float64 vector may be half as long. B200's code needs
# more registers for itself.
WIDEST, WIDEST_B200 = 16384, 8192
# Bytes of the basis that a program holds at once; half as many if vectors are not aligned, whose sums take more
# registers and barriers.
TILE_BYTES = 16384
# A kind of layer is the power of two that its vectors are padded to, and whether they are aligned.
LEAST_WIDTH, KINDS = 16, tl.constexpr(22)
# The columns of the table; each layer is one row.
FIELDS = ("basis", "q", "alpha", "beta", "length", "scale", "D", "capacity", "kind", "first")
BASIS, Q, ALPHA, BETA, LENGTH, SCALE, D_, CAPACITY, KIND, FIRST = (tl.constexpr(i) for i in range(len(FIELDS)))
ROW = tl.constexpr(len(FIELDS))


@triton.jit
def orthogonalize(w, space, step, D, BK: tl.constexpr, BD: tl.constexpr):
    """w - Q^T Q w, where Q is the first step + 1 basis vectors: classical Gram-Schmidt, which reads Q once.

    Each row of the tile adds up its own part of Q^T Q w: adding the rows up in the loop would take more barriers.
    """
    d = tl.arange(0, BD)
    along = tl.zeros((BK, BD), w.dtype)
    for first in range(0, step + 1, BK):
        k = first + tl.arange(0, BK)
        inside = (k <= step)[:, None] & (d < D)[None, :]
        Q = tl.load(space + k[:, None] * D + d[None, :], mask=inside, other=0.0)
        component = tl.sum(Q * w[None, :], 1)
        along += Q * component[:, None]
    return w - tl.sum(along, 0)


@triton.jit
def extend_space(
    space,  # (capacity, D)
    q,  # (D,): S q, and then the next vector
    alpha,  # the entry of this step
    beta,  # likewise
    length,
    scale,
    step,
    D,
    EPS: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
):
    """alpha = q.w, then w = (1 - Q^T Q)^2 w, beta = |w|, next q = w / beta, for w = S q: one step for one filter."""
    d = tl.arange(0, BD)
    inside = d < D
    # Read everything before any of it is overwritten; the sums below are barriers.
    done = tl.load(beta - 1, mask=step > 0, other=1.0) == 0
    before, dimension = tl.load(scale), tl.load(length)
    w = tl.load(q + d, mask=inside, other=0.0)
    last = tl.load(space + step * D + d, mask=inside, other=0.0)
    a = tl.sum(last * w, 0)
    # The first pass removes the component along the space; the second removes what rounding left of it.
    w = orthogonalize(w, space, step, D, BK, BD)
    w = orthogonalize(w, space, step, D, BK, BD)
    # Divided by the largest entry first, so that squares neither overflow nor underflow.
    size = tl.max(tl.abs(w), 0)
    unit = w / tl.where(size > 0, size, 1)
    b = tl.sqrt(tl.sum(unit * unit, 0)) * size
    largest = tl.maximum(before, tl.abs(a) + b, propagate_nan=tl.PropagateNan.ALL)
    # A coupling that rounding errors explain is none: `reference.coupling_noise`.
    noise = EPS * (10 + tl.sqrt(D.to(w.dtype)))
    exhausted = done | (b <= noise * largest) | (step + 1 == D)
    tl.store(length, tl.where(done, dimension, step + 1))
    tl.store(scale, tl.where(done, before, largest))
    tl.store(alpha, tl.where(done, 0.0, a))
    tl.store(beta, tl.where(exhausted, 0.0, b))
    vector = tl.where(exhausted, 0.0, w / b)
    tl.store(space + (step + 1) * D + d, vector, mask=inside)
    tl.store(q + d, vector, mask=inside)


@triton.jit(do_not_specialize=["layers", "t_row"])
def extend_kernel(
    table,  # (layers, ROW), int64
    taken,  # (), int64: the number of steps so far
    layers,
    t_row,  # the row stride of alpha and beta
    NUMBER: tl.constexpr,  # the type of the vectors
    EPS: tl.constexpr,
    LAYERS: tl.constexpr,
    PRESENT: tl.constexpr,  # bit i is set if there are layers of the i-th kind
    TILE: tl.constexpr,  # entries of the basis
):
    """One step in the space of one filter."""
    pointer: tl.constexpr = tl.pointer_type(NUMBER)
    row = layer_of(table, tl.program_id(0), layers, FIRST, ROW, LAYERS)
    j = tl.program_id(0).to(tl.int64) - tl.load(row + FIRST)
    step = tl.load(taken).to(tl.int32)
    alpha = tl.load(row + ALPHA).to(pointer) + j * t_row + step
    beta = tl.load(row + BETA).to(pointer) + j * t_row + step
    length = tl.load(row + LENGTH).to(tl.pointer_type(tl.int64)) + j
    scale = tl.load(row + SCALE).to(pointer) + j
    capacity = tl.load(row + CAPACITY)
    kind = tl.load(row + KIND).to(tl.int32)
    for i in tl.static_range(KINDS):
        # The outer condition is known at compile time, the inner one is not.
        if (PRESENT >> i) % 2 == 1:  # noqa: SIM102
            if kind == i:
                BD: tl.constexpr = 16 << (i // 2)
                HELD: tl.constexpr = TILE if i % 2 == 1 else TILE // 2
                BK: tl.constexpr = HELD // BD if HELD > BD else 1
                basis = tl.load(row + BASIS).to(pointer)
                q = tl.load(row + Q).to(pointer)
                D = tl.load(row + D_).to(tl.int32)
                if i % 2 == 1:
                    basis, q, D = tl.multiple_of(basis, 16), tl.multiple_of(q, 16), tl.multiple_of(D, 16)
                extend_space(basis + j * capacity * D, q + j * D, alpha, beta, length, scale, step, D, EPS, BK, BD)


@dataclass(frozen=True)
class Table:
    """A table on the device, and the sizes that a launch needs."""

    entries: Tensor
    filters: int
    present: int


_TABLES: Tables[Table] = Tables()
# The kinds of layers that each kernel is compiled for. None is removed when a layer is done: an unused one costs less
# than compiling again.
_PRESENT: dict[Hashable, int] = {}


def widest(device: Device) -> int:
    """Return the longest float32 vector that the kernel takes."""
    return WIDEST_B200 if device.has_tensor_memory else WIDEST


def supports(state: KrylovState) -> bool:
    """Return whether the kernel can extend these spaces: vectors that a program can hold, and contiguous tensors."""
    if state.alpha.shape != state.beta.shape:
        return False
    if state.basis.shape[2] * state.basis.itemsize > widest(describe(state.basis.device)) * torch.float32.itemsize:
        return False
    return all(tensor.is_contiguous() for tensor in _tensors(state))


def krylov_extend(states: Sequence[KrylovState], *, products: Sequence[Tensor], taken: Tensor) -> None:
    """Take a Lanczos step in spaces that the kernel supports, as `s3d_fast.maths.reference.krylov_extend` does.

    All layers have one dtype, one device, and one row stride of alpha and beta. `taken` (int64, one entry) is the
    number of steps so far; it is left as it is.
    """
    pairs = [(state, product) for state, product in zip(states, products, strict=True) if len(state.basis)]
    if not pairs:
        return
    own = [state for state, _ in pairs]
    with launch.on_device(own[0].basis):
        # Products have new addresses at every step; the vectors, which are no longer needed, have not.
        torch._foreach_copy_([state.q for state in own], [product for _, product in pairs])
        table, key = _table(own), (taken.device, own[0].basis.dtype)
        _PRESENT[key] = _PRESENT.get(key, 0) | table.present
        plan(own, table, taken, _PRESENT[key]).run()


def plan(states: Sequence[KrylovState], table: Table, taken: Tensor, present: int) -> Launch:
    """Return the launch of one step in spaces of at least one filter, by a kernel for these kinds of layers."""
    first = states[0]
    dtype = first.basis.dtype
    longest = LEAST_WIDTH << (present.bit_length() - 1) // 2
    arguments = dict(
        table=table.entries, taken=taken, layers=len(states), t_row=first.alpha.stride(0), NUMBER=DTYPES[dtype],
        EPS=torch.finfo(dtype).eps, LAYERS=padded_layers(len(states)), PRESENT=present,
        TILE=TILE_BYTES // dtype.itemsize,
    )  # fmt: skip
    warps = min(16, max(4, longest // 512))
    kinds = [i for i in range(KINDS.value) if present >> i & 1]
    widths = " ".join(f"{LEAST_WIDTH << i // 2}" + " unaligned" * (i % 2 == 0) for i in kinds)
    return Launch("krylov", extend_kernel, (table.filters,), arguments, warps, label=f"{widths}, {warps} warps")


def make_table(states: Sequence[KrylovState]) -> Table:
    """Return the table of spaces that the kernel supports."""
    rows, filters, present = [], 0, 0
    for state in states:
        M, capacity, D = state.basis.shape
        kind = _kind(state)
        rows.append([*(tensor.data_ptr() for tensor in _tensors(state)), D, capacity, kind, filters])
        filters += M
        present |= 1 << kind
    return Table(on_device(rows, states[0].basis.device), filters, present)


def _table(states: Sequence[KrylovState]) -> Table:
    identities = (
        (*(tensor.data_ptr() for tensor in _tensors(state)), state.basis.shape, state.basis.dtype) for state in states
    )
    where = states[0].basis.device
    return _TABLES.find((where, *identities), where, lambda: make_table(states))


def _tensors(state: KrylovState) -> tuple[Tensor, ...]:
    """Return the tensors of a state in the order of the table."""
    return state.basis, state.q, state.alpha, state.beta, state.length, state.scale


def _kind(state: KrylovState) -> int:
    D = state.basis.shape[2]
    is_aligned = D % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in (state.basis, state.q))
    width = launch.power_of_two(D, LEAST_WIDTH, WIDEST)
    return 2 * (width.bit_length() - LEAST_WIDTH.bit_length()) + is_aligned
