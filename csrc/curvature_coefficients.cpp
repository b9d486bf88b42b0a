// Computes the curvature coefficients C = g * act''(z) * scale^2 in one pass, into a new tensor or over g.
#include <ATen/MemoryOverlap.h>

#include "checks.h"
#include "dtype.h"
#include "kernels.h"
#include "operator.h"
#include "parallel.h"

namespace s3d {
namespace {

constexpr int64_t entries_per_task = 1 << 14, longest_period = 1 << 12, least_run = 512;

// The arguments after g and z. The constructor checks all arguments.
struct Settings {
    const std::optional<at::Tensor> scale;  // one entry per entry of dimension `axis`
    const int64_t axis;
    const std::optional<at::Tensor> row_norm, bandwidth;  // one entry per row, and one per channel; or neither
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
            check_vector("row_norm", *row_norm, rows, g);
            check_vector("bandwidth", *bandwidth, channels, g);
        }
        constexpr int64_t last_curvature = static_cast<int64_t>(Curvature::gaussian);
        TORCH_CHECK_VALUE(0 <= curvature && curvature <= last_curvature, "curvature must lie in [0, ", last_curvature,
                          "], got ", curvature);
        TORCH_CHECK_VALUE(kink_at.size() == kink_jump.size() && kink_at.size() <= CurvatureFormula::max_kinks,
                          "kink_at and kink_jump must have the same length, at most ", CurvatureFormula::max_kinks,
                          ", got ", kink_at.size(), " and ", kink_jump.size());
        formula.curvature = static_cast<Curvature>(curvature);
        formula.a = a, formula.b = b, formula.sharpness = sharpness;
        formula.kinks = static_cast<int>(kink_at.size());
        std::copy(kink_at.begin(), kink_at.end(), formula.kink_at);
        std::copy(kink_jump.begin(), kink_jump.end(), formula.kink_jump);
    }

 private:
    static void check_vector(const char* name, const at::Tensor& vector, int64_t size, const at::Tensor& g) {
        check_dtype(name, vector, g.scalar_type());
        TORCH_CHECK_VALUE(vector.dim() == 1 && vector.size(0) == size, name, " must have shape (", size, "), got ",
                          vector.sizes());
        check_device(name, vector, g);
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
    // A short run does not repay the call of the kernel. If all channels together are short, the scales repeat over
    // several periods and a run covers them. If they are long, a run is one channel and has one scale.
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

// The same with kinks of the width row_norm * bandwidth. Entry (o, c, i) of g, which has the shape (outer, channels,
// inner), belongs to row o * inner + i.
template <typename T>
void compute_by_width(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, const T* row_norm,
                      const T* bandwidth, int64_t outer, int64_t channels, int64_t inner, T* out) {
    const Kernels<T>& kernel = kernels<T>();
    if (inner == 1) {
        const int64_t per_task = std::max<int64_t>(1, entries_per_task / channels);
        run_tasks(ceil_div(outer, per_task), [&](int64_t task) {
            const int64_t first = task * per_task, begin = first * channels;
            const KinkWidths<T> widths{row_norm + first, bandwidth, nullptr, scale};
            kernel.curvature_rows(formula, widths, g + begin, z + begin, std::min(per_task, outer - first), channels,
                                  out + begin);
        });
        return;
    }
    const int64_t per_task = std::max<int64_t>(1, entries_per_task / inner), blocks = ceil_div(channels, per_task);
    run_tasks(outer * blocks, [&](int64_t task) {
        const int64_t o = task / blocks, first = task % blocks * per_task, begin = (o * channels + first) * inner;
        const KinkWidths<T> widths{bandwidth + first, row_norm + o * inner, scale ? scale + first : nullptr, nullptr};
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
                                bandwidth.const_data_ptr<T>(), g.numel() / (channels * inner), channels, inner,
                                out.mutable_data_ptr<T>());
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
