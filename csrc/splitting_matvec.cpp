// Computes S_j v_j for every filter j of one layer, or of every layer in a list, as ((X V^T) * C)^T X.
//
// For each tile of rows, a task computes the product with each of its panels in cache and adds it to the sums at once.
// The (N, M) product never reaches memory.
#include "checks.h"
#include "dtype.h"
#include "layers.h"
#include "panel_choice.h"
#include "rounded_layer.h"

namespace s3d {
namespace {

template <typename T>
struct Layer {
    const Kernels<T>& kernel;
    RowTiles<T> X;
    Matrix<T> C;
    Vectors<T> V;
    LayerSums<T> sums;
    int64_t depth;  // without the bias
    bool bias;
    int64_t rows_per_tile;

    Layer(const Tensor& x, const Tensor& c, const Tensor& v, bool bias, const Tensor& result)
        : kernel(kernels<T>()),
          X(Matrix<T>(x), false),
          C(c),
          V(v),
          sums(v, result, panels_of(kernel, v, x.size(1))),
          depth(X.depth()),
          bias(bias),
          rows_per_tile(rows_of_tile<T>(depth)) {}

    static PanelGrid panels_of(const Kernels<T>& kernel, const Tensor& V, int64_t depth) {
        // Measured: with more filters than these, even a panel that is half empty is faster.
        const int64_t M = V.size(-2), most = depth >= 64 ? 4 : 2;
        if (M <= most && depth >= kernel.lanes) return PanelGrid::single(sets_of(V), M);
        return choose_panels(kernel, V);
    }

    double flops() const { return 4. * C.rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return C.rows / (2 * rows_per_tile); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, C.rows), end = sums.begin(place.slice + 1, C.rows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size, tile = rows_per_tile * panels.width;
        const int64_t own = sums.has_partials() ? 0 : block;
        scratch.reset(Scratch::bytes_for<T>(block) + Scratch::bytes_for<T>(own) + 2 * Scratch::bytes_for<T>(tile) +
                      Scratch::bytes_for<T>(X.scratch(rows_per_tile)));
        T* vectors = scratch.take<T>(block);
        T* own_sums = scratch.take<T>(own);
        T* product = scratch.take<T>(tile);
        T* c_copy = scratch.take<T>(tile);
        T* x_copy = scratch.take<T>(X.scratch(rows_per_tile));

        for (int64_t p = 0; p < place.count; ++p) {
            V.pack(panels[place.first + p], 0, sums.depth, vectors + p * size);
        }
        T* total = sums.start(place, own_sums);
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            const T* x = X.get(row, rows, x_copy);
            for (int64_t p = 0; p < place.count; ++p) {
                const PanelPlace panel = panels[place.first + p];
                const T* v = vectors + p * size;
                T* sum = total + p * size;
                // The last row of a panel belongs to the bias: each row of X would end with a 1.
                const int64_t last = depth * panel.width;
                const T* start = bias ? v + last : nullptr;
                if (panel.kind == PanelPlace::single) {
                    const CoefficientTile<T> c(C, row, rows, panel, c_copy);
                    kernel.turn_filter(x, X.stride(), rows, depth, v, start, c.data, c.stride, sum);
                    continue;
                }
                const PanelLoops<T>& loops = kernel.panels[panel.kind];
                CoefficientTile<T> c(C, row, rows, panel, c_copy);
                if (C.is_direct()) {
                    c.ahead = p + 1 < place.count ? C.at(row, panel.first + panel.width)
                                                  : C.at(row + rows, panels[place.first].first);
                }
                loops.project(x, X.stride(), rows, depth, v, start, c, product);
                const T* ahead = p + 1 < place.count ? nullptr : X.ahead(row + rows);
                loops.accumulate(x, X.stride(), rows, depth, product, ahead, sum);
                if (bias) loops.add_rows(rows, product, sum + last);
            }
        }
        sums.finish(place, total);
    }
};

void check(const Tensor& X, const Tensor& C, const Tensor& V, bool bias) {
    check_compute_dtype("V", V);
    check_rows(X, C, V.scalar_type());
    check_vectors(V, C.size(1), X.size(1) + bias);
}

// Returns whether a layer gains by factors in bfloat16. Measured: dot products of few filters along long rows are
// faster.
bool gains_by_rounding(const Tensor& X, const Tensor& C) {
    const bool stored = X.scalar_type() == ScalarType::BFloat16 && C.scalar_type() == ScalarType::BFloat16;
    return stored && (C.size(1) > 4 || X.size(1) < 64 * C.size(1));
}

// With `rounded`, layers whose rows are bfloat16 may round all factors to bfloat16.
Tensors splitting_matvec_grouped(const Tensors& X, const Tensors& C, const Tensors& V, const std::vector<bool>& bias,
                                 bool rounded) {
    CHECK_VALUE(X.size() == C.size() && X.size() == V.size() && X.size() == bias.size(),
                "X, C, V and bias must have one entry per layer, got ", X.size(), ", ", C.size(), ", ", V.size(),
                " and ", bias.size());
    Tensors results;
    for (size_t i = 0; i < X.size(); ++i) {
        check(X[i], C[i], V[i], bias[i]);
        results.push_back(new_like(V[i]));
    }
    const PairKernels* pairs = rounded ? pair_kernels() : nullptr;
    ItemsByDtype<Layer> layers;
    std::list<RoundedLayer> rounded_layers;
    for (size_t i = 0; i < results.size(); ++i) {
        if (results[i].numel() == 0) continue;
        if (pairs && gains_by_rounding(X[i], C[i])) {
            rounded_layers.emplace_back(*pairs, X[i], C[i], V[i], bias[i], results[i]);
            continue;
        }
        with_dtype(V[i].scalar_type(),
                   [&]<typename T>() { layers.of<T>().emplace_back(X[i], C[i], V[i], bias[i], results[i]); });
    }
    layers.for_each_dtype([](auto& of_dtype) { run_layers(of_dtype); });
    run_layers(rounded_layers);
    return results;
}

Tensor splitting_matvec(const Tensor& X, const Tensor& C, const Tensor& V, bool bias, bool rounded) {
    return splitting_matvec_grouped({X}, {C}, {V}, {bias}, rounded)[0];
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("splitting_matvec", TORCH_BOX(&splitting_matvec));
    m.impl("splitting_matvec_grouped", TORCH_BOX(&splitting_matvec_grouped));
}

}  // namespace
}  // namespace s3d
