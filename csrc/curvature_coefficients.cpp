// Computes the curvature coefficients C = g * act''(z) * scale^2 in one pass, into a new tensor or over g.
#include "checks.h"
#include "dtype.h"
#include "kernels.h"
#include "parallel.h"

namespace s3d {
namespace {

constexpr int64_t entries_per_task = 1 << 14, longest_period = 1 << 12, least_run = 512;

// The arguments after g and z. The constructor checks all arguments.
struct Settings {
    const OptionalTensor scale;  // one entry per entry of dimension `axis`
    const int64_t axis;
    const OptionalTensor row_norm, bandwidth;  // one entry per row, and one per channel; or neither
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
            check_vector("row_norm", *row_norm, rows, g);
            check_vector("bandwidth", *bandwidth, channels, g);
        }
        constexpr int64_t last_curvature = static_cast<int64_t>(Curvature::gaussian);
        CHECK_VALUE(0 <= curvature && curvature <= last_curvature, "curvature must lie in [0, ", last_curvature,
                    "], got ", curvature);
        CHECK_VALUE(kink_at.size() == kink_jump.size() && kink_at.size() <= CurvatureFormula::max_kinks,
                    "kink_at and kink_jump must have the same length, at most ", CurvatureFormula::max_kinks, ", got ",
                    kink_at.size(), " and ", kink_jump.size());
        formula.curvature = static_cast<Curvature>(curvature);
        formula.a = a, formula.b = b, formula.sharpness = sharpness;
        formula.kinks = static_cast<int>(kink_at.size());
        std::copy(kink_at.begin(), kink_at.end(), formula.kink_at);
        std::copy(kink_jump.begin(), kink_jump.end(), formula.kink_jump);
    }

 private:
    static void check_vector(const char* name, const Tensor& vector, int64_t size, const Tensor& g) {
        check_dtype(name, vector, g.scalar_type());
        CHECK_VALUE(vector.dim() == 1 && vector.size(0) == size, name, " must have shape (", size, "), got ",
                    vector.sizes());
        check_device(name, vector);
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
                                scale ? data_of<T>(*scale) : nullptr, data_of<T>(norm), data_of<T>(bandwidth),
                                g.numel() / (channels * inner), channels, inner, mutable_data_of<T>(out));
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

STABLE_TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    const std::string settings =
        "Tensor? scale, int axis, int curvature, float a, float b, float[] kink_at, float[] kink_jump, float "
        "sharpness, Tensor? row_norm=None, Tensor? bandwidth=None";
    m.def(("curvature_coefficients(Tensor g, Tensor z, " + settings + ") -> Tensor").c_str());
    m.def(("curvature_coefficients_(Tensor(a!) g, Tensor z, " + settings + ") -> ()").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("curvature_coefficients", TORCH_BOX(&WithSettings<coefficients>::call));
    m.impl("curvature_coefficients_", TORCH_BOX(&WithSettings<overwrite>::call));
}

}  // namespace
}  // namespace s3d
