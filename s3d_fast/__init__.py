"""Signed splitting steepest descent: grow PyTorch networks by splitting neurons, fast."""

from s3d_fast.activations import Activation, Gaussian, activation, activation_names
from s3d_fast.operators import (
    ConvOperator,
    EdgeConvOperator,
    PointwiseOperator,
    SplittingOperator,
    SumOperator,
)
from s3d_fast.ops import (
    conv_matvec,
    curvature_coefficients,
    edgeconv_matvec,
    splitting_matrices,
    splitting_matvec,
)
from s3d_fast.schemes import Split, optimal_split, split_gain
from s3d_fast.solvers import Spectrum, extremal_eigenpairs

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ConvOperator",
    "EdgeConvOperator",
    "Gaussian",
    "PointwiseOperator",
    "Spectrum",
    "Split",
    "SplittingOperator",
    "SumOperator",
    "activation",
    "activation_names",
    "conv_matvec",
    "curvature_coefficients",
    "edgeconv_matvec",
    "extremal_eigenpairs",
    "optimal_split",
    "split_gain",
    "splitting_matrices",
    "splitting_matvec",
]
