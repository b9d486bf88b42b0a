// Computes the slopes act'(z) * scale in one pass.
#include "checks.h"
#include "dtype.h"
#include "formula.h"
#include "scaled_runs.h"

namespace s3d {
namespace {

Tensor activation_slopes(const Tensor& z, const OptionalTensor& scale, int64_t axis, int64_t curvature, double a,
                         double b, Numbers kink_at, Numbers kink_jump) {
    check_compute_dtype("z", z);
    CHECK_VALUE(0 <= axis && axis < z.dim(), "axis must be a dimension of z, got ", axis, " for ", z.sizes());
    if (scale) check_vector("scale", *scale, z.size(axis), z);
    const CurvatureFormula formula = checked_formula(curvature, a, b, kink_at, kink_jump, 1);
    CHECK_VALUE(formula.curvature != Curvature::gelu, "curvature: there is no slope of gelu");
    const Tensor out = new_like(z);
    if (z.numel() == 0) return out;
    int64_t inner = 1;
    for (int64_t d = axis + 1; d < z.dim(); ++d) inner *= z.size(d);
    const Tensor dense = as_contiguous(z);
    const OptionalTensor scales = as_contiguous(scale);
    with_dtype(z.scalar_type(), [&]<typename T>() {
        const T* from = data_of<T>(dense);
        T* to = mutable_data_of<T>(out);
        const Kernels<T>& kernel = kernels<T>();
        for_scaled_runs(scales ? data_of<T>(*scales) : nullptr, z.numel(), z.size(axis), inner,
                        [&](int64_t begin, int64_t size, const T* factors, T factor) {
                            kernel.slopes(formula, from + begin, factors, factor, size, to + begin);
                        });
    });
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("activation_slopes", TORCH_BOX(&activation_slopes)); }

}  // namespace
}  // namespace s3d
