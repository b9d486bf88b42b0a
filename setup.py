"""Builds the C++ extension s3d_fast._C from csrc/; everything else is declared in pyproject.toml.

The extension uses PyTorch's stable ABI: one build loads into every PyTorch from 2.10 on. Where it cannot be built, the
package is installed without it, with the reason in s3d_fast/_C.txt: s3d_fast/backends/extension.py reads it. With
S3D_FAST_REQUIRE_KERNELS=1 in the environment, a failure ends the build instead.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NAME = "s3d_fast._C"
SOURCES = sorted(str(path) for path in Path("csrc").glob("**/*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").glob("**/*.h"))

try:
    import pybind11
    from torch.utils import cpp_extension

    MISSING, BuildExtension = "", cpp_extension.BuildExtension
except ImportError as error:
    MISSING, BuildExtension = f"it needs torch and pybind11, and one cannot be imported: {error}", build_ext


class BuildKernels(BuildExtension):  # type: ignore[misc]
    """Build the extension, or write down why that failed."""

    def run(self) -> None:
        note = Path(self.get_ext_fullpath(NAME)).with_name("_C.txt")
        note.unlink(missing_ok=True)
        try:
            if MISSING:
                raise RuntimeError(MISSING)
            super().run()
        except Exception as error:
            if os.environ.get("S3D_FAST_REQUIRE_KERNELS"):
                raise
            print(f"s3d_fast: the C++ extension cannot be built: {error}", file=sys.stderr)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{str(error).strip() or type(error).__name__}\n")


def extension() -> Extension:
    """Return the extension: its sources, flags and the one library of PyTorch that it links to."""
    if MISSING:
        return Extension(NAME, SOURCES)
    # Only what PyTorch 2.10 has. -g0: Python's own flags ask for debug information, which would be most of the file.
    flags = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-O3", "-g0", "-std=c++20", "-fvisibility=hidden"]
    flags += ["-ffp-contract=fast", "-Wall", "-Wno-psabi"]
    if os.environ.get("S3D_FAST_SANITIZE"):
        # For `make asan`.
        flags += ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    return Extension(
        NAME,
        SOURCES,
        depends=HEADERS,
        include_dirs=[str(Path("csrc").resolve()), pybind11.get_include(), *cpp_extension.include_paths()],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch_cpu"],
        extra_compile_args=flags,
        extra_link_args=[flag for flag in flags if flag.startswith("-fsanitize")],
        language="c++",
    )


# Metadata that pyproject.toml cannot hold: links that depend on where the repository is.
metadata = runpy.run_path("docs/long_description.py")["metadata"]()

setup(ext_modules=[extension()], cmdclass={"build_ext": BuildKernels}, **metadata)
