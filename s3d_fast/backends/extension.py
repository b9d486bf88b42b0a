"""The compiled extension `s3d_fast._C`, or the reason why it is missing.

Where it is missing, importing this module warns: everything works without it, but on a CPU many times slower. The
environment variable S3D_FAST_ISA chooses the instruction set, as `use_isa` does.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType

from s3d_fast.backends import registration
from s3d_fast.base import require

HOW_TO_BUILD = "build it with a C++20 compiler (GCC or Clang): pip install . in the folder of the sources"

# setup.py writes the reason here if it cannot build the extension.
_NOTE = Path(__file__).parents[1] / "_C.txt"


def _load() -> tuple[ModuleType | None, str]:
    try:
        module = importlib.import_module("s3d_fast._C")
    except ModuleNotFoundError as error:
        if error.name != "s3d_fast._C":
            raise
        reason = f": {_NOTE.read_text().strip()}" if _NOTE.exists() else ""
        return None, f"the C++ extension s3d_fast._C was not built{reason}"
    except ImportError as error:
        # Built for another Python or an older PyTorch. The rest still works.
        return None, f"the C++ extension s3d_fast._C does not load: {error}"
    return module, ""


def use_isa(name: str) -> None:
    """Compute on the CPU with the named instruction set from now on, in all threads; "auto" is the best one.

    Args:
        name: "auto", "avx512", "avx2" or "portable". `s3d-fast env` shows which ones this processor has.

    Raises:
        ValueError: this processor has no such instruction set.
        RuntimeError: the C++ extension is missing.
    """
    if module is None:
        raise RuntimeError(f"no instruction set can be used: {why_not}; {HOW_TO_BUILD}")
    require.choice("isa", name, ("auto", *module.available_isas()))
    module.use_isa(name)


def has_bfloat16_products() -> bool:
    """Return whether the instruction set in use multiplies bfloat16 numbers."""
    return module is not None and bool(module.has_bfloat16_products())


registration.register()
# Importing the module gives the operators their kernels for the CPU.
module, why_not = _load()
if module is not None and "S3D_FAST_ISA" in os.environ:
    require.choice("S3D_FAST_ISA", os.environ["S3D_FAST_ISA"], ("auto", *module.available_isas()))
    use_isa(os.environ["S3D_FAST_ISA"])
if module is None:
    warnings.warn(f"s3d_fast computes on the CPU without its kernels: {why_not}; {HOW_TO_BUILD}", stacklevel=2)
