"""The compiled extension `s3d_fast._C`, or the reason why it is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

HOW_TO_BUILD = (
    "build it with a C++ compiler, torch, pybind11 and ninja installed: pip install --no-build-isolation . in the "
    "folder of the sources"
)


def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("s3d_fast._C"), ""
    except ModuleNotFoundError as error:
        if error.name != "s3d_fast._C":
            raise
        return None, "the C++ extension s3d_fast._C was not built"
    except ImportError as error:
        # Built for another version of torch or Python: report it when the extension is requested. The rest still works.
        return None, f"the C++ extension s3d_fast._C does not load: {error}"


# Importing the module registers its operators as torch.ops.s3d_fast.*.
module, why_not = _load()
