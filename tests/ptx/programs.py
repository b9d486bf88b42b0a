"""Small PTX programs, written by hand: one warp or a few, with tensors as arguments."""

from __future__ import annotations

import torch
from torch import Tensor

HEADER = """
.version 8.8
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
    .reg .pred %p<16>;
    .reg .b16 %rs<32>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<64>;
{addresses}
    mov.u32 %r0, %tid.x;
{body}
    ret;
}}
"""


def program(body: str, tensors: int = 0, threads: int = 32) -> str:
    """Return a kernel: thread i of it has i in %r0, and the address of entry i, of 4 bytes, of tensor j in %rd<j>."""
    parameters = ", ".join(f".param .u64 kernel_param_{j}" for j in range(tensors))
    lines = []
    for j in range(tensors):
        lines += [f"    ld.param.b64 %rd{40 + j}, [kernel_param_{j}];", "    mov.u32 %r60, %tid.x;"]
        lines += [f"    mul.wide.u32 %rd50, %r60, 4;  add.s64 %rd{j}, %rd{40 + j}, %rd50;"]
    return HEADER.format(parameters=parameters, threads=threads, addresses="\n".join(lines), body=body)


def integers(count: int = 32, seed: int = 0) -> Tensor:
    """Return random 32-bit integers of every magnitude."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    return (wide >> torch.randint(0, 31, (count,), generator=generator)).to(torch.int32)


def floats(count: int = 32, seed: int = 0) -> Tensor:
    """Return random float32 numbers."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))
