"""Splitting operators: the shapes and products that solvers need, one file for each form; and their cost model."""

from s3d_fast.operators.chain import ChainOperator
from s3d_fast.operators.conv import ConvOperator
from s3d_fast.operators.dense import DenseOperator
from s3d_fast.operators.depthwise import DepthwiseOperator
from s3d_fast.operators.edgeconv import EdgeConvOperator
from s3d_fast.operators.free import MatrixFreeOperator
from s3d_fast.operators.gated import GatedOperator
from s3d_fast.operators.joint import JointOperator
from s3d_fast.operators.operator import Provider, SplittingOperator
from s3d_fast.operators.own_rows import OwnRowsOperator
from s3d_fast.operators.pointwise import PointwiseOperator
from s3d_fast.operators.stacked import StackedOperator, averaged
from s3d_fast.operators.sums import SumOperator
from s3d_fast.operators.tied import TiedConvOperator
from s3d_fast.operators.together import dense_all, matvec_all, moments_all

__all__ = [
    "ChainOperator",
    "ConvOperator",
    "DenseOperator",
    "DepthwiseOperator",
    "EdgeConvOperator",
    "GatedOperator",
    "JointOperator",
    "MatrixFreeOperator",
    "OwnRowsOperator",
    "PointwiseOperator",
    "Provider",
    "SplittingOperator",
    "StackedOperator",
    "SumOperator",
    "TiedConvOperator",
    "averaged",
    "dense_all",
    "matvec_all",
    "moments_all",
]
