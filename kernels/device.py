"""The properties of a device that the kernels depend on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

# Triton's decorators read this once, at import: every kernel is then either compiled or interpreted.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Device:
    """A GPU, or the interpreter's stand-in for one."""

    vendor: str  # "nvidia", "amd" or "interpreter"
    processors: int
    shared_memory: int  # bytes available to one program
    has_bf16: bool  # whether its tensor cores multiply bfloat16 numbers faster than others do float32 ones
    has_wgmma: bool = False  # whether four warps multiply together, from shared memory (H100)
    has_tensor_memory: bool = False  # whether tensor cores sum in a memory of their own (B200)

    @property
    def family(self) -> str:
        """The name of the GPU's tables of configurations."""
        if self.has_tensor_memory:
            return "blackwell"
        return "hopper" if self.has_wgmma else self.vendor


# Only 3 processors, so that even small tests divide their rows between several programs.
INTERPRETER = Device("interpreter", 3, 1 << 30, True)


def describe(device: torch.device) -> Device:
    """Return the properties of a device; kernels on the CPU run in the interpreter."""
    return INTERPRETER if device.type == "cpu" else _describe_gpu(device.index or 0)


@lru_cache
def _describe_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        is_cdna3 = properties.gcnArchName.startswith("gfx942")
        return Device("amd", properties.multi_processor_count, 65536, is_cdna3)
    shared = getattr(properties, "shared_memory_per_block_optin", 101376)
    major = properties.major
    return Device("nvidia", properties.multi_processor_count, shared, major >= 8, major == 9, major == 10)
