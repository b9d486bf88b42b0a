// The operators that the extension registers with PyTorch's dispatcher; `..._meta` gives shapes only.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>
#include <tuple>
#include <vector>

namespace s3d {

at::Tensor splitting_matvec(const at::Tensor& X, const at::Tensor& C, const at::Tensor& V, bool bias);
at::Tensor splitting_matvec_meta(const at::Tensor& X, const at::Tensor& C, const at::Tensor& V, bool bias);

std::vector<at::Tensor> splitting_matvec_grouped(at::TensorList X, at::TensorList C, at::TensorList V,
                                                 c10::List<bool> bias);
std::vector<at::Tensor> splitting_matvec_grouped_meta(at::TensorList X, at::TensorList C, at::TensorList V,
                                                      c10::List<bool> bias);

at::Tensor edgeconv_matvec(const at::Tensor& X, const at::Tensor& winner, const at::Tensor& C, const at::Tensor& V,
                           bool bias);
at::Tensor edgeconv_matvec_meta(const at::Tensor& X, const at::Tensor& winner, const at::Tensor& C, const at::Tensor& V,
                                bool bias);

at::Tensor splitting_matrices(const at::Tensor& X, const at::Tensor& C, bool bias);
at::Tensor splitting_matrices_meta(const at::Tensor& X, const at::Tensor& C, bool bias);

// out += weight * (the splitting matrices).
void add_splitting_matrices(at::Tensor& out, const at::Tensor& X, const at::Tensor& C, bool bias, double weight);
void add_splitting_matrices_meta(at::Tensor& out, const at::Tensor& X, const at::Tensor& C, bool bias, double weight);

// C = g * act''(z) * scale^2, with one scale per entry of dimension `axis`; see CurvatureFormula for the rest.
at::Tensor curvature_coefficients(const at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                  int64_t axis, int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                                  at::ArrayRef<double> kink_jump, double sharpness);
at::Tensor curvature_coefficients_meta(const at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                       int64_t axis, int64_t curvature, double a, double b,
                                       at::ArrayRef<double> kink_at, at::ArrayRef<double> kink_jump, double sharpness);
// The same, written over g.
void curvature_coefficients_inplace(at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                    int64_t axis, int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                                    at::ArrayRef<double> kink_jump, double sharpness);
void curvature_coefficients_inplace_meta(at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                         int64_t axis, int64_t curvature, double a, double b,
                                         at::ArrayRef<double> kink_at, at::ArrayRef<double> kink_jump,
                                         double sharpness);

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// One entry per tensor that grows: see reference.grow_weight.
std::vector<at::Tensor> grow_weights(at::TensorList weight, at::TensorList rows, const OptionalTensors& row_scale,
                                     const OptionalTensors& shift, const OptionalTensors& shift_rows,
                                     const OptionalTensors& columns, const OptionalTensors& column_scale,
                                     at::ArrayRef<double> shift_scale);
std::vector<at::Tensor> grow_weights_meta(at::TensorList weight, at::TensorList rows, const OptionalTensors& row_scale,
                                          const OptionalTensors& shift, const OptionalTensors& shift_rows,
                                          const OptionalTensors& columns, const OptionalTensors& column_scale,
                                          at::ArrayRef<double> shift_scale);

// One Lanczos step of all filters: see reference.krylov_extend.
void krylov_extend(at::Tensor& basis, const at::Tensor& product, at::Tensor& alpha, at::Tensor& beta,
                   at::Tensor& length, at::Tensor& scale, int64_t step);
void krylov_extend_meta(at::Tensor& basis, const at::Tensor& product, at::Tensor& alpha, at::Tensor& beta,
                        at::Tensor& length, at::Tensor& scale, int64_t step);

// The extreme eigenpairs of symmetric tridiagonal matrices: see reference.tridiagonal_extremes.
std::tuple<at::Tensor, at::Tensor> tridiagonal_extremes(const at::Tensor& alpha, const at::Tensor& beta,
                                                        const at::Tensor& length);
std::tuple<at::Tensor, at::Tensor> tridiagonal_extremes_meta(const at::Tensor& alpha, const at::Tensor& beta,
                                                             const at::Tensor& length);

// The extreme eigenvalues (M, 2) and unit eigenvectors (M, 2, D) of symmetric matrices (M, D, D), in float64. Of a
// repeated eigenvalue, any vector of its space: where both ends are the same, maybe the same vector.
std::tuple<at::Tensor, at::Tensor> symmetric_extremes(const at::Tensor& S);
std::tuple<at::Tensor, at::Tensor> symmetric_extremes_meta(const at::Tensor& S);

// Tells autograd that a tensor was changed in place, for the operators that do so.
void mark_changed(const at::Tensor& tensor);

// Raises unless `compute` is float32 or float64 and `tensor` is stored in that type, or in 16 bits for float32.
void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute);

}  // namespace s3d
