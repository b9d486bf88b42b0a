// Computes the curvature coefficients C = g * act''(z) * scale^2 in one pass, into a new tensor or over g.
#include <ATen/MemoryOverlap.h>

#include "checks.h"
#include "dtype.h"
#include "formula.h"
#include "operator.h"
#include "scaled_runs.h"

namespace s3d {
namespace {

// The arguments after g and z. The constructor checks all arguments.
struct Settings {
    const std::optional<at::Tensor> scale;  // one entry per entry of dimension `axis`
    const int64_t axis;
    const std::optional<at::Tensor> row_norm, bandwidth;  // one entry per row or per entry of g, and one per channel
    CurvatureFormula formula;

    Settings(const at::Tensor& g, const at::Tensor& z, const std::optional<at::Tensor>& scale, int64_t axis,
             int64_t curvature, double a, double b, at::ArrayRef<double> kink_at, at::ArrayRef<double> kink_jump,
             double sharpness, const std::optional<at::Tensor>& row_norm, const std::optional<at::Tensor>& bandwidth)
        : scale(scale), axis(axis), row_norm(row_norm), bandwidth(bandwidth) {
        check_compute_dtype("g", g);
        check_dtype("z", z, g.scalar_type());
        TORCH_CHECK_VALUE(z.sizes() == g.sizes(), "z must have shape ", g.sizes(), ", got ", z.sizes());
        check_device("z", z, g);
        TORCH_CHECK_VALUE(0 <= axis && axis < g.dim(), "axis must be a dimension of g, got ", axis, " for ", g.sizes());
        const int64_t channels = g.size(axis);
        if (scale) check_vector("scale", *scale, channels, g);
        TORCH_CHECK_VALUE(row_norm.has_value() == bandwidth.has_value(),
                          "row_norm and bandwidth must be given together");
        if (row_norm) {
            int64_t rows = 1;
            for (int64_t d = 0; d < g.dim(); ++d) rows *= d == axis ? 1 : g.size(d);
            if (row_norm->dim() == 1) {
                check_vector("row_norm", *row_norm, rows, g);
            } else {
                check_dtype("row_norm", *row_norm, g.scalar_type());
                TORCH_CHECK_VALUE(row_norm->sizes() == g.sizes(), "row_norm must have shape (", rows, ") or ",
                                  g.sizes(), ", got ", row_norm->sizes());
                check_device("row_norm", *row_norm, g);
            }
            check_vector("bandwidth", *bandwidth, channels, g);
        }
        formula = checked_formula(curvature, a, b, kink_at, kink_jump, sharpness);
    }
};

// Makes an operator, `call`, of a function of g, z and the settings.
template <auto function>
struct WithSettings;
template <typename Result, typename G, Result (*function)(G, const at::Tensor&, const Settings&)>
struct WithSettings<function> {
    static Result call(G g, const at::Tensor& z, const std::optional<at::Tensor>& scale, int64_t axis,
                       int64_t curvature, double a, double b, at::ArrayRef<double> kink_at,
                       at::ArrayRef<double> kink_jump, double sharpness, const std::optional<at::Tensor>& row_norm,
                       const std::optional<at::Tensor>& bandwidth) {
        return function(
            g, z, Settings(g, z, scale, axis, curvature, a, b, kink_at, kink_jump, sharpness, row_norm, bandwidth));
    }
};

// Each of out, g and z is contiguous, with `inner` entries per channel. scale is null or has one entry per channel.
template <typename T>
void compute(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, int64_t count, int64_t channels,
             int64_t inner, T* out) {
    const Kernels<T>& kernel = kernels<T>();
    for_scaled_runs(scale, count, channels, inner, [&](int64_t begin, int64_t size, const T* scales, T factor) {
        kernel.curvature(formula, g + begin, z + begin, scales, factor * factor, size, out + begin);
    });
}

// The same with kinks of the width norm * bandwidth. Entry (o, c, i) of g, which has the shape (outer, channels,
// inner), belongs to row o * inner + i. If `is_whole`, every entry has a norm of its own; otherwise, every row has.
template <typename T>
void compute_by_width(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, const T* norm,
                      bool is_whole, const T* bandwidth, int64_t outer, int64_t channels, int64_t inner, T* out) {
    const Kernels<T>& kernel = kernels<T>();
    if (inner == 1) {
        const int64_t per_task = std::max<int64_t>(1, entries_per_task / channels);
        run_tasks(ceil_div(outer, per_task), [&](int64_t task) {
            const int64_t first = task * per_task, begin = first * channels;
            const KinkWidths<T> widths{is_whole ? nullptr : norm + first, bandwidth, is_whole ? norm + begin : nullptr,
                                       nullptr, scale};
            kernel.curvature_rows(formula, widths, g + begin, z + begin, std::min(per_task, outer - first), channels,
                                  out + begin);
        });
        return;
    }
    const int64_t per_task = std::max<int64_t>(1, entries_per_task / inner), blocks = ceil_div(channels, per_task);
    run_tasks(outer * blocks, [&](int64_t task) {
        const int64_t o = task / blocks, first = task % blocks * per_task, begin = (o * channels + first) * inner;
        const KinkWidths<T> widths{bandwidth + first, is_whole ? nullptr : norm + o * inner,
                                   is_whole ? norm + begin : nullptr, scale ? scale + first : nullptr, nullptr};
        kernel.curvature_rows(formula, widths, g + begin, z + begin, std::min(per_task, channels - first), inner,
                              out + begin);
    });
}

// g and out are contiguous.
void compute_into(const at::Tensor& out, const at::Tensor& g, const at::Tensor& z, const Settings& settings) {
    if (g.numel() == 0) return;
    int64_t inner = 1;
    for (int64_t d = settings.axis + 1; d < g.dim(); ++d) inner *= g.size(d);
    const at::Tensor z_dense = z.contiguous();
    const at::Tensor scale = settings.scale ? settings.scale->contiguous() : at::Tensor();
    const int64_t channels = g.size(settings.axis);
    if (settings.row_norm) {
        const at::Tensor norm = settings.row_norm->contiguous(), bandwidth = settings.bandwidth->contiguous();
        with_dtype(g.scalar_type(), [&]<typename T>() {
            compute_by_width<T>(settings.formula, g.const_data_ptr<T>(), z_dense.const_data_ptr<T>(),
                                scale.defined() ? scale.const_data_ptr<T>() : nullptr, norm.const_data_ptr<T>(),
                                norm.dim() > 1, bandwidth.const_data_ptr<T>(), g.numel() / (channels * inner), channels,
                                inner, out.mutable_data_ptr<T>());
        });
        return;
    }
    with_dtype(g.scalar_type(), [&]<typename T>() {
        compute<T>(settings.formula, g.const_data_ptr<T>(), z_dense.const_data_ptr<T>(),
                   scale.defined() ? scale.const_data_ptr<T>() : nullptr, g.numel(), channels, inner,
                   out.mutable_data_ptr<T>());
    });
}

at::Tensor coefficients_meta(const at::Tensor& g, const at::Tensor&, const Settings&) {
    return at::empty(g.sizes(), g.options());
}

at::Tensor coefficients(const at::Tensor& g, const at::Tensor& z, const Settings& settings) {
    const at::Tensor out = coefficients_meta(g, z, settings);
    compute_into(out, g.contiguous(), z, settings);
    return out;
}

void overwrite_meta(at::Tensor& g, const at::Tensor&, const Settings&) {
    TORCH_CHECK_VALUE(g.is_contiguous(), "g must be contiguous, because the operator overwrites it");
}

void overwrite(at::Tensor& g, const at::Tensor& z, const Settings& settings) {
    overwrite_meta(g, z, settings);
    at::assert_no_partial_overlap(g, z);
    for (const auto& vector : {settings.scale, settings.row_norm, settings.bandwidth}) {
        if (vector) at::assert_no_overlap(g, *vector);
    }
    compute_into(g, g, z, settings);
    mark_changed(g);
}

TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    const std::string settings =
        "Tensor? scale, int axis, int curvature, float a, float b, float[] kink_at, float[] kink_jump, float "
        "sharpness, "
        "Tensor? row_norm=None, Tensor? bandwidth=None";
    register_operator(m, "curvature_coefficients(Tensor g, Tensor z, " + settings + ") -> Tensor",
                      WithSettings<coefficients>::call, WithSettings<coefficients_meta>::call);
    register_operator(m, "curvature_coefficients_(Tensor(a!) g, Tensor z, " + settings + ") -> ()",
                      WithSettings<overwrite>::call, WithSettings<overwrite_meta>::call);
}

}  // namespace
}  // namespace s3d
