"""Check that the extension of a wheel runs with every torch: python .ci/symbols.py WHEEL...

PyTorch keeps its stable ABI, which is a set of C functions; its C++ symbols differ between versions. So the only C++
symbols that the extension may take from elsewhere are those of the C++ runtime.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Mangled names of std::, of its abbreviations (strings, streams), of operator new and delete, of __cxxabiv1, and of the
# types that the language has built in.
RUNTIME = re.compile(r"_Z(N[KVrRO]*S[tabsiod]|S[tabsiod]|T[ISTV](N?K?S[tabsiod]|P?K?[a-z]$|N10__cxxabiv1)|n[wa]|d[la])")


def main(wheels: list[str]) -> None:
    """Check every wheel and end with an error if one needs a C++ symbol of another library."""
    for wheel in map(Path, wheels):
        needed = undefined_symbols(wheel)
        foreign = sorted(name for name in needed if name.startswith("_Z") and not RUNTIME.match(name))
        if foreign:
            sys.exit(f"{wheel.name}: the extension needs C++ symbols of other libraries: {' '.join(foreign)}")
        torch = sorted(name for name in needed if re.match(r"_?(aoti_)?torch_", name))
        print(f"{wheel.name}: the extension needs {len(torch)} C functions of torch, and no C++ symbol of it")


def undefined_symbols(wheel: Path) -> set[str]:
    """Return the names that the extension takes from other libraries."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        extensions = [name for name in archive.namelist() if re.fullmatch(r"s3d_fast/_C\b.*\.so", name)]
        if len(extensions) != 1:
            sys.exit(f"{wheel.name}: one extension s3d_fast/_C*.so is wanted, got {extensions or 'none'}")
        path = archive.extract(extensions[0], folder)
        # On macOS every name has one more underscore in front.
        options = ["-D", "--undefined-only", "--no-demangle"] if sys.platform == "linux" else ["-u"]
        listed = subprocess.run(["nm", *options, path], check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1].split("@")[0] for line in listed.splitlines() if line.strip()]
    return {name.removeprefix("_") if sys.platform == "darwin" else name for name in names}


if __name__ == "__main__":
    main(sys.argv[1:])
