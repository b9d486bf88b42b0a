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
#include "rounded_layer.h"

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

// The same in bfloat16 with float32 sums: all X and C are bfloat16, V is float32. The u are not rounded, their
// combinations are.
struct RoundedJointLayer {
    const PairKernels& kernel;
    std::vector<PairTiles> X;
    std::vector<Matrix<uint16_t>> C;
    Vectors<float> V;
    LayerSums<float> sums;
    int64_t count, pairs, rows_per_tile;  // pairs of entries of a vector, without the biases

    RoundedJointLayer(const PairKernels& kernel, const Tensors& x, const Tensors& c, const Tensor& v,
                      const std::vector<bool>& bias, const Tensor& result)
        : kernel(kernel), V(v), sums(v, result, rounded_panels(v)), count(x.size()), pairs(0) {
        int64_t deepest = 1;
        for (int64_t a = 0; a < count; ++a) {
            X.emplace_back(kernel, x[a], bias[a]);
            deepest = std::max(deepest, X[a].depth());
            pairs += X[a].pairs();
        }
        for (const Tensor& coefficients : c) C.push_back(PairTiles::bits_of(coefficients));
        rows_per_tile = rows_of_tile<uint16_t>(deepest);
    }

    double flops() const { return 4. * C[0].rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return C[0].rows / (2 * rows_per_tile); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, C[0].rows), end = sums.begin(place.slice + 1, C[0].rows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size, width = panels.width;
        const int64_t own = sums.has_partials() ? 0 : block, tile = rows_per_tile * width;
        const int64_t packed = pairs * width, row_pairs = ceil_div(rows_per_tile, 2);
        std::size_t bytes = Scratch::bytes_for<uint32_t>(place.count * packed) + Scratch::bytes_for<float>(own) +
                            Scratch::bytes_for<float>(place.count * count * width) +
                            Scratch::bytes_for<uint32_t>(row_pairs * width) +
                            count * (Scratch::bytes_for<float>(tile) + Scratch::bytes_for<uint16_t>(tile));
        for (const PairTiles& rows : X) {
            bytes += Scratch::bytes_for<uint32_t>(rows.scratch_pairs(rows_per_tile)) +
                     Scratch::bytes_for<uint16_t>(rows.scratch(rows_per_tile));
        }
        scratch.reset(bytes);
        uint32_t* vectors = scratch.take<uint32_t>(place.count * packed);
        float* own_sums = scratch.take<float>(own);
        float* offsets = scratch.take<float>(place.count * count * width);
        uint32_t* combined = scratch.take<uint32_t>(row_pairs * width);
        std::vector<float*> u(count);
        std::vector<uint16_t*> x_copy(count), c_copy(count);
        std::vector<uint32_t*> x_pairs(count);
        std::vector<const uint16_t*> x(count);
        std::vector<Coefficients<uint16_t>> c(count);
        for (int64_t a = 0; a < count; ++a) {
            u[a] = scratch.take<float>(tile);
            c_copy[a] = scratch.take<uint16_t>(tile);
            x_pairs[a] = scratch.take<uint32_t>(X[a].scratch_pairs(rows_per_tile));
            x_copy[a] = scratch.take<uint16_t>(X[a].scratch(rows_per_tile));
        }

        for (int64_t i = 0; i < place.count; ++i) {
            uint32_t* v = vectors + i * packed;
            for (int64_t a = 0, first = 0; a < count; first += X[a++].entries()) {
                X[a].pack(V, panels[place.first + i], first, v, offsets + (i * count + a) * width);
                v += X[a].pairs() * width;
            }
        }
        float* total = sums.start(place, own_sums);
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            for (int64_t a = 0; a < count; ++a) {
                x[a] = X[a].get(row, rows, x_copy[a]);
                X[a].pair(x[a], rows, x_pairs[a]);
            }
            for (int64_t i = 0; i < place.count; ++i) {
                const PanelPlace panel = panels[place.first + i];
                const PairLoops& loops = kernel.panels[panel.kind];
                const uint32_t* v = vectors + i * packed;
                for (int64_t a = 0; a < count; ++a) {
                    const float* offset = X[a].has_bias() ? offsets + (i * count + a) * width : nullptr;
                    loops.project_plain(x[a], X[a].stride(), rows, X[a].pairs(), v, offset, u[a]);
                    v += X[a].pairs() * width;
                }
                float* sum = total + i * size;
                for (int64_t a = 0; a < count; ++a) {
                    for (int64_t b = 0; b < count; ++b) {
                        c[b] = rounded_coefficients(C[pair_place(a, b, count)], row, rows, panel, c_copy[b]);
                    }
                    loops.combine(rows, count, c.data(), u.data(), panel.count, combined);
                    loops.accumulate(x_pairs[a], X[a].entries(), ceil_div(rows, 2), X[a].entries(), combined, sum);
                    sum += X[a].entries() * panel.width;
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

// With `rounded`, and rows and coefficients in bfloat16, all factors may be rounded to bfloat16.
Tensor joint_matvec(const Tensors& X, const Tensors& C, const Tensor& V, const std::vector<bool>& bias, bool rounded) {
    check(X, C, V, bias);
    const Tensor result = new_like(V);
    if (result.numel() == 0) return result;
    const auto is_short = [](const Tensor& tensor) { return tensor.scalar_type() == ScalarType::BFloat16; };
    const PairKernels* pairs = rounded ? pair_kernels() : nullptr;
    if (pairs && std::all_of(X.begin(), X.end(), is_short) && std::all_of(C.begin(), C.end(), is_short)) {
        std::list<RoundedJointLayer> layers;
        layers.emplace_back(*pairs, X, C, V, bias, result);
        run_layers(layers);
        return result;
    }
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
