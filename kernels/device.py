"""What the kernels need to know about the device they run on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

# Fixed when Triton's decorators run: from then on functions are either compiled or interpreted.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Device:
    """A GPU, or the interpreter's stand-in for one."""

    vendor: str  # "nvidia", "amd" or "interpreter"
    processors: int
    shared_memory: int  # bytes that one program can have
    has_tf32: bool  # whether its tensor cores take TF32


# Small, so that tests with few rows split them over several programs too.
INTERPRETER = Device("interpreter", 3, 1 << 30, True)


def describe(device: torch.device) -> Device:
    """Return what is known of a device."""
    return INTERPRETER if device.type == "cpu" else _describe_gpu(device.index or 0)


@lru_cache
def _describe_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        is_cdna3 = properties.gcnArchName.startswith("gfx942")
        return Device("amd", properties.multi_processor_count, 65536, is_cdna3)
    shared = getattr(properties, "shared_memory_per_block_optin", 101376)
    return Device("nvidia", properties.multi_processor_count, shared, properties.major >= 8)
