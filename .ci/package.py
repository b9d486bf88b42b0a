"""Build the sdist and the wheel, check what they hold, install them into empty environments, and try them.

    python .ci/package.py            # isolated builds; the wheel and the sdist each go into an environment of their own
    python .ci/package.py --quick    # builds with the torch of this environment, and compiles once

The quick form makes the wheel from the sdist, as `pip install` of the sdist does, and lets the new environment see the
packages of this one. Files are left in build/package/dist.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "package"
DIST = BUILD / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
# What smoke.py needs beyond the package: the data of the digits, and figures for the report.
EXTRAS = "[plots,digits]"


def main() -> None:
    """Build, check, install and try."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use the torch of this environment, and compile once")
    options = parser.parse_args()
    shutil.rmtree(BUILD, ignore_errors=True)
    DIST.mkdir(parents=True)
    # The first name is for what is installed, the second for what newer versions of pip install in isolated builds.
    os.environ.update({"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)})
    # A package without kernels is an error here.
    os.environ.update({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "S3D_FAST_REQUIRE_KERNELS": "1"})
    if options.quick:
        build_here()
    else:
        build_isolated()
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)
    run(sys.executable, ROOT / ".ci" / "symbols.py", wheel)
    if options.quick:
        try_in(environment("wheel", sees=sysconfig.get_path("purelib")), wheel, "--no-deps", "--ignore-installed")
    else:
        try_in(environment("wheel"), wheel)
        try_in(environment("sdist"), sdist)


def run(*command: str | Path) -> None:
    """Run a command in the folder of the package and say how long it took."""
    start = time.perf_counter()
    print("+", *command, flush=True)
    subprocess.run(command, check=True, cwd=BUILD)
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)


def build_here() -> None:
    """Build with the packages of this environment: the sdist from the sources, and the wheel from the sdist."""
    code = "import os, sys, setuptools.build_meta as b; os.chdir(sys.argv[1]); b.build_sdist(sys.argv[2])"
    with open(BUILD / "sdist.log", "w") as log:
        subprocess.run([sys.executable, "-c", code, ROOT, DIST], check=True, stdout=log, stderr=log)
    (sdist,) = DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", DIST, sdist)


def build_isolated() -> None:
    """Build as a package index's users do: build requirements come from pyproject.toml alone."""
    python = environment("build")
    run(python, "-m", "pip", "install", "-q", "build")
    run(python, "-m", "build", "--outdir", DIST, ROOT)


def environment(name: str, sees: str = "") -> Path:
    """Make an empty virtual environment and return its Python. It can import from the folder `sees`."""
    folder = BUILD / name
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    if sees:
        paths = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        )
        (Path(paths.stdout.strip()) / "other_environment.pth").write_text(f"{sees}\n")
    return python


def try_in(python: Path, package: Path, *options: str) -> None:
    """Install a package file into an environment and run the smoke test there, away from the sources."""
    run(python, "-m", "pip", "install", "-q", *options, f"{package}{EXTRAS}")
    run(python, ROOT / ".ci" / "smoke.py")


def check_sdist(sdist: Path) -> None:
    """The sdist holds every file that git tracks, and beyond them only what setuptools writes."""
    with tarfile.open(sdist) as archive:
        held = {str(PurePosixPath(*PurePosixPath(m.name).parts[1:])) for m in archive.getmembers() if m.isfile()}
    written = {name for name in held if name in {"PKG-INFO", "setup.cfg"} or name.startswith("s3d_fast.egg-info/")}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    demand_same("sdist", held - written, tracked, "add it to MANIFEST.in")
    print(f"{sdist.name}: {len(held)} files, {sdist.stat().st_size / 1024:.0f} KiB")


def check_wheel(wheel: Path) -> None:
    """The wheel holds every module, py.typed and the extension, and nothing else; its description has no dead link."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (described,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        description = archive.read(described).decode()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "s3d_fast").rglob("*.py")}
    kernels = {f"s3d_fast/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    wanted = modules | kernels | {"s3d_fast/py.typed", f"s3d_fast/_C{suffix}"}
    demand_same("wheel", held, wanted, "see [tool.setuptools] of pyproject.toml and the output of the compiler")
    dead = [target for target in re.findall(r"\]\(([^()\s]+)\)", description) if is_source(target)]
    dead += [target for target in re.findall(r'(?:href|src|srcset)="([^"]+)"', description) if is_source(target)]
    if dead:
        sys.exit(f"the description of the wheel has relative links: {', '.join(dead)}; see docs/long_description.py")
    print(f"{wheel.name}: {len(held)} files, {wheel.stat().st_size / 1024:.0f} KiB")


def is_source(target: str) -> bool:
    """Return whether a link points to a file of the sources."""
    path = target.split("#")[0]
    return bool(path) and "://" not in path and (ROOT / path).exists()


def demand_same(what: str, held: set[str], wanted: set[str], remedy: str) -> None:
    """End the program unless the files are those that are wanted."""
    missing, more = sorted(wanted - held), sorted(held - wanted)
    if missing or more:
        sys.exit(f"{what}: lacks {', '.join(missing) or 'nothing'}; has beyond what it should: {more}; {remedy}")


if __name__ == "__main__":
    main()
