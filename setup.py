"""Builds the C++ extension s3d_fast._C from csrc/, and makes the links of the readme absolute.

Everything else is declared in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

# The address of the repository, such as https://host/owner/name. This is the only place that says it; the addresses of
# the project and the links of its readme on the package index follow from it. Empty: there is none yet.
REPOSITORY = ""
PAPER = "https://arxiv.org/abs/2003.10392"

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


def addresses(repository: str) -> dict[str, str]:
    """Return the addresses that a package index shows beside the readme."""
    found = {"Paper": PAPER}
    if repository:
        found |= {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        }
    return found


def absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown whose links to files of the repository work anywhere.

    Links and pictures point to the files of this version. Without an address of the repository, links become their
    text and pictures are left out. Only a target that is a file or a folder here counts as one: code stays as it is.
    """

    def is_file(target: str) -> bool:
        path = target.split("#")[0]
        return bool(path) and "://" not in path and Path(path).exists()

    def address(target: str, kind: str) -> str:
        return f"{repository}/{kind}/v{version}/{target}"

    def markdown(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if not is_file(target):
            return match[0]
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({address(target, 'raw' if picture else 'blob')})"

    def html(match: re.Match[str]) -> str:
        name, target = match.groups()
        if not is_file(target):
            return match[0]
        return f'{name}="{address(target, "blob" if name == "href" else "raw")}"'

    if not repository:
        text = re.sub(r"<picture>.*?</picture>\n*", "", text, flags=re.DOTALL)
        text = re.sub(r'<img\b[^>]*\bsrc="(?!\w+://)[^>]*>\n*', "", text)
        text = re.sub(r'<a\b[^>]*\bhref="(?!\w+://|#)[^>]*>(.*?)</a>', r"\1", text, flags=re.DOTALL)
    text = re.sub(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)", markdown, text)
    return re.sub(r'\b(href|src|srcset)="([^"\s]+)"', html, text)


def metadata() -> dict[str, Any]:
    """Return the setup() arguments that depend on the address of the repository."""
    version = runpy.run_path("s3d_fast/base/version.py")["VERSION"]
    return {
        "long_description": absolute_links(Path("README.md").read_text(encoding="utf-8"), REPOSITORY, version),
        "long_description_content_type": "text/markdown",
        "project_urls": addresses(REPOSITORY),
    }


# A build runs this file as a script; the tests import it.
if __name__ == "__main__":
    setup(**extension(), **metadata())
