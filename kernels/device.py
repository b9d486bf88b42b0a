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
    generation: int  # of NVIDIA's instructions, 80 for sm_80; 0 for AMD


# Small, so that tests with few rows split them over several programs too.
INTERPRETER = Device("interpreter", 3, 1 << 30, 0)


def describe(device: torch.device) -> Device:
    """Return what is known of a device."""
    return INTERPRETER if device.type == "cpu" else _describe_gpu(device.index or 0)


@lru_cache
def _describe_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Device("amd", properties.multi_processor_count, 65536, 0)
    shared = getattr(properties, "shared_memory_per_block_optin", 101376)
    return Device("nvidia", properties.multi_processor_count, shared, 10 * properties.major + properties.minor)
