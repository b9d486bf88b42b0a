"""The CPU backend: the kernels of the C++ extension."""

from __future__ import annotations

import torch

from s3d_fast.backends import cpu_options
from s3d_fast.backends.dispatched import DispatchedBackend


class CpuBackend(DispatchedBackend):
    """C++ with AVX-512, AVX2 or portable loops, chosen at run time."""

    name = "cpu"
    uses_symmetry = True

    def rounds(self) -> bool:
        # The compiler cannot trace how options are kept.
        return not torch.compiler.is_compiling() and cpu_options.current().precision == "medium"


CPU = CpuBackend()
