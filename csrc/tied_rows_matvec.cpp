// Computes S_j v_j of filters under maxima over small windows of rows, such as the patches that a pool compares.
//
// The rows of window w are w P to w P + P - 1. With u = X v, t = C * u, and for every tie of a window
//     tau = K (d1 u[first] - d2 u[second]),  t[first] += d1 tau,  t[second] -= d2 tau,
// S v = X^T t. As in splitting_matvec, nothing of size (N, M) reaches memory: a tile holds whole windows.
#include <atomic>

#include "checks.h"
#include "dtype.h"
#include "layers.h"
#include "panel_choice.h"
#include "rounded_layer.h"

namespace s3d {
namespace {

// The ties of windows with P rows. Index and coefficients of tie q, window w and filter j are at [w, j, q], with any
// strides; d1 and d2 may be absent.
template <typename T>
class WindowTies {
 public:
    WindowTies(int64_t rows, const Tensor& first, const Tensor& second, const Tensor& K, const OptionalTensor& d1,
               const OptionalTensor& d2)
        : rows_(rows),
          ties_(K.size(2)),
          first_(first),
          second_(second),
          K_(K),
          d1_(d1 ? *d1 : K),
          d2_(d2 ? *d2 : K),
          sloped_(d1.has_value()) {}

    int64_t rows() const { return rows_; }

    // Adds the ties of `count` windows to t; u and t are panels whose first row is the first of window `window`.
    // Returns whether all indices are in [0, P); others are left out.
    bool add(int64_t window, int64_t count, const PanelPlace& panel, const T* u, T* t) const {
        bool in_range = true;
        const int64_t width = panel.width, size = rows_ * width;
        for (int64_t w = 0; w < count; ++w) {
            for (int64_t q = 0; q < ties_; ++q) in_range &= add_one(window + w, q, panel, u + w * size, t + w * size);
        }
        return in_range;
    }

 private:
    // Entries (window, filter, tie) with any strides.
    template <typename Entry>
    struct Entries {
        const Entry* data;
        int64_t window, filter, tie;

        explicit Entries(const Tensor& tensor)
            : data(data_of<Entry>(tensor)), window(tensor.stride(0)), filter(tensor.stride(1)), tie(tensor.stride(2)) {}
        const Entry* at(int64_t w, int64_t j, int64_t q) const { return data + w * window + j * filter + q * tie; }
    };

    bool add_one(int64_t w, int64_t q, const PanelPlace& panel, const T* u, T* t) const {
        const int64_t width = panel.width;
        const int64_t *first = first_.at(w, panel.first, q), *second = second_.at(w, panel.first, q);
        const T *K = K_.at(w, panel.first, q), *d1 = d1_.at(w, panel.first, q), *d2 = d2_.at(w, panel.first, q);
        bool in_range = true;
        for (int64_t j = 0; j < panel.count; ++j) {
            const int64_t winner = first[j * first_.filter], runner = second[j * second_.filter];
            // Each index is checked right before it is used.
            if (winner < 0 || winner >= rows_ || runner < 0 || runner >= rows_) {
                in_range = false;
                continue;
            }
            const int64_t one = winner * width + j, other = runner * width + j;
            const T up = sloped_ ? d1[j * d1_.filter] : T(1), down = sloped_ ? d2[j * d2_.filter] : T(1);
            const T tau = K[j * K_.filter] * (up * u[one] - down * u[other]);
            t[one] += up * tau;
            t[other] -= down * tau;
        }
        return in_range;
    }

    int64_t rows_, ties_;
    Entries<int64_t> first_, second_;
    Entries<T> K_, d1_, d2_;
    bool sloped_;
};

// Windows per tile, for rows of this depth.
template <typename T>
int64_t windows_of_tile(int64_t depth, int64_t rows) {
    return std::max<int64_t>(1, rows_of_tile<T>(depth) / rows);
}

template <typename T>
struct TiedLayer {
    const Kernels<T>& kernel;
    RowTiles<T> X;
    Matrix<T> C;
    Vectors<T> V;
    WindowTies<T> ties;
    LayerSums<T> sums;
    int64_t windows, per_tile;
    bool bias;
    std::atomic<bool>& in_range;

    TiedLayer(const Tensor& x, const Tensor& c, const Tensor& v, const WindowTies<T>& ties, bool bias,
              const Tensor& result, std::atomic<bool>& in_range)
        : kernel(kernels<T>()),
          X(Matrix<T>(x), false),
          C(c),
          V(v),
          ties(ties),
          sums(v, result, choose_panels(kernel, v)),
          windows(x.size(0) / ties.rows()),
          per_tile(windows_of_tile<T>(X.depth(), ties.rows())),
          bias(bias),
          in_range(in_range) {}

    double flops() const { return 4. * C.rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return std::max<int64_t>(1, windows / (2 * per_tile)); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, windows), end = sums.begin(place.slice + 1, windows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size, most_rows = per_tile * ties.rows();
        const int64_t own = sums.has_partials() ? 0 : block, tile = most_rows * panels.width;
        scratch.reset(Scratch::bytes_for<T>(block) + Scratch::bytes_for<T>(own) + 3 * Scratch::bytes_for<T>(tile) +
                      Scratch::bytes_for<T>(X.scratch(most_rows)));
        T* vectors = scratch.take<T>(block);
        T* own_sums = scratch.take<T>(own);
        T* u = scratch.take<T>(tile);
        T* t = scratch.take<T>(tile);
        T* c_copy = scratch.take<T>(tile);
        T* x_copy = scratch.take<T>(X.scratch(most_rows));

        for (int64_t p = 0; p < place.count; ++p) {
            V.pack(panels[place.first + p], 0, sums.depth, vectors + p * size);
        }
        T* total = sums.start(place, own_sums);
        for (int64_t window = begin; window < end; window += per_tile) {
            const int64_t count = std::min(per_tile, end - window);
            const int64_t row = window * ties.rows(), rows = count * ties.rows();
            const T* x = X.get(row, rows, x_copy);
            for (int64_t p = 0; p < place.count; ++p) {
                const PanelPlace panel = panels[place.first + p];
                const PanelLoops<T>& loops = kernel.panels[panel.kind];
                const T* v = vectors + p * size;
                T* sum = total + p * size;
                // The last row of a panel belongs to the bias: each row of X would end with a 1.
                const int64_t last = X.depth() * panel.width;
                loops.project(x, X.stride(), rows, X.depth(), v, bias ? v + last : nullptr, {}, u);
                const CoefficientTile<T> c(C, row, rows, panel, c_copy);
                loops.combine(rows, c.data, c.stride, u, nullptr, 0, nullptr, t);
                if (!ties.add(window, count, panel, u, t)) in_range = false;
                loops.accumulate(x, X.stride(), rows, X.depth(), t, nullptr, sum);
                if (bias) loops.add_rows(rows, t, sum + last);
            }
        }
        sums.finish(place, total);
    }
};

// The same in bfloat16 with float32 sums: X and C are bfloat16; t is rounded, u is not.
struct RoundedTiedLayer {
    const PairKernels& kernel;
    PairTiles X;
    Matrix<float> C;
    Vectors<float> V;
    WindowTies<float> ties;
    LayerSums<float> sums;
    int64_t windows, per_tile;
    std::atomic<bool>& in_range;

    RoundedTiedLayer(const PairKernels& kernel, const Tensor& x, const Tensor& c, const Tensor& v,
                     const WindowTies<float>& ties, bool bias, const Tensor& result, std::atomic<bool>& in_range)
        : kernel(kernel),
          X(kernel, x, bias),
          C(c),
          V(v),
          ties(ties),
          sums(v, result, rounded_panels(v)),
          windows(x.size(0) / ties.rows()),
          per_tile(windows_of_tile<uint16_t>(X.depth(), ties.rows())),
          in_range(in_range) {}

    double flops() const { return 4. * C.rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return std::max<int64_t>(1, windows / (2 * per_tile)); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, windows), end = sums.begin(place.slice + 1, windows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size, width = panels.width;
        const int64_t own = sums.has_partials() ? 0 : block, most_rows = per_tile * ties.rows();
        const int64_t packed = X.pairs() * width, tile = most_rows * width, row_pairs = ceil_div(most_rows, 2);
        scratch.reset(Scratch::bytes_for<uint32_t>(place.count * packed) + Scratch::bytes_for<float>(own) +
                      Scratch::bytes_for<float>(place.count * width) + 3 * Scratch::bytes_for<float>(tile) +
                      Scratch::bytes_for<uint32_t>(row_pairs * width) +
                      Scratch::bytes_for<uint32_t>(X.scratch_pairs(most_rows)) +
                      Scratch::bytes_for<uint16_t>(X.scratch(most_rows)));
        uint32_t* vectors = scratch.take<uint32_t>(place.count * packed);
        float* own_sums = scratch.take<float>(own);
        float* offsets = scratch.take<float>(place.count * width);
        float* u = scratch.take<float>(tile);
        float* t = scratch.take<float>(tile);
        float* c_copy = scratch.take<float>(tile);
        uint32_t* product = scratch.take<uint32_t>(row_pairs * width);
        uint32_t* x_pairs = scratch.take<uint32_t>(X.scratch_pairs(most_rows));
        uint16_t* x_copy = scratch.take<uint16_t>(X.scratch(most_rows));

        for (int64_t p = 0; p < place.count; ++p) {
            X.pack(V, panels[place.first + p], 0, vectors + p * packed, offsets + p * width);
        }
        float* total = sums.start(place, own_sums);
        for (int64_t window = begin; window < end; window += per_tile) {
            const int64_t count = std::min(per_tile, end - window);
            const int64_t row = window * ties.rows(), rows = count * ties.rows();
            const uint16_t* x = X.get(row, rows, x_copy);
            X.pair(x, rows, x_pairs);
            for (int64_t p = 0; p < place.count; ++p) {
                const PanelPlace panel = panels[place.first + p];
                const PairLoops& loops = kernel.panels[panel.kind];
                loops.project_plain(x, X.stride(), rows, X.pairs(), vectors + p * packed,
                                    X.has_bias() ? offsets + p * width : nullptr, u);
                const CoefficientTile<float> c(C, row, rows, panel, c_copy);
                kernels<float>().panels[panel.kind].combine(rows, c.data, c.stride, u, nullptr, 0, nullptr, t);
                if (!ties.add(window, count, panel, u, t)) in_range = false;
                kernel.round_pairs(t, rows, panel.width, product);
                loops.accumulate(x_pairs, X.entries(), ceil_div(rows, 2), X.entries(), product, total + p * size);
            }
        }
        sums.finish(place, total);
    }
};

void check(const Tensor& X, const Tensor& C, const Tensor& V, const Tensor& first, const Tensor& second,
           const Tensor& K, const OptionalTensor& d1, const OptionalTensor& d2, bool bias) {
    check_compute_dtype("V", V);
    const ScalarType type = V.scalar_type();
    check_rows(X, C, type);
    check_vectors(V, C.size(1), X.size(1) + bias);
    CHECK_VALUE(K.dim() == 3 && K.size(1) == C.size(1) && K.size(0) > 0 && X.size(0) % K.size(0) == 0,
                "K must have shape (windows, ", C.size(1), ", Q), where the windows divide ", X.size(0), " rows, got ",
                K.sizes());
    CHECK_VALUE(d1.has_value() == d2.has_value(), "d1 and d2 must be given together");
    const std::pair<const char*, const Tensor*> indices[] = {{"first", &first}, {"second", &second}};
    for (const auto& [name, index] : indices) {
        check_dtype(name, *index, ScalarType::Long);
        CHECK_VALUE(index->sizes() == K.sizes(), name, " must have shape ", K.sizes(), ", got ", index->sizes());
        check_device(name, *index);
    }
    check_storage("K", K, type);
    const std::pair<const char*, const OptionalTensor*> slopes[] = {{"d1", &d1}, {"d2", &d2}};
    for (const auto& [name, slope] : slopes) {
        if (!*slope) continue;
        check_storage(name, **slope, type);
        CHECK_VALUE((*slope)->sizes() == K.sizes(), name, " must have shape ", K.sizes(), ", got ", (*slope)->sizes());
    }
}

// With `rounded`, and rows and coefficients in bfloat16, all factors may be rounded to bfloat16.
Tensor tied_rows_matvec(const Tensor& X, const Tensor& C, const Tensor& V, const Tensor& first, const Tensor& second,
                        const Tensor& K, const OptionalTensor& d1, const OptionalTensor& d2, bool bias, bool rounded) {
    check(X, C, V, first, second, K, d1, d2, bias);
    const Tensor result = new_like(V);
    if (result.numel() == 0) return result;
    const ScalarType type = V.scalar_type();
    const int64_t rows = X.size(0) / K.size(0);
    const PairKernels* pairs = rounded ? pair_kernels() : nullptr;
    const bool is_short = X.scalar_type() == ScalarType::BFloat16 && C.scalar_type() == ScalarType::BFloat16;
    // The tensors live as long as the layer that reads them.
    const Tensor k = to_dtype(K, type);
    const OptionalTensor up = to_dtype(d1, type), down = to_dtype(d2, type);
    std::atomic<bool> in_range{true};
    with_dtype(type, [&]<typename T>() {
        const WindowTies<T> ties(rows, first, second, k, up, down);
        if constexpr (sizeof(T) == sizeof(float)) {
            if (pairs && is_short) {
                std::list<RoundedTiedLayer> layers;
                layers.emplace_back(*pairs, X, C, V, ties, bias, result, in_range);
                return run_layers(layers);
            }
        }
        std::list<TiedLayer<T>> layers;
        layers.emplace_back(X, C, V, ties, bias, result, in_range);
        run_layers(layers);
    });
    CHECK_INDEX(in_range, "first and second must lie in [0, ", rows, ")");
    return result;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("tied_rows_matvec", TORCH_BOX(&tied_rows_matvec)); }

}  // namespace
}  // namespace s3d
