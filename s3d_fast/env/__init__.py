"""Which backends are available, and why the others are not: s3d-fast env."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from s3d_fast.backends import choice, extension
from s3d_fast.base.tables import text_table
from s3d_fast.base.version import VERSION


def report() -> dict[str, str]:
    """Return descriptions of versions, processor, extension and backends, by name."""
    lines = {
        "s3d_fast": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "CUDA": torch.cuda.get_device_name() if torch.cuda.is_available() else "no device",
    }
    if extension.module is None:
        lines["extension"] = f"not available: {extension.why_not}; {extension.HOW_TO_BUILD}"
    else:
        compiled, available = extension.module.compiled_isas(), extension.module.available_isas()
        states = {name: "" if name in available else " (not on this processor)" for name in compiled}
        states[extension.module.isa()] = " (in use)"
        lines["extension"] = (
            f"compiled by {extension.module.compiler} with torch {extension.module.torch}, for torch >= 2.10"
        )
        lines["instruction sets"] = ", ".join(name + state for name, state in states.items())
        lines["bfloat16 products"] = "available" if extension.module.has_bfloat16_products() else "not available"
    lines.update({f"backend {backend}": _backend(backend) for backend in choice.NAMES[1:]})
    return lines


def table() -> str:
    """Return the report as a table."""
    return text_table([["what", "state"], *map(list, report().items())])


def _backend(backend: str) -> str:
    try:
        choice.choose(backend)
    except RuntimeError as error:
        return str(error)
    return "available"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
