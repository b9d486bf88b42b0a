"""Extreme eigenpairs of splitting matrices: the call, the solvers, and their result."""

from s3d_fast.solvers.auto import Auto
from s3d_fast.solvers.eigenpairs import SOLVERS, extremal_eigenpairs
from s3d_fast.solvers.exact import Exact
from s3d_fast.solvers.lanczos import Lanczos
from s3d_fast.solvers.rayleigh import Rayleigh
from s3d_fast.solvers.solver import Solver
from s3d_fast.solvers.spectrum import Spectrum

__all__ = ["SOLVERS", "Auto", "Exact", "Lanczos", "Rayleigh", "Solver", "Spectrum", "extremal_eigenpairs"]
