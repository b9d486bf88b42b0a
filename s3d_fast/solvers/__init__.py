"""Extreme eigenpairs of splitting matrices: the call, the solvers, and their result."""

from s3d_fast.solvers.auto import Auto
from s3d_fast.solvers.cut import Cut
from s3d_fast.solvers.eigenpairs import SOLVERS, extremal_eigenpairs
from s3d_fast.solvers.exact import Exact
from s3d_fast.solvers.lanczos import Lanczos
from s3d_fast.solvers.rayleigh import Rayleigh
from s3d_fast.solvers.solver import Solver
from s3d_fast.solvers.spectrum import Spectrum, Status

__all__ = [
    "SOLVERS",
    "Auto",
    "Cut",
    "Exact",
    "Lanczos",
    "Rayleigh",
    "Solver",
    "Spectrum",
    "Status",
    "extremal_eigenpairs",
]
