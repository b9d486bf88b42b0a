"""Compile a kernel without a GPU, and count its registers, spilled bytes and instructions."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from s3d_fast.kernels.device import Device


@dataclass(frozen=True)
class Target:
    """A GPU to compile for; `device` describes the model."""

    name: str
    model: str
    compiler: GPUTarget
    device: Device


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "A100", GPUTarget("cuda", 80, 32), Device("nvidia", 108, 166912, True)),
        Target("sm_90", "H100", GPUTarget("cuda", 90, 32), Device("nvidia", 132, 232448, True)),
        Target("gfx942", "MI300X", GPUTarget("hip", "gfx942", 64), Device("amd", 304, 65536, True)),
    )
}

# The names of tensor-core instructions in the three instruction sets.
TENSOR_CORE = {"sm_80": r"\bHMMA", "sm_90": r"\bH(?:G)?MMA", "gfx942": r"\bv_mfma"}


@dataclass(frozen=True)
class Compiled:
    """The resources that one compiled kernel uses, in one configuration."""

    kernel: str
    target: str
    dtype: str  # of the rows, followed by the precision unless that is "highest"
    config: str
    registers: int  # per thread
    shared_memory: int  # bytes
    spills: int  # bytes of local memory per thread, including the stack
    tensor_core: int  # instructions
    instructions: int
    fingerprint: str  # of what was compiled

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class KernelSource:
    """A kernel and everything its compilation depends on."""

    name: str
    function: triton.JITFunction
    dtype: str
    config: str
    types: Mapping[str, str]  # of arguments that are not i32
    constants: Mapping[str, Any]
    aligned: Sequence[str]  # arguments that are multiples of 16
    warps: int
    stages: int
    on_tensor_cores: bool


def fingerprint(source: KernelSource, target: Target) -> str:
    """Return 16 hexadecimal digits that stand for everything the compiled code depends on.

    These are the source of the kernel with all functions it calls, the types, constants and alignment of its arguments,
    the compiler's options, the GPU, and Triton's version. Triton's own key of the source contains comments and the line
    where a function starts: an edit above a kernel changes the fingerprint, though not the code.
    """
    assert isinstance(source.function, triton.JITFunction), "TRITON_INTERPRET is set"
    arguments = [sorted(part.items()) for part in (*_arguments(source).values(), _options(source))]
    gpu = (target.compiler.backend, target.compiler.arch, target.compiler.warp_size)
    everything = repr((source.function.cache_key, arguments, gpu, triton.__version__))
    return hashlib.sha256(everything.encode()).hexdigest()[:16]


def identity(source: KernelSource, target: Target) -> dict[str, str]:
    """Return the fields of `Compiled` that are known without compiling."""
    return {
        "kernel": source.name,
        "target": target.name,
        "dtype": source.dtype,
        "config": source.config,
        "fingerprint": fingerprint(source, target),
    }


def compile_source(source: KernelSource, target: Target) -> Compiled:
    """Compile a kernel and return the resources it uses. Compiler errors are raised unchanged."""
    ast = ASTSource(source.function, **_arguments(source))
    kernel = triton.compile(ast, target=target.compiler, options=_options(source))
    read = _read_nvidia if target.compiler.backend == "cuda" else _read_amd
    registers, spills, listing = read(kernel.asm)
    return Compiled(
        **identity(source, target),
        registers=registers,
        shared_memory=kernel.metadata.shared,
        spills=spills,
        tensor_core=len(re.findall(TENSOR_CORE[target.name], listing)),
        instructions=len(re.findall(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?[@A-Za-z][\w.@!]*\s.*", listing, re.M)),
    )


def _arguments(source: KernelSource) -> dict[str, dict[Any, Any]]:
    names = source.function.arg_names
    return {
        "signature": {
            name: "constexpr" if name in source.constants else source.types.get(name, "i32") for name in names
        },
        "constexprs": {(names.index(name),): value for name, value in source.constants.items()},
        "attrs": {(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned},
    }


def _options(source: KernelSource) -> dict[str, int]:
    return {"num_warps": source.warps, "num_stages": source.stages}


def _read_nvidia(asm: Mapping[str, Any]) -> tuple[int, int, str]:
    tools = Path(triton.backends.__file__).parent / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        listing = _output(tools / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = (int(number) for number in found.groups())
    # Any load from or store to local memory is a spill, even if the summary shows none.
    spills = max(stack + local, 4 * len(re.findall(r"\b(?:LDL|STL)\b", listing)))
    return registers, spills, listing


def _read_amd(asm: Mapping[str, Any]) -> tuple[int, int, str]:
    listing = asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", listing)
        assert found is not None, name
        return int(found[1])

    spills = max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count"))
    return number("vgpr_count"), spills, listing


def _output(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
