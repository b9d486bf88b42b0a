// Computes the curvature coefficients C = g * act''(z) * scale^2 in one pass, into a new tensor or over g.
#include "checks.h"
#include "dtype.h"
#include "formula.h"
#include "scaled_runs.h"

namespace s3d {
namespace {

// The arguments after g and z. The constructor checks all arguments.
struct Settings {
    const OptionalTensor scale;  // one entry per entry of dimension `axis`
    const int64_t axis;
    const OptionalTensor row_norm, bandwidth;  // one entry per row or per entry of g, and one per channel
    CurvatureFormula formula;

    Settings(const Tensor& g, const Tensor& z, const OptionalTensor& scale, int64_t axis, int64_t curvature, double a,
             double b, Numbers kink_at, Numbers kink_jump, double sharpness, const OptionalTensor& row_norm,
             const OptionalTensor& bandwidth)
        : scale(scale), axis(axis), row_norm(row_norm), bandwidth(bandwidth) {
        check_compute_dtype("g", g);
        check_dtype("z", z, g.scalar_type());
        CHECK_VALUE(z.sizes() == g.sizes(), "z must have shape ", g.sizes(), ", got ", z.sizes());
        check_device("z", z);
        CHECK_VALUE(0 <= axis && axis < g.dim(), "axis must be a dimension of g, got ", axis, " for ", g.sizes());
        const int64_t channels = g.size(axis);
        if (scale) check_vector("scale", *scale, channels, g);
        CHECK_VALUE(row_norm.has_value() == bandwidth.has_value(), "row_norm and bandwidth must be given together");
        if (row_norm) {
            int64_t rows = 1;
            for (int64_t d = 0; d < g.dim(); ++d) rows *= d == axis ? 1 : g.size(d);
            if (row_norm->dim() == 1) {
                check_vector("row_norm", *row_norm, rows, g);
            } else {
                check_dtype("row_norm", *row_norm, g.scalar_type());
                CHECK_VALUE(row_norm->sizes() == g.sizes(), "row_norm must have shape (", rows, ") or ", g.sizes(),
                            ", got ", row_norm->sizes());
                check_device("row_norm", *row_norm);
            }
            check_vector("bandwidth", *bandwidth, channels, g);
        }
        formula = checked_formula(curvature, a, b, kink_at, kink_jump, sharpness);
    }
};

// Makes an operator, `call`, of a function of g, z and the settings.
template <auto function>
struct WithSettings;
template <typename Result, Result (*function)(const Tensor&, const Tensor&, const Settings&)>
struct WithSettings<function> {
    static Result call(const Tensor& g, const Tensor& z, const OptionalTensor& scale, int64_t axis, int64_t curvature,
                       double a, double b, Numbers kink_at, Numbers kink_jump, double sharpness,
                       const OptionalTensor& row_norm, const OptionalTensor& bandwidth) {
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
void compute_into(const Tensor& out, const Tensor& g, const Tensor& z, const Settings& settings) {
    if (g.numel() == 0) return;
    int64_t inner = 1;
    for (int64_t d = settings.axis + 1; d < g.dim(); ++d) inner *= g.size(d);
    const Tensor z_dense = as_contiguous(z);
    const OptionalTensor scale = as_contiguous(settings.scale);
    const int64_t channels = g.size(settings.axis);
    if (settings.row_norm) {
        const Tensor norm = as_contiguous(*settings.row_norm), bandwidth = as_contiguous(*settings.bandwidth);
        with_dtype(g.scalar_type(), [&]<typename T>() {
            compute_by_width<T>(settings.formula, data_of<T>(g), data_of<T>(z_dense),
                                scale ? data_of<T>(*scale) : nullptr, data_of<T>(norm), norm.dim() > 1,
                                data_of<T>(bandwidth), g.numel() / (channels * inner), channels, inner,
                                mutable_data_of<T>(out));
        });
        return;
    }
    with_dtype(g.scalar_type(), [&]<typename T>() {
        compute<T>(settings.formula, data_of<T>(g), data_of<T>(z_dense), scale ? data_of<T>(*scale) : nullptr,
                   g.numel(), channels, inner, mutable_data_of<T>(out));
    });
}

Tensor coefficients(const Tensor& g, const Tensor& z, const Settings& settings) {
    const Tensor out = new_like(g);
    compute_into(out, as_contiguous(g), z, settings);
    return out;
}

void overwrite(const Tensor& g, const Tensor& z, const Settings& settings) {
    CHECK_VALUE(g.is_contiguous(), "g must be contiguous, because the operator overwrites it");
    // A tensor that is not contiguous is copied before g changes. z may be g itself: entries are read before they
    // change.
    if (z.is_contiguous() && z.const_data_ptr() != g.const_data_ptr()) check_apart("g", g, "z", z);
    const std::pair<const char*, const OptionalTensor*> vectors[] = {
        {"scale", &settings.scale}, {"row_norm", &settings.row_norm}, {"bandwidth", &settings.bandwidth}};
    for (const auto& [name, vector] : vectors) {
        if (*vector && (*vector)->is_contiguous()) check_apart("g", g, name, **vector);
    }
    mark_changed(g);
    compute_into(g, g, z, settings);
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("curvature_coefficients", TORCH_BOX(&WithSettings<coefficients>::call));
    m.impl("curvature_coefficients_", TORCH_BOX(&WithSettings<overwrite>::call));
}

}  // namespace
}  // namespace s3d
