"""The public names of the core; `s3d_fast` has them all, and imports this file when one is asked for."""

from s3d_fast.backends.cpu_options import CpuOptions, cpu_options
from s3d_fast.backends.extension import use_isa
from s3d_fast.backends.operations import (
    add_splitting_matrices,
    conv_matvec,
    curvature_coefficients,
    edgeconv_matvec,
    splitting_matrices,
    splitting_matvec,
    splitting_matvec_grouped,
)
from s3d_fast.capture.all_batches import Captured, capture, plan_capture
from s3d_fast.capture.budget import CapturePlan
from s3d_fast.capture.layers import capture_layers
from s3d_fast.growth import schedules
from s3d_fast.growth.checkpoint import growable, layer_arguments, load_grown, resize_like, save_grown
from s3d_fast.growth.grow_step import GrowthStep, grow_step
from s3d_fast.growth.grower import Grower
from s3d_fast.growth.plateau import Plateau
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.kernels.options import TritonOptions, triton_options
from s3d_fast.maths.activations import Activation, Gaussian, activation, activation_names
from s3d_fast.maths.incoming import Incoming, incoming_edges
from s3d_fast.maths.schemes import Split, optimal_split, split_gain
from s3d_fast.network.costs import Cost, count, marginal
from s3d_fast.network.graph import Graph, Unit
from s3d_fast.network.registered import register_layer
from s3d_fast.network.rules import Rule, register_operation
from s3d_fast.network.sharding import unsharded
from s3d_fast.network.tracing import trace
from s3d_fast.network.wrapping import rewrap
from s3d_fast.operators import (
    ConvOperator,
    DenseOperator,
    EdgeConvOperator,
    MatrixFreeOperator,
    PointwiseOperator,
    SplittingOperator,
    SumOperator,
)
from s3d_fast.records.record import Phase
from s3d_fast.solvers import Cut, Spectrum, Status, extremal_eigenpairs
from s3d_fast.splitting.forward_cost import ForwardCost, forward_cost
from s3d_fast.splitting.new_filters import propose_filters
from s3d_fast.splitting.optimizers import register_optimizer
from s3d_fast.splitting.plan import NeuronSplit, NewFilter, Removal, SplitPlan
from s3d_fast.splitting.proposals import Proposals
from s3d_fast.splitting.pruning import (
    filter_norms,
    norm_scales,
    prune,
    removal_losses,
    scale_penalty,
    select_removals,
)
from s3d_fast.splitting.selection import select
from s3d_fast.splitting.surgery import apply_splits, mask

__all__ = [
    "Activation",
    "CapturePlan",
    "Captured",
    "ConvOperator",
    "Cost",
    "CpuOptions",
    "Cut",
    "DenseOperator",
    "EdgeConvOperator",
    "EpochTrainer",
    "ForwardCost",
    "Gaussian",
    "Graph",
    "Grower",
    "GrowthStep",
    "Incoming",
    "MatrixFreeOperator",
    "NeuronSplit",
    "NewFilter",
    "Phase",
    "Plateau",
    "PointwiseOperator",
    "Proposals",
    "Removal",
    "Rule",
    "Spectrum",
    "Split",
    "SplitPlan",
    "SplittingOperator",
    "Status",
    "SumOperator",
    "TritonOptions",
    "Unit",
    "activation",
    "activation_names",
    "add_splitting_matrices",
    "apply_splits",
    "capture",
    "capture_layers",
    "conv_matvec",
    "count",
    "cpu_options",
    "curvature_coefficients",
    "edgeconv_matvec",
    "extremal_eigenpairs",
    "filter_norms",
    "forward_cost",
    "grow_step",
    "growable",
    "incoming_edges",
    "layer_arguments",
    "load_grown",
    "marginal",
    "mask",
    "norm_scales",
    "optimal_split",
    "plan_capture",
    "propose_filters",
    "prune",
    "register_layer",
    "register_operation",
    "register_optimizer",
    "removal_losses",
    "resize_like",
    "rewrap",
    "save_grown",
    "scale_penalty",
    "schedules",
    "select",
    "select_removals",
    "split_gain",
    "splitting_matrices",
    "splitting_matvec",
    "splitting_matvec_grouped",
    "trace",
    "triton_options",
    "unsharded",
    "use_isa",
]
