"""Compile a launch without a GPU, and count what its code uses: registers, spilled bytes, instructions, its loops."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from s3d_fast.kernels import loops, ptx
from s3d_fast.kernels.device import Device
from s3d_fast.kernels.ptx.findings import Fault
from s3d_fast.kernels.ptx.outline import outline

if TYPE_CHECKING:
    from s3d_fast.kernels.launch import Launch


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
        Target("sm_90", "H100", GPUTarget("cuda", 90, 32), Device("nvidia", 132, 232448, True, True)),
        Target("sm_100", "B200", GPUTarget("cuda", 100, 32), Device("nvidia", 148, 232448, True, False, True)),
        Target("gfx942", "MI300X", GPUTarget("hip", "gfx942", 64), Device("amd", 304, 65536, True)),
    )
}

# Those whose PTX the simulator knows.
SIMULATED = ("sm_80", "sm_90")


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
    loop_instructions: int  # of all main loops
    loop_barriers: int  # of the main loop that has the most
    multiplies: bool  # whether it has a product
    overhead: float  # the tensor-core work of a pass of the loops over the work that the tile needs
    serialized: bool  # whether the assembler waits for every wgmma
    outline: str  # what an execution in outline finds, on targets that the simulator knows
    fingerprint: str  # of what was compiled

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class Specialized:
    """What Triton compiles for a launch: the types, constants and alignment that it sees in the arguments."""

    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]


def specialize(launch: Launch, target: Target) -> Specialized:
    """Return what Triton compiles for these arguments on the target; its own code decides."""
    assert isinstance(launch.kernel, triton.JITFunction), "TRITON_INTERPRET is set"
    backend = make_backend(target.compiler)
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, seen, _ = bind(**launch.arguments)
    names = [parameter.name for parameter in launch.kernel.params]
    signature = {name: kind for name, (kind, _) in zip(names, seen, strict=True)}
    constants: dict[tuple[int, ...], Any] = {
        (i,): bound[name] for i, name in enumerate(names) if signature[name] == "constexpr"
    }
    attributes: dict[tuple[int, ...], Any] = {
        (i,): backend.parse_attr(key)
        for i, (kind, key) in enumerate(seen)
        if kind != "constexpr" and isinstance(key, str)
    }
    return Specialized(signature, constants, {place: value for place, value in attributes.items() if value})


def fingerprint(launch: Launch, target: Target) -> str:
    """Return hexadecimal digits that stand for what was compiled.

    These are the source of the kernel with all functions it calls, the types, constants and alignment of its arguments,
    the compiler's options, the GPU and Triton's version. The key of the source, Triton's own, contains comments and the
    line where a function starts: an edit above a kernel changes the fingerprint, though not the code. Where code is
    executed in outline, a hyphen and a hash of the simulator follow. How the compiled code is read (`loops`) is not in
    it: a test compiles a sample of all kernels again.
    """
    seen = specialize(launch, target)
    arguments = [list(seen.signature.items()), sorted(seen.constants.items()), sorted(seen.attributes.items())]
    gpu = (target.compiler.backend, target.compiler.arch, target.compiler.warp_size)
    how = (launch.warps, launch.stages, *sorted(launch.options.items()))
    everything = repr((launch.kernel.cache_key, arguments, *how, gpu, triton.__version__))
    own = hashlib.sha256(everything.encode()).hexdigest()[:16]
    return f"{own}-{_simulator()}" if target.name in SIMULATED else own


@cache
def _simulator() -> str:
    """Return a hash of the simulator's source."""
    files = sorted(Path(ptx.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def identity(launch: Launch, kind: str, target: Target) -> dict[str, str]:
    """Return the fields of `Compiled` that are known without compiling; `kind` is the dtype of the rows."""
    return {
        "kernel": launch.name,
        "target": target.name,
        "dtype": kind,
        "config": launch.label,
        "fingerprint": fingerprint(launch, target),
    }


@dataclass(frozen=True)
class Assembled:
    """The code of a compiled kernel and what it takes."""

    ttgir: str
    ptx: str  # empty on AMD
    listing: str  # of the machine code
    registers: int
    shared_memory: int
    spills: int
    log: str  # of the assembler


def _built(launch: Launch, target: Target) -> Any:
    """Return what Triton compiles for a launch, or has compiled before."""
    seen = specialize(launch, target)
    ast = ASTSource(launch.kernel, seen.signature, seen.constants, seen.attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, **launch.options}
    return triton.compile(ast, target=target.compiler, options=options)


def assemble(launch: Launch, target: Target) -> Assembled:
    """Compile what a launch would run. Compiler errors are raised unchanged."""
    log = io.StringIO()
    # What the assembler says of wgmma is only in its log, which a kernel from the cache does not have.
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        kernel = _built(launch, target)
    read = _read_nvidia if target.compiler.backend == "cuda" else _read_amd
    registers, spills, listing = read(kernel.asm)
    asm, shared = kernel.asm, kernel.metadata.shared
    return Assembled(asm["ttgir"], asm.get("ptx", ""), listing, registers, shared, spills, log.getvalue())


def compile_launch(launch: Launch, kind: str, target: Target) -> Compiled:
    """Compile what a launch would run and return the resources it uses. Compiler errors are raised unchanged."""
    code = assemble(launch, target)
    if target.compiler.backend == "cuda":
        found = loops.ptx_loops(code.ptx, launch.warps)
        listed = loops.sass_loops(code.listing)
    else:
        found = listed = loops.amd_loops(code.listing, launch.warps)
    return Compiled(
        **identity(launch, kind, target),
        registers=code.registers,
        shared_memory=code.shared_memory,
        spills=code.spills,
        tensor_core=len(re.findall(loops.TENSOR_CORE, code.listing)),
        instructions=len(re.findall(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?[@A-Za-z][\w.@!]*\s.*", code.listing, re.M)),
        loop_instructions=sum(loop.instructions for loop in listed),
        loop_barriers=max((loop.barriers for loop in found), default=0),
        multiplies=bool(launch.work),
        overhead=round(loops.overhead(found, launch.work), 3),
        serialized="wgmma.mma_async instructions are serialized" in code.log,
        outline=outlined(launch, target, code.ptx, code.shared_memory),
    )


def outline_again(known: Compiled, launch: Launch, target: Target) -> Compiled:
    """Return what is known of a compiled kernel, but with what the present simulator finds."""
    kernel = _built(launch, target)
    found = outlined(launch, target, kernel.asm["ptx"], kernel.metadata.shared)
    return replace(known, outline=found, fingerprint=fingerprint(launch, target))


def outlined(launch: Launch, target: Target, code: str, shared_memory: int) -> str:
    """Return what is wrong when one program is executed in outline; nothing for targets that the simulator misses."""
    if target.name not in SIMULATED:
        return ""
    names = [name for name, kind in specialize(launch, target).signature.items() if kind != "constexpr"]
    given = [launch.arguments[name] for name in names]
    # Any addresses: nothing in shared memory depends on them.
    numbers = [0 if isinstance(argument, Tensor) else argument for argument in given]
    try:
        found = outline(code, numbers, launch.grid, shared_memory)
    except Fault as fault:
        return str(fault)
    return "; ".join(map(str, found))


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
