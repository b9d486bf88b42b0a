"""Show that an installed s3d_fast works: run this in an environment that has it, outside of the sources.

The C++ kernels agree with plain PyTorch, the types are published, and `s3d-fast grow digits` runs to its report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

import s3d_fast as s3d
from s3d_fast.backends import extension

SMALLEST = {
    "--steps": 1,
    "--epochs": 1,
    "--train-samples": 256,
    "--test-samples": 64,
    "--split-samples": 64,
    "--split-batch": 64,
}


def check_installation() -> None:
    """The package comes from this environment, says its version, and has types."""
    packages = Path(sysconfig.get_path("platlib")).resolve()
    found = Path(s3d.__file__).resolve()
    assert packages in found.parents, f"s3d_fast is {found}, not the one installed in {packages}"
    assert importlib.metadata.version("s3d_fast") == s3d.__version__
    assert importlib.resources.files("s3d_fast").joinpath("py.typed").is_file(), "py.typed is missing"


def check_kernels() -> None:
    """The C++ backend works, with every instruction set of this processor."""
    assert extension.module is not None, extension.why_not
    X, C, V = torch.randn(1000, 33), torch.randn(1000, 5), torch.randn(5, 33)
    wanted = ((X @ V.T) * C).T @ X
    best = extension.module.isa()
    for isa in extension.module.available_isas():
        extension.module.use_isa(isa)
        torch.testing.assert_close(s3d.splitting_matvec(X, C, V, backend="cpu"), wanted, rtol=1e-4, atol=1e-3)
    extension.module.use_isa(best)
    spectrum = s3d.extremal_eigenpairs((X, C), backend="cpu")
    assert bool(spectrum.converged.all())
    print(f"kernels: {', '.join(extension.module.available_isas())}, compiled by {extension.module.compiler}")


def check_command_line() -> None:
    """A network grows from the command line, and its report is written."""
    command = Path(sysconfig.get_path("scripts")) / "s3d-fast"
    version = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
    assert s3d.__version__ in version, version
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [str(word) for setting in SMALLEST.items() for word in setting]
        subprocess.run([command, "grow", "digits", "--quiet", "--out", run, *settings], check=True)
        report = (run / "report.html").read_text(encoding="utf-8")
        assert "</html>" in report
        phases = (run / "history.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(phases) == 2
        print(f"grow: {len(phases)} phases, a report of {len(report)} characters")


if __name__ == "__main__":
    check_installation()
    check_kernels()
    check_command_line()
    print(f"s3d_fast {s3d.__version__} works: Python {sys.version.split()[0]}, torch {torch.__version__}")
