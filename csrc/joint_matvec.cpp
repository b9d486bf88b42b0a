// Computes S_j v_j for channels that several layers write, theta = [theta_0, theta_1, ...], each with rows of its own.
//
// With u_a = X_a v_a,
//     block a of S v = X_a^T (sum over b of C_ab u_b).
// As in gated_matvec, a task computes all u and their combinations for one tile of rows and one panel in cache, and
// adds them to the sums at once. Nothing of size (N, M) reaches memory.
#include "checks.h"
#include "dtype.h"
#include "layers.h"
#include "panel_choice.h"

namespace s3d {
namespace {

// The place of the coefficients of layers a and b in a list of all pairs a <= b, row by row.
int64_t pair_place(int64_t a, int64_t b, int64_t layers) {
    if (a > b) std::swap(a, b);
    return a * layers - a * (a - 1) / 2 + b - a;
}

// out[n, :] += C[n, :] * u[n, :]; u and out are panels of this width.
template <typename T>
void add_product(int64_t rows, int64_t width, const T* C, int64_t stride, const T* u, T* out) {
    for (int64_t n = 0; n < rows; ++n) {
        const T* c = C + n * stride;
        for (int64_t j = 0; j < width; ++j) out[n * width + j] += c[j] * u[n * width + j];
    }
}

template <typename T>
struct JointLayer {
    const Kernels<T>& kernel;
    std::vector<RowTiles<T>> X;
    std::vector<Matrix<T>> C;
    std::vector<bool> bias;
    Vectors<T> V;
    LayerSums<T> sums;
    int64_t count, rows_per_tile;

    JointLayer(const Tensors& x, const Tensors& c, const Tensor& v, const std::vector<bool>& bias, const Tensor& result)
        : kernel(kernels<T>()), bias(bias), V(v), sums(v, result, choose_panels(kernel, v)), count(x.size()) {
        int64_t deepest = 1;
        for (const Tensor& rows : x) {
            X.emplace_back(Matrix<T>(rows), false);
            deepest = std::max(deepest, X.back().depth());
        }
        for (const Tensor& coefficients : c) C.emplace_back(coefficients);
        rows_per_tile = rows_of_tile<T>(deepest);
    }

    double flops() const { return 4. * C[0].rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return C[0].rows / (2 * rows_per_tile); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, C[0].rows), end = sums.begin(place.slice + 1, C[0].rows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size;
        const int64_t own = sums.has_partials() ? 0 : block, tile = rows_per_tile * panels.width;
        std::size_t bytes =
            Scratch::bytes_for<T>(block) + Scratch::bytes_for<T>(own) + (2 + count) * Scratch::bytes_for<T>(tile);
        for (const RowTiles<T>& rows : X) bytes += Scratch::bytes_for<T>(rows.scratch(rows_per_tile));
        scratch.reset(bytes);
        T* vectors = scratch.take<T>(block);
        T* own_sums = scratch.take<T>(own);
        T* combined = scratch.take<T>(tile);
        T* c_copy = scratch.take<T>(tile);
        std::vector<T*> u(count), x_copy(count);
        std::vector<const T*> x(count);
        for (int64_t a = 0; a < count; ++a) u[a] = scratch.take<T>(tile);
        for (int64_t a = 0; a < count; ++a) x_copy[a] = scratch.take<T>(X[a].scratch(rows_per_tile));

        for (int64_t i = 0; i < place.count; ++i) {
            V.pack(panels[place.first + i], 0, sums.depth, vectors + i * size);
        }
        T* total = sums.start(place, own_sums);
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            for (int64_t a = 0; a < count; ++a) x[a] = X[a].get(row, rows, x_copy[a]);
            for (int64_t i = 0; i < place.count; ++i) {
                const PanelPlace panel = panels[place.first + i];
                const PanelLoops<T>& loops = kernel.panels[panel.kind];
                // The last row of each part belongs to the bias: each row of X would end with a 1.
                const T* v = vectors + i * size;
                for (int64_t a = 0; a < count; ++a) {
                    const int64_t depth = X[a].depth(), last = depth * panel.width;
                    loops.project(x[a], X[a].stride(), rows, depth, v, bias[a] ? v + last : nullptr, {}, u[a]);
                    v += last + bias[a] * panel.width;
                }
                T* sum = total + i * size;
                for (int64_t a = 0; a < count; ++a) {
                    std::fill(combined, combined + rows * panel.width, T(0));
                    for (int64_t b = 0; b < count; ++b) {
                        const CoefficientTile<T> c(C[pair_place(a, b, count)], row, rows, panel, c_copy);
                        add_product(rows, panel.width, c.data, c.stride, u[b], combined);
                    }
                    const int64_t depth = X[a].depth(), last = depth * panel.width;
                    loops.accumulate(x[a], X[a].stride(), rows, depth, combined, nullptr, sum);
                    if (bias[a]) loops.add_rows(rows, combined, sum + last);
                    sum += last + bias[a] * panel.width;
                }
            }
        }
        sums.finish(place, total);
    }
};

void check(const Tensors& X, const Tensors& C, const Tensor& V, const std::vector<bool>& bias) {
    check_compute_dtype("V", V);
    const ScalarType type = V.scalar_type();
    const size_t count = X.size();
    CHECK_VALUE(count > 0 && bias.size() == count && C.size() == count * (count + 1) / 2,
                "X and bias must have one entry per layer, and C one per pair of layers, got ", count, ", ",
                bias.size(), " and ", C.size());
    int64_t depth = 0;
    for (size_t a = 0; a < count; ++a) {
        check_storage("X", X[a], type);
        CHECK_VALUE(X[a].dim() == 2, "X must have shape (N, D), got ", X[a].sizes());
        CHECK_VALUE(X[a].size(0) == X[0].size(0), "X must have as many rows for every layer, got ", X[0].size(0),
                    " and ", X[a].size(0));
        depth += X[a].size(1) + bias[a];
    }
    for (const Tensor& coefficients : C) {
        check_coefficients("C", coefficients, X[0], type);
        CHECK_VALUE(coefficients.sizes() == C[0].sizes(), "C must have shape ", C[0].sizes(), " for every pair, got ",
                    coefficients.sizes());
    }
    check_vectors(V, C[0].size(1), depth);
}

Tensor joint_matvec(const Tensors& X, const Tensors& C, const Tensor& V, const std::vector<bool>& bias) {
    check(X, C, V, bias);
    const Tensor result = new_like(V);
    if (result.numel() == 0) return result;
    with_dtype(V.scalar_type(), [&]<typename T>() {
        std::list<JointLayer<T>> layers;
        layers.emplace_back(X, C, V, bias, result);
        run_layers(layers);
    });
    return result;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("joint_matvec", TORCH_BOX(&joint_matvec)); }

}  // namespace
}  // namespace s3d
