// Computes S_j v_j for every filter j of one layer, or of every layer in a list, as ((X V^T) * C)^T X.
//
// A task takes a block of panels of one layer and a slice of its rows. For each tile of rows, the task computes the
// product with each panel in cache and adds it to the sums at once. The (N, M) product never reaches memory. Each slice
// of rows has its own partial sums. A second pass adds them in a fixed order, so that results do not depend on timing.
#include <memory>

#include "checks.h"
#include "dtype.h"
#include "operator.h"
#include "panels.h"

namespace s3d {
namespace {

// With D up to a few hundred, a tile of X stays in the second-level cache and its product in the first.
constexpr int64_t tile_rows = 96;
constexpr int64_t tile_bytes = 192 << 10;
// The most memory for the vectors of one task. Its sums take as much again.
constexpr int64_t block_bytes = 1 << 20;
// The most memory for the partial sums of all layers, per thread.
constexpr int64_t partial_bytes = 2 << 20;
// Several tasks per thread even out the lengths of tasks.
constexpr int64_t tasks_per_thread = 8;
constexpr double least_flops_per_task = 1e6;

template <typename T>
struct Layer {
    const Kernels<T>& kernel;
    RowTiles<T> X;
    Matrix<T> C;
    Vectors<T> V;
    T* out;  // (K, M, D)
    PanelGrid panels;
    int64_t depth, rows_per_tile;
    int64_t row_slices = 1, panels_per_task = 1;
    std::unique_ptr<T[]> partials;  // (row_slices, panels, depth, width), or null if there is one slice

    Layer(const at::Tensor& x, const at::Tensor& c, const at::Tensor& v, bool bias, const at::Tensor& result)
        : kernel(kernels<T>()),
          X(Matrix<T>(x), bias),
          C(c),
          V(v),
          out(result.mutable_data_ptr<T>()),
          panels(v.dim() == 3 ? v.size(0) : 1, v.size(-2), kernel.width),
          depth(X.depth()) {
        const int64_t fitting = tile_bytes / (depth * static_cast<int64_t>(sizeof(T)));
        rows_per_tile = std::clamp<int64_t>(fitting, 8, tile_rows);
    }

    double flops() const { return 4. * C.rows * depth * panels.size() * panels.width; }
    int64_t panel_size() const { return depth * panels.width; }
    int64_t sums_size() const { return panels.size() * panel_size(); }
    int64_t panel_blocks() const { return ceil_div(panels.size(), panels_per_task); }
    int64_t tasks() const { return row_slices * panel_blocks(); }

    // Divides the layer into tasks. It divides the rows first, because partial sums are cheap. It divides the panels if
    // the layer has too few rows or if the sums are too large. The partial sums may take `budget` bytes. Returns the
    // bytes that they take.
    int64_t divide(double flops_per_task, int64_t budget) {
        const int64_t wanted = std::max<int64_t>(1, static_cast<int64_t>(flops() / flops_per_task));
        const int64_t entry = sizeof(T), largest_block = std::max<int64_t>(1, block_bytes / (panel_size() * entry));
        int64_t blocks = ceil_div(panels.size(), largest_block);
        row_slices = std::min(ceil_div(wanted, blocks), C.rows / (2 * rows_per_tile));
        row_slices = std::max<int64_t>(1, std::min(row_slices, budget / (sums_size() * entry)));
        blocks = std::min(panels.size(), std::max(blocks, ceil_div(wanted, row_slices)));
        panels_per_task = ceil_div(panels.size(), blocks);
        if (row_slices == 1) return 0;
        partials.reset(new T[row_slices * sums_size()]);
        return row_slices * sums_size() * entry;
    }

    void run(int64_t task) const {
        const int64_t slice = task % row_slices, first = task / row_slices * panels_per_task;
        const int64_t count = std::min(panels_per_task, panels.size() - first);
        const int64_t begin = C.rows * slice / row_slices, end = C.rows * (slice + 1) / row_slices;

        Scratch& scratch = Scratch::of_thread();
        const int64_t block = count * panel_size(), tile = rows_per_tile * panels.width;
        const int64_t own = partials ? 0 : block;
        scratch.reset(Scratch::bytes_for<T>(block) + Scratch::bytes_for<T>(own) + 2 * Scratch::bytes_for<T>(tile) +
                      Scratch::bytes_for<T>(X.scratch(rows_per_tile)));
        T* vectors = scratch.take<T>(block);
        T* own_sums = scratch.take<T>(own);
        T* product = scratch.take<T>(tile);
        T* c_copy = scratch.take<T>(tile);
        T* x_copy = scratch.take<T>(X.scratch(rows_per_tile));

        for (int64_t p = 0; p < count; ++p) {
            V.pack(panels[first + p], 0, depth, panels.width, vectors + p * panel_size());
        }
        T* sums = partials ? partials.get() + slice * sums_size() + first * panel_size() : own_sums;
        std::memset(sums, 0, block * sizeof(T));
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            const T* x = X.get(row, rows, x_copy);
            for (int64_t p = 0; p < count; ++p) {
                const CoefficientTile<T> c(C, row, rows, panels[first + p], panels.width, c_copy);
                kernel.project(x, X.stride(), rows, depth, vectors + p * panel_size(), c.data, c.stride, product);
                kernel.accumulate(x, X.stride(), rows, depth, product, sums + p * panel_size());
            }
        }
        for (int64_t p = 0; !partials && p < count; ++p) write(first + p, sums + p * panel_size());
    }

    void write(int64_t panel, const T* sums) const {
        const PanelPlace place = panels[panel];
        T* to = out + (place.k * panels.M + place.first) * depth;
        unpack_panels(sums, row_slices, sums_size(), place.count, depth, panels.width, to, depth);
    }

    void add_slices(int64_t panel) const { write(panel, partials.get() + panel * panel_size()); }
};

template <typename T>
void run_layers(std::list<Layer<T>>& layers) {
    const int64_t threads = at::get_num_threads();
    double total = 0;
    for (const Layer<T>& layer : layers) total += layer.flops();
    const double per_task = std::max(least_flops_per_task, total / static_cast<double>(threads * tasks_per_thread));

    std::vector<std::pair<const Layer<T>*, int64_t>> tasks, sums;
    int64_t budget = threads * partial_bytes;
    for (Layer<T>& layer : layers) {
        budget -= layer.divide(per_task, budget);
        for (int64_t i = 0; i < layer.tasks(); ++i) tasks.emplace_back(&layer, i);
        for (int64_t p = 0; layer.row_slices > 1 && p < layer.panels.size(); ++p) sums.emplace_back(&layer, p);
    }
    run_tasks(tasks.size(), [&](int64_t i) { tasks[i].first->run(tasks[i].second); });
    run_tasks(sums.size(), [&](int64_t i) { sums[i].first->add_slices(sums[i].second); });
}

// The result is contiguous, even if V is not.
at::Tensor result_like(const at::Tensor& V) {
    return at::empty(V.sizes(), V.options().memory_format(at::MemoryFormat::Contiguous));
}

void check(const at::Tensor& X, const at::Tensor& C, const at::Tensor& V, bool bias) {
    check_compute_dtype("V", V);
    check_rows(X, C, V);
    check_vectors(V, C.size(1), X.size(1) + bias);
}

std::vector<at::Tensor> splitting_matvec_grouped_meta(at::TensorList X, at::TensorList C, at::TensorList V,
                                                      c10::List<bool> bias) {
    TORCH_CHECK_VALUE(X.size() == C.size() && X.size() == V.size() && X.size() == bias.size(),
                      "X, C, V and bias must have one entry per layer, got ", X.size(), ", ", C.size(), ", ", V.size(),
                      " and ", bias.size());
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < X.size(); ++i) {
        check(X[i], C[i], V[i], bias[i]);
        results.push_back(result_like(V[i]));
    }
    return results;
}

std::vector<at::Tensor> splitting_matvec_grouped(at::TensorList X, at::TensorList C, at::TensorList V,
                                                 c10::List<bool> bias) {
    std::vector<at::Tensor> results = splitting_matvec_grouped_meta(X, C, V, bias);
    ItemsByDtype<Layer> layers;
    for (size_t i = 0; i < results.size(); ++i) {
        if (results[i].numel() == 0) continue;
        with_dtype(V[i].scalar_type(),
                   [&]<typename T>() { layers.of<T>().emplace_back(X[i], C[i], V[i], bias[i], results[i]); });
    }
    layers.for_each_dtype([](auto& of_dtype) { run_layers(of_dtype); });
    return results;
}

at::Tensor splitting_matvec_meta(const at::Tensor& X, const at::Tensor& C, const at::Tensor& V, bool bias) {
    check(X, C, V, bias);
    return result_like(V);
}

at::Tensor splitting_matvec(const at::Tensor& X, const at::Tensor& C, const at::Tensor& V, bool bias) {
    return splitting_matvec_grouped({X}, {C}, {V}, c10::List<bool>({bias}))[0];
}

TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    register_operator(m, "splitting_matvec(Tensor X, Tensor C, Tensor V, bool bias) -> Tensor", splitting_matvec,
                      splitting_matvec_meta);
    register_operator(m, "splitting_matvec_grouped(Tensor[] X, Tensor[] C, Tensor[] V, bool[] bias) -> Tensor[]",
                      splitting_matvec_grouped, splitting_matvec_grouped_meta);
}

}  // namespace
}  // namespace s3d
