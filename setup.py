"""Builds the C++ extension s3d_fast._C from csrc/; everything else is declared in pyproject.toml."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

SOURCES = sorted(str(path) for path in Path("csrc").glob("**/*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").glob("**/*.h"))


def extension() -> dict[str, Any]:
    """Return the setup() arguments that compile csrc/, or none where there is nothing to compile with."""
    if sys.platform != "linux":
        print(f"s3d_fast: building without the C++ extension, which is for Linux; this is {sys.platform}.")
        return {}
    try:
        import pybind11
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        print(
            f"s3d_fast: building without the C++ extension ({error}). To build it, install torch, pybind11 and "
            "ninja, then: pip install --no-build-isolation ."
        )
        return {}
    # -g0: Python's own flags ask for debug information, which would be most of the file.
    flags = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-ffp-contract=fast", "-Wall", "-Wno-psabi"]
    if os.environ.get("S3D_FAST_SANITIZE"):
        # For `make asan`.
        flags += ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    module = CppExtension(
        "s3d_fast._C",
        SOURCES,
        depends=HEADERS,
        include_dirs=[str(Path("csrc").resolve()), pybind11.get_include()],
        extra_compile_args=flags,
        extra_link_args=["-fopenmp", *[flag for flag in flags if flag.startswith("-fsanitize")]],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExtension}}


# Metadata that pyproject.toml cannot hold: links that depend on where the repository is.
metadata = runpy.run_path("docs/long_description.py")["metadata"]()

setup(**extension(), **metadata)
