// C = g * act''(z) * s^2 in one pass.
#include <ATen/MemoryOverlap.h>

#include "dtype.h"
#include "kernels.h"
#include "operator.h"
#include "parallel.h"

namespace s3d {
namespace {

constexpr int64_t entries_per_task = 1 << 14, longest_period = 1 << 12, least_run = 512;

CurvatureFormula formula_of(int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                            at::ArrayRef<double> kink_jump, double sharpness) {
    TORCH_CHECK_VALUE(0 <= curvature && curvature <= static_cast<int64_t>(Curvature::gaussian),
                      "curvature must be one of the known ones, got ", curvature);
    TORCH_CHECK_VALUE(kink_at.size() == kink_jump.size() && kink_at.size() <= CurvatureFormula::max_kinks,
                      "kink_at and kink_jump must have the same length, at most ", CurvatureFormula::max_kinks);
    CurvatureFormula formula;
    formula.curvature = static_cast<Curvature>(curvature);
    formula.a = a, formula.b = b, formula.sharpness = sharpness;
    formula.kinks = static_cast<int>(kink_at.size());
    std::copy(kink_at.begin(), kink_at.end(), formula.kink_at);
    std::copy(kink_jump.begin(), kink_jump.end(), formula.kink_jump);
    return formula;
}

void check(const at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale, int64_t axis) {
    TORCH_CHECK_TYPE(is_compute_dtype(g.scalar_type()), "g must be float32 or float64, got ", g.scalar_type());
    TORCH_CHECK_TYPE(z.scalar_type() == g.scalar_type(), "z must be ", g.scalar_type(), ", got ", z.scalar_type());
    TORCH_CHECK_VALUE(z.sizes() == g.sizes(), "z must have shape ", g.sizes(), ", got ", z.sizes());
    TORCH_CHECK_VALUE(z.device() == g.device(), "z must be on ", g.device(), ", got ", z.device());
    TORCH_CHECK_VALUE(0 <= axis && axis < g.dim(), "axis must be a dimension of g, got ", axis, " for ", g.sizes());
    if (!scale) return;
    TORCH_CHECK_TYPE(scale->scalar_type() == g.scalar_type(), "scale must be ", g.scalar_type(), ", got ",
                     scale->scalar_type());
    TORCH_CHECK_VALUE(scale->dim() == 1 && scale->size(0) == g.size(axis), "scale must have shape (", g.size(axis),
                      "), got ", scale->sizes());
    TORCH_CHECK_VALUE(scale->device() == g.device(), "scale must be on ", g.device(), ", got ", scale->device());
}

// out, g and z are contiguous, with `inner` entries per channel; scale is null or has one entry per channel.
template <typename T>
void compute(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, int64_t count, int64_t channels,
             int64_t inner, T* out) {
    const Kernels<T>& kernel = kernels<T>();
    // The scale of every entry, for as many whole periods as make a call worth while; or, where a period is long, of
    // one channel at a time.
    const int64_t period = channels * inner;
    const bool by_entry = scale && period <= longest_period;
    std::vector<T> scales(by_entry ? ceil_div(least_run, period) * period : 0);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = scale[i / inner % channels];
    const int64_t run = !scale ? entries_per_task : by_entry ? static_cast<int64_t>(scales.size()) : inner;
    const int64_t runs = ceil_div(count, run), runs_per_task = std::max<int64_t>(1, entries_per_task / run);
    run_tasks(ceil_div(runs, runs_per_task), [&](int64_t task) {
        const int64_t last = std::min(runs, (task + 1) * runs_per_task);
        for (int64_t i = task * runs_per_task; i < last; ++i) {
            const int64_t begin = i * run, size = std::min(run, count - begin);
            const T factor = scale && !by_entry ? scale[i % channels] : T(1);
            const T* factors = by_entry ? scales.data() : nullptr;
            kernel.curvature(formula, g + begin, z + begin, factors, factor * factor, size, out + begin);
        }
    });
}

void compute_into(const at::Tensor& out, const at::Tensor& g, const at::Tensor& z,
                  const std::optional<at::Tensor>& scale, int64_t axis, const CurvatureFormula& formula) {
    if (g.numel() == 0) return;
    int64_t inner = 1;
    for (int64_t d = axis + 1; d < g.dim(); ++d) inner *= g.size(d);
    const at::Tensor z_dense = z.contiguous();
    const at::Tensor scale_dense = scale ? scale->contiguous() : at::Tensor();
    with_dtype(g.scalar_type(), [&]<typename T>() {
        compute<T>(formula, g.const_data_ptr<T>(), z_dense.const_data_ptr<T>(),
                   scale ? scale_dense.const_data_ptr<T>() : nullptr, g.numel(), g.size(axis), inner,
                   out.mutable_data_ptr<T>());
    });
}

at::Tensor curvature_coefficients_meta(const at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                       int64_t axis, int64_t curvature, double a, double b,
                                       at::ArrayRef<double> kink_at, at::ArrayRef<double> kink_jump, double sharpness) {
    check(g, z, scale, axis);
    formula_of(curvature, a, b, kink_at, kink_jump, sharpness);
    return at::empty(g.sizes(), g.options());
}

at::Tensor curvature_coefficients(const at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                  int64_t axis, int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                                  at::ArrayRef<double> kink_jump, double sharpness) {
    check(g, z, scale, axis);
    const CurvatureFormula formula = formula_of(curvature, a, b, kink_at, kink_jump, sharpness);
    const at::Tensor out = at::empty(g.sizes(), g.options());
    compute_into(out, g.contiguous(), z, scale, axis, formula);
    return out;
}

void curvature_coefficients_inplace_meta(at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                         int64_t axis, int64_t curvature, double a, double b,
                                         at::ArrayRef<double> kink_at, at::ArrayRef<double> kink_jump,
                                         double sharpness) {
    check(g, z, scale, axis);
    formula_of(curvature, a, b, kink_at, kink_jump, sharpness);
    TORCH_CHECK_VALUE(g.is_contiguous(), "g must be contiguous to be overwritten");
}

void curvature_coefficients_inplace(at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale,
                                    int64_t axis, int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                                    at::ArrayRef<double> kink_jump, double sharpness) {
    curvature_coefficients_inplace_meta(g, z, scale, axis, curvature, a, b, kink_at, kink_jump, sharpness);
    at::assert_no_partial_overlap(g, z);
    if (scale) at::assert_no_overlap(g, *scale);
    compute_into(g, g, z, scale, axis, formula_of(curvature, a, b, kink_at, kink_jump, sharpness));
    mark_changed(g);
}

TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    register_operator(
        m,
        "curvature_coefficients(Tensor g, Tensor z, Tensor? scale, int axis, int curvature, float a, float b, float[] "
        "kink_at, float[] kink_jump, float sharpness) -> Tensor",
        curvature_coefficients, curvature_coefficients_meta);
    register_operator(
        m,
        "curvature_coefficients_(Tensor(a!) g, Tensor z, Tensor? scale, int axis, int curvature, float a, float b, "
        "float[] kink_at, float[] kink_jump, float sharpness) -> ()",
        curvature_coefficients_inplace, curvature_coefficients_inplace_meta);
}

}  // namespace
}  // namespace s3d
