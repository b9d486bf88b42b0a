"""Launches in the simulator: our own code runs unchanged on CPU tensors, its kernels compiled for a GPU.

    with simulated("sm_90") as report:
        SV = TRITON.splitting_matvec(X=X, C=C, V=V, bias=False)
    report.require_clean()

Kernels are compiled to PTX as for a launch on that GPU, with Triton's own specialisation of arguments. No assembler and
no GPU is needed. TRITON_INTERPRET must not be set when Triton is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton import knobs
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_source
from triton.runtime.jit import JITFunction, create_function_from_signature

from s3d_fast.kernels import device
from s3d_fast.kernels.compiled import SIMULATED, TARGETS, Target
from s3d_fast.kernels.ptx.execute import Launch, execute
from s3d_fast.kernels.ptx.findings import Finding

# Few, so that programs have several tiles even in small tests.
PROCESSORS = 2


@dataclass
class Report:
    """All launches of a simulation."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """What is wrong in any launch: races, uninitialised memory, conflicting writes."""
        return [finding for finding in self._everything() if not finding.is_ambiguous]

    @property
    def ambiguities(self) -> list[Finding]:
        """Where the last bits of a result are not determined, see `Finding.is_ambiguous`."""
        return [finding for finding in self._everything() if finding.is_ambiguous]

    def _everything(self) -> Iterator[Finding]:
        return (finding for launch in self.launches for finding in launch.findings)

    @property
    def instructions(self) -> Counter[str]:
        """Instructions executed by warps, by class, over all launches."""
        return sum((Counter(launch.instructions) for launch in self.launches), Counter())

    def require_clean(self) -> None:
        """Raise an AssertionError that lists the findings, if there are any."""
        if self.findings:
            raise AssertionError("\n".join(map(str, self.findings)))


Argument = Tensor | int | float


@contextmanager
def simulated(
    target: str,
    *,
    processors: int = PROCESSORS,
    reachable: Sequence[Tensor] = (),
    edit: Callable[[str, str], str] | None = None,
    instead: Callable[[str, Sequence[Argument]], bool] | None = None,
    after: Callable[[Sequence[Argument]], None] | None = None,
) -> Iterator[Report]:
    """Let launches of Triton kernels on CPU tensors run in the simulator, and yield the report that they add to.

    Args:
        target: "sm_80" or "sm_90".
        processors: how many the GPU has, which determines the number of programs.
        reachable: tensors that kernels know by address only, as those of the grouped product.
        edit: a function of a kernel's name and PTX that returns the PTX to execute instead.
        instead: a function of a launch's PTX and arguments that may do its work, and then returns True.
        after: a function of the arguments of a launch that was simulated.

    Raises:
        ValueError: the simulator does not know the target.
        RuntimeError: Triton's kernels are interpreted.
    """
    if target not in SIMULATED:
        raise ValueError(f"target must be 'sm_80' or 'sm_90', got {target!r}")
    gpu = TARGETS[target]
    if device.INTERPRETED:
        raise RuntimeError("Triton's kernels are interpreted: unset TRITON_INTERPRET before Python starts")
    report = Report()

    def run(function: JITFunction, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        kernel = _specialized(function, gpu, arguments, options)
        sizes = grid(kernel.bound) if callable(grid) else grid
        if instead is not None and instead(kernel.ptx, kernel.arguments):
            return
        ptx = kernel.ptx if edit is None else edit(function.__name__, kernel.ptx)
        report.launches.append(execute(ptx, kernel.arguments, sizes, kernel.shared_memory, reachable))
        if after is not None:
            after(kernel.arguments)

    before = JITFunction.run, device.INTERPRETER
    JITFunction.run, device.INTERPRETER = run, replace(gpu.device, processors=processors)
    try:
        yield report
    finally:
        JITFunction.run, device.INTERPRETER = before


@dataclass(frozen=True)
class Specialized:
    """A kernel compiled for the arguments of a launch."""

    ptx: str
    shared_memory: int
    bound: dict[str, Any]
    arguments: list[Argument]  # without constants


_COMPILED: dict[tuple[JITFunction, str, str], tuple[str, int]] = {}


def _specialized(function: JITFunction, gpu: Target, arguments: Any, options: dict[str, Any]) -> Specialized:
    backend = make_backend(gpu.compiler)
    options = {"debug": False, "instrumentation_mode": "", **options}
    bound, specialization, given = _binder(function, gpu.name)(*arguments, **options)
    key = (function, gpu.name, repr((specialization, given)))
    parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, given)
    if key not in _COMPILED:
        source = ASTSource(function, signature, constants, attributes)
        _COMPILED[key] = compile_to_ptx(source, gpu, parsed.__dict__)
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    return Specialized(*_COMPILED[key], bound, [bound[name] for name in names])


@lru_cache
def _binder(function: JITFunction, target: str) -> Callable[..., Any]:
    return create_function_from_signature(function.signature, function.params, make_backend(TARGETS[target].compiler))


def compile_to_ptx(source: ASTSource, gpu: Target, options: dict[str, Any]) -> tuple[str, int]:
    """Return the PTX of a kernel and its bytes of shared memory. The assembler, which takes longest, is left out."""

    def leave_out_assembler(*stage: Any) -> tuple[str, str] | None:
        # Triton asks for the key of the changed pipeline first, then hands over its stages.
        if not stage:
            return "ptx only", "ptx only"
        stage[1]["cubin"] = lambda module, metadata: b""
        return None

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = leave_out_assembler
    try:
        kernel = compile_source(source, target=gpu.compiler, options=options)
    finally:
        knobs.runtime.add_stages_inspection_hook = before
    return kernel.asm["ptx"], kernel.metadata.shared
