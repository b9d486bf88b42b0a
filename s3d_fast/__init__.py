"""Signed splitting steepest descent: grow PyTorch networks by splitting neurons, fast."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from s3d_fast.base.version import VERSION

if TYPE_CHECKING:
    from s3d_fast.api import *  # noqa: F403 - for type checkers; `api` says which names

__version__ = VERSION


class _Package(ModuleType):
    """This package: its public names are those of `api`.

    They are imported with the package, except by the command line: `s3d-fast --help` needs none of them, and importing
    torch takes seconds. There, `api` is imported when a name is asked for.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 's3d_fast' has no attribute {name!r}")
        api = importlib.import_module("s3d_fast.api")
        # Rooms that import others by this package ask for names while `api` is still being imported.
        public = vars(api).get("__all__", ())
        if name != "__all__" and name not in public:
            raise AttributeError(f"module 's3d_fast' has no attribute {name!r}")
        return public if name == "__all__" else vars(api)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        # The import of the room `capture` would hide the function of this name.
        if not (name == "capture" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


class _Schedules(ModuleType):
    """The module of schedules, which lives in `growth`: `from s3d_fast.schedules import cosine` finds it as well."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("s3d_fast.growth.schedules"), name)


sys.modules[__name__].__class__ = _Package
sys.modules[f"{__name__}.schedules"] = _Schedules(f"{__name__}.schedules")
# `python -m s3d_fast` is "-m" while the package is being found.
if sys.argv[:1] != ["-m"] and Path(*sys.argv[:1]).stem != "s3d-fast":
    importlib.import_module("s3d_fast.api")
