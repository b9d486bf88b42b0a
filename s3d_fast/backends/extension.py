"""The compiled extension `s3d_fast._C`, or the reason why it is missing.

Where it is missing, importing this module warns: everything works without it, but on a CPU many times slower.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType

from s3d_fast.backends import registration

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
    # Importing the module has defined its operators, torch.ops.s3d_fast.*.
    registration.register()
    return module, ""


module, why_not = _load()
if module is None:
    warnings.warn(f"s3d_fast computes on the CPU without its kernels: {why_not}; {HOW_TO_BUILD}", stacklevel=2)
