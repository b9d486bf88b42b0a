"""The schemas of the operators torch.ops.s3d_fast.*, on every device.

csrc/ has their kernels for the CPU, `implementations` those for all other devices.
"""

from __future__ import annotations

_CURVATURE = (
    "Tensor? scale, int axis, int curvature, float a, float b, float[] kink_at, float[] kink_jump, float sharpness, "
    "Tensor? row_norm=None, Tensor? bandwidth=None"
)
# `incoming` and `runner_incoming` are the tensors of `incoming_edges(winner)` and `incoming_edges(runner)`.
_EDGES = (
    "Tensor X, Tensor winner, Tensor C, Tensor V, bool bias, Tensor? runner=None, Tensor? K=None, Tensor? d1=None, "
    "Tensor? d2=None, Tensor[]? incoming=None, Tensor[]? runner_incoming=None"
)
_STAGES = "Tensor[] X, Tensor[] C, Tensor[] d, Tensor[] weight, int[] stages, int[] geometry, Tensor[] V, bool[] bias"
_WIDENINGS = (
    "Tensor[] weight, Tensor[] rows, Tensor?[] row_scale, Tensor?[] shift, Tensor?[] shift_rows, Tensor?[] columns, "
    "Tensor?[] column_scale, float[] shift_scale"
)
_KRYLOV = (
    "Tensor(a!) basis, Tensor product, Tensor(b!) alpha, Tensor(c!) beta, Tensor(d!) length, Tensor(e!) scale, int step"
)
_TIES = "Tensor P, Tensor C, Tensor first, Tensor second, Tensor K, Tensor? d1=None, Tensor? d2=None"
_TIED_ROWS = (
    "Tensor X, Tensor C, Tensor V, Tensor first, Tensor second, Tensor K, Tensor? d1, Tensor? d2, bool bias, "
    "bool rounded=False"
)
_SLOPES = "Tensor z, Tensor? scale, int axis, int curvature, float a, float b, float[] kink_at, float[] kink_jump"

SCHEMAS = (
    "splitting_matvec(Tensor X, Tensor C, Tensor V, bool bias, bool rounded=False) -> Tensor",
    "splitting_matvec_grouped(Tensor[] X, Tensor[] C, Tensor[] V, bool[] bias, bool rounded=False) -> Tensor[]",
    "gated_matvec(Tensor X, Tensor c11, Tensor c12, Tensor? c22, Tensor V, bool bias) -> Tensor",
    "joint_matvec(Tensor[] X, Tensor[] C, Tensor V, bool[] bias, bool rounded=False) -> Tensor",
    f"depthwise_matvec_grouped({_STAGES}) -> Tensor[]",
    "depthwise_row_norms(Tensor X, Tensor d, Tensor weight, int[] geometry, bool bias) -> Tensor",
    f"edgeconv_matvec({_EDGES}) -> Tensor",
    f"tied_maps({_TIES}) -> Tensor",
    f"tied_rows_matvec({_TIED_ROWS}) -> Tensor",
    "splitting_matrices(Tensor X, Tensor C, bool bias) -> Tensor",
    "add_splitting_matrices(Tensor(a!) out, Tensor X, Tensor C, bool bias, float weight) -> ()",
    f"curvature_coefficients(Tensor g, Tensor z, {_CURVATURE}) -> Tensor",
    f"curvature_coefficients_(Tensor(a!) g, Tensor z, {_CURVATURE}) -> ()",
    f"activation_slopes({_SLOPES}) -> Tensor",
    f"grow_weights({_WIDENINGS}) -> Tensor[]",
    f"krylov_extend({_KRYLOV}) -> ()",
    "symmetric_extremes(Tensor S) -> (Tensor, Tensor)",
    "tridiagonal_extremes(Tensor alpha, Tensor beta, Tensor length) -> (Tensor, Tensor)",
    "certified_widths(Tensor alpha, Tensor beta, Tensor length, Tensor values, Tensor growth) -> Tensor",
    "top_two(Tensor values) -> (Tensor, Tensor)",
    "gather_patches(Tensor maps, Tensor places, int[] kernel, int[] dilation) -> Tensor",
)
