// Computes S_j v_j for gated units h = act(a.x) psi(b.x), theta = [a, b], whose two halves read the same rows.
//
// With v = [va, vb], p = X va and q = X vb,
//     S v = [X^T (c11 p + c12 q), X^T (c12 p + c22 q)].
// As in splitting_matvec, a task computes p, q and their combinations for one tile of rows and one panel in cache, and
// adds them to the sums at once. Nothing of size (N, M) reaches memory.
#include "checks.h"
#include "dtype.h"
#include "layers.h"
#include "panel_choice.h"

namespace s3d {
namespace {

template <typename T>
struct GatedLayer {
    const Kernels<T>& kernel;
    RowTiles<T> X;
    Matrix<T> c11, c12, c22;
    bool has_c22;
    Vectors<T> V;
    LayerSums<T> sums;
    int64_t depth;  // of one half, without the bias
    bool bias;
    int64_t rows_per_tile;

    GatedLayer(const Tensor& x, const Tensor& first, const Tensor& mixed, const OptionalTensor& second, const Tensor& v,
               bool bias, const Tensor& result)
        : kernel(kernels<T>()),
          X(Matrix<T>(x), false),
          c11(first),
          c12(mixed),
          c22(second ? *second : mixed),
          has_c22(second.has_value()),
          V(v),
          sums(v, result, choose_panels(kernel, v)),
          depth(X.depth()),
          bias(bias),
          rows_per_tile(rows_of_tile<T>(depth)) {}

    double flops() const { return 4. * c11.rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return c11.rows / (2 * rows_per_tile); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, c11.rows), end = sums.begin(place.slice + 1, c11.rows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size;
        const int64_t own = sums.has_partials() ? 0 : block, tile = rows_per_tile * panels.width;
        scratch.reset(Scratch::bytes_for<T>(block) + Scratch::bytes_for<T>(own) + 6 * Scratch::bytes_for<T>(tile) +
                      Scratch::bytes_for<T>(X.scratch(rows_per_tile)));
        T* vectors = scratch.take<T>(block);
        T* own_sums = scratch.take<T>(own);
        T* p = scratch.take<T>(tile);
        T* q = scratch.take<T>(tile);
        T* upper = scratch.take<T>(tile);
        T* copies[3] = {scratch.take<T>(tile), scratch.take<T>(tile), scratch.take<T>(tile)};
        T* x_copy = scratch.take<T>(X.scratch(rows_per_tile));

        for (int64_t i = 0; i < place.count; ++i) {
            V.pack(panels[place.first + i], 0, sums.depth, vectors + i * size);
        }
        T* total = sums.start(place, own_sums);
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            const T* x = X.get(row, rows, x_copy);
            for (int64_t i = 0; i < place.count; ++i) {
                const PanelPlace panel = panels[place.first + i];
                const PanelLoops<T>& loops = kernel.panels[panel.kind];
                const T* v = vectors + i * size;
                // The last row of each half belongs to the bias: each row of X would end with a 1.
                const int64_t last = depth * panel.width, half = last + bias * panel.width;
                loops.project(x, X.stride(), rows, depth, v, bias ? v + last : nullptr, {}, p);
                loops.project(x, X.stride(), rows, depth, v + half, bias ? v + half + last : nullptr, {}, q);
                const CoefficientTile<T> a(c11, row, rows, panel, copies[0]);
                const CoefficientTile<T> b(c12, row, rows, panel, copies[1]);
                loops.combine(rows, a.data, a.stride, p, b.data, b.stride, q, upper);
                if (has_c22) {
                    const CoefficientTile<T> c(c22, row, rows, panel, copies[2]);
                    loops.combine(rows, b.data, b.stride, p, c.data, c.stride, q, q);
                } else {
                    loops.combine(rows, b.data, b.stride, p, nullptr, 0, nullptr, q);
                }
                T* sum = total + i * size;
                loops.accumulate(x, X.stride(), rows, depth, upper, nullptr, sum);
                loops.accumulate(x, X.stride(), rows, depth, q, nullptr, sum + half);
                if (bias) {
                    loops.add_rows(rows, upper, sum + last);
                    loops.add_rows(rows, q, sum + half + last);
                }
            }
        }
        sums.finish(place, total);
    }
};

void check(const Tensor& X, const Tensor& c11, const Tensor& c12, const OptionalTensor& c22, const Tensor& V,
           bool bias) {
    check_compute_dtype("V", V);
    const ScalarType type = V.scalar_type();
    check_storage("X", X, type);
    CHECK_VALUE(X.dim() == 2, "X must have shape (N, D), got ", X.sizes());
    check_coefficients("c11", c11, X, type);
    check_coefficients("c12", c12, X, type);
    CHECK_VALUE(c12.sizes() == c11.sizes(), "c12 must have shape ", c11.sizes(), ", got ", c12.sizes());
    if (c22) {
        check_coefficients("c22", *c22, X, type);
        CHECK_VALUE(c22->sizes() == c11.sizes(), "c22 must have shape ", c11.sizes(), ", got ", c22->sizes());
    }
    check_vectors(V, c11.size(1), 2 * (X.size(1) + bias));
}

Tensor gated_matvec(const Tensor& X, const Tensor& c11, const Tensor& c12, const OptionalTensor& c22, const Tensor& V,
                    bool bias) {
    check(X, c11, c12, c22, V, bias);
    const Tensor result = new_like(V);
    if (result.numel() == 0) return result;
    with_dtype(V.scalar_type(), [&]<typename T>() {
        std::list<GatedLayer<T>> layers;
        layers.emplace_back(X, c11, c12, c22, V, bias, result);
        run_layers(layers);
    });
    return result;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("gated_matvec", TORCH_BOX(&gated_matvec)); }

}  // namespace
}  // namespace s3d
