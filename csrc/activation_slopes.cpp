// Computes the slopes act'(z) * scale in one pass.
#include <ATen/ops/empty.h>

#include "checks.h"
#include "dtype.h"
#include "formula.h"
#include "operator.h"
#include "scaled_runs.h"

namespace s3d {
namespace {

at::Tensor activation_slopes_meta(const at::Tensor& z, const std::optional<at::Tensor>& scale, int64_t axis,
                                  int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                                  at::ArrayRef<double> kink_jump) {
    check_compute_dtype("z", z);
    TORCH_CHECK_VALUE(0 <= axis && axis < z.dim(), "axis must be a dimension of z, got ", axis, " for ", z.sizes());
    if (scale) check_vector("scale", *scale, z.size(axis), z);
    checked_formula(curvature, a, b, kink_at, kink_jump, 1);
    TORCH_CHECK_VALUE(static_cast<Curvature>(curvature) != Curvature::gelu, "curvature: there is no slope of gelu");
    return at::empty(z.sizes(), z.options());
}

at::Tensor activation_slopes(const at::Tensor& z, const std::optional<at::Tensor>& scale, int64_t axis,
                             int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                             at::ArrayRef<double> kink_jump) {
    const at::Tensor out = activation_slopes_meta(z, scale, axis, curvature, a, b, kink_at, kink_jump);
    if (z.numel() == 0) return out;
    int64_t inner = 1;
    for (int64_t d = axis + 1; d < z.dim(); ++d) inner *= z.size(d);
    const CurvatureFormula formula = checked_formula(curvature, a, b, kink_at, kink_jump, 1);
    const at::Tensor dense = z.contiguous(), scales = scale ? scale->contiguous() : at::Tensor();
    with_dtype(z.scalar_type(), [&]<typename T>() {
        const T* from = dense.const_data_ptr<T>();
        T* to = out.mutable_data_ptr<T>();
        const Kernels<T>& kernel = kernels<T>();
        for_scaled_runs(scale ? scales.const_data_ptr<T>() : nullptr, z.numel(), z.size(axis), inner,
                        [&](int64_t begin, int64_t size, const T* factors, T factor) {
                            kernel.slopes(formula, from + begin, factors, factor, size, to + begin);
                        });
    });
    return out;
}

TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    register_operator(m,
                      "activation_slopes(Tensor z, Tensor? scale, int axis, int curvature, float a, float b, float[] "
                      "kink_at, float[] kink_jump) -> Tensor",
                      activation_slopes, activation_slopes_meta);
}

}  // namespace
}  // namespace s3d
