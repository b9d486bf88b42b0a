"""Would TMA and warp specialisation help? python -m benchmarks.descriptors compiles launch 1 of wide layers with both.

The kernel is `project_kernel` of `pointwise_wide` for bfloat16 rows in its plain variant, with tensor descriptors
instead of pointers. It is compiled only: the simulator does not know mbarrier and TMA. docs/loops.md says what we saw.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from s3d_fast.base.tables import text_table
from s3d_fast.kernels import configs, loops, pointwise_wide
from s3d_fast.kernels.compiled import TARGETS, assemble
from s3d_fast.kernels.launch import Launch
from s3d_fast.kernels.options import TritonOptions


@triton.jit
def project_by_descriptors(
    X,  # (N, D)
    planes,  # (2 F, D), bfloat16
    C,  # (N, F)
    U,  # (2 N, F)
    N,
    D,
    F,
    SPECIALIZED: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """U = (X V^T) * C, in two planes."""
    rows = tl.make_tensor_descriptor(X, [N, D], [D, 1], [BN, BK])
    vectors = tl.make_tensor_descriptor(planes, [2 * F, D], [D, 1], [BM, BK])
    coefficients = tl.make_tensor_descriptor(C, [N, F], [F, 1], [BN, BM])
    out = tl.make_tensor_descriptor(U, [2 * N, F], [F, 1], [BN, BM])
    blocks = tl.cdiv(F, BM)
    f, n = (tl.program_id(0) % blocks) * BM, (tl.program_id(0) // blocks) * BN
    u = tl.zeros((BN, BM), tl.float32)
    for d in tl.range(0, D, BK, warp_specialize=SPECIALIZED):
        x = rows.load([n, d])
        u = tl.dot(x, vectors.load([F + f, d]).T, u)
        u = tl.dot(x, vectors.load([f, d]).T, u)
    u *= coefficients.load([n, f]).to(tl.float32)
    high = u.to(tl.bfloat16)
    out.store([n, f], high)
    out.store([N + n, f], (u - high.to(tl.float32)).to(tl.bfloat16))


N, D, F = 65536, 512, 1024


def launches(target: str) -> dict[str, Launch]:
    """Return the kernel as it is, and by descriptors with and without warp specialisation."""

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    device, options = TARGETS[target].device, TritonOptions(scratch_bytes=1 << 40)
    pair = configs.wide(device, "bf16x2", torch.bfloat16, N)[0]
    X, C = empty(N, D), empty(N, F)
    plan = pointwise_wide.plan(X[None], C, empty(F, D, dtype=torch.float32), False, "bf16x2", device, options, pair)
    found = {"as it is": next(own for own in plan.launches if own.kernel is pointwise_wide.project_kernel)}
    tensors = dict(X=X, planes=empty(2 * F, D), C=C, U=empty(2 * N, F), N=N, D=D, F=F)
    tile = dict(BN=128, BM=128, BK=64)
    for warps, specialized in ((8, False), (8, True), (4, True)):
        name = f"descriptors, {warps} warps" + ", specialised" * specialized
        arguments = dict(**tensors, SPECIALIZED=specialized, **tile)
        found[name] = Launch("project", project_by_descriptors, (1,), arguments, warps, 3)
    return found


def main() -> None:
    """Print what the compiled loops contain."""
    lines = [["target", "kernel", "registers", "spills", "shared memory", "loop", "barriers", "products"]]
    for target in ("sm_90", "sm_100"):
        for name, launch in launches(target).items():
            try:
                # The compiler prints its whole state if a pass fails.
                with quiet():
                    code = assemble(launch, TARGETS[target])
            except RuntimeError as error:
                lines.append([target, name, f"does not compile: {error}", *[""] * 5])
                continue
            found, listed = loops.ptx_loops(code.ptx, launch.warps), loops.sass_loops(code.listing)
            counts = [sum(loop.instructions for loop in listed), max(loop.barriers for loop in found)]
            products = len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", code.ptx))
            numbers = (code.registers, code.spills, code.shared_memory, *counts, products)
            lines.append([target, name, *map(str, numbers)])
    print(text_table(lines))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what the process writes to its standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


if __name__ == "__main__":
    main()
