// Computes the dense splitting matrices S_j = sum_n C[n, j] x_n x_n^T of all filters in one pass over the rows.
//
// S_j is symmetric, so the pairs (a, b) with a <= b are enough. The products x_a x_b of a row are the same for all
// filters. They are the rows of a matrix Y, and S = C^T Y is a product of panels. A task takes a block of panels, a
// block of pairs and a slice of the rows.
//
// A panel of a few filters would be mostly empty. Then the columns of X are the panels, and each filter takes a product
// of its own, S_j = X^T (C_j X).
#include <memory>

#include "checks.h"
#include "dtype.h"
#include "layers.h"
#include "panel_choice.h"

namespace s3d {
namespace {

// A tile of Y with this number of rows and pairs stays in the first-level cache while a task reads it for each panel.
constexpr int64_t tile_rows = 96;
constexpr int64_t tile_pairs = 36;
constexpr int64_t pairs_per_block = 576;
constexpr int64_t panels_per_task = 16;

template <typename T>
class DenseMatrices {
 public:
    // With `add`, computes out += weight * S; without it, out = S.
    DenseMatrices(const Tensor& X, const Tensor& C, bool bias, const Tensor& out, T weight, bool add)
        : kernel_(kernels<T>()),
          X_(Matrix<T>(X), bias, kernel_.lanes),
          C_(C),
          out_(mutable_data_of<T>(out)),
          weight_(weight),
          add_(add),
          depth_(X_.depth()),
          pairs_(depth_ * (depth_ + 1) / 2),
          panels_(PanelGrid::wide(1, C.size(1), kernel_)),
          pair_blocks_(ceil_div(pairs_, pairs_per_block)),
          panel_blocks_(ceil_div(panels_.size(), panels_per_task)) {
        const int64_t threads = thread_count();
        const int64_t size = slice_size();
        slices_ = ceil_div(threads * tasks_per_thread, pair_blocks_ * panel_blocks_);
        slices_ = std::min(slices_, C_.rows / (4 * tile_rows));
        slices_ = std::min(slices_, threads * partial_bytes / (size * static_cast<int64_t>(sizeof(T))));
        slices_ = std::max<int64_t>(1, slices_);
        if (slices_ > 1) partials_.reset(new T[slices_ * size]);
    }

    void run() const {
        run_tasks(pair_blocks_ * panel_blocks_ * slices_, [&](int64_t task) {
            run_task(task % slices_, task / slices_ % pair_blocks_, task / slices_ / pair_blocks_);
        });
        if (slices_ == 1) return;
        run_tasks(panels_.size(),
                  [&](int64_t panel) { write(panel, 0, pairs_, partials_.get() + panel * pairs_ * panels_.width); });
    }

 private:
    int64_t slice_size() const { return panels_.size() * pairs_ * panels_.width; }

    void run_task(int64_t slice, int64_t pair_block, int64_t panel_block) const {
        const int64_t width = panels_.width;
        const int64_t first_pair = pairs_ * pair_block / pair_blocks_;
        const int64_t pairs = pairs_ * (pair_block + 1) / pair_blocks_ - first_pair;
        const int64_t first = panel_block * panels_per_task;
        const int64_t count = std::min(panels_per_task, panels_.size() - first);
        const int64_t stride = odd_lines<T>(tile_pairs + kernel_.lanes), c_size = tile_rows * width;

        Scratch& scratch = Scratch::of_thread();
        scratch.reset(Scratch::bytes_for<T>(tile_rows * stride) + Scratch::bytes_for<T>(count * c_size) +
                      Scratch::bytes_for<T>(X_.scratch(tile_rows)) + Scratch::bytes_for<T>(count * pairs * width));
        T* products = scratch.take<T>(tile_rows * stride);
        T* c = scratch.take<T>(count * c_size);
        T* x_copy = scratch.take<T>(X_.scratch(tile_rows));
        T* own_sums = scratch.take<T>(count * pairs * width);

        // Returns where the sums of panel p begin. With several slices, all pairs of a panel are adjacent in memory.
        const auto sums = [&](int64_t p) {
            return slices_ == 1 ? own_sums + p * pairs * width
                                : partials_.get() + slice * slice_size() + ((first + p) * pairs_ + first_pair) * width;
        };
        for (int64_t p = 0; p < count; ++p) std::memset(sums(p), 0, pairs * width * sizeof(T));

        const int64_t begin = C_.rows * slice / slices_, end = C_.rows * (slice + 1) / slices_;
        for (int64_t row = begin; row < end; row += tile_rows) {
            const int64_t rows = std::min(tile_rows, end - row);
            const T* x = X_.get(row, rows, x_copy);
            for (int64_t p = 0; p < count; ++p) {
                const PanelPlace place = panels_[first + p];
                if (place.count < width) std::memset(c + p * c_size, 0, rows * width * sizeof(T));
                C_.copy(row, rows, place.first, place.count, c + p * c_size, width);
            }
            for (int64_t pair = 0; pair < pairs; pair += tile_pairs) {
                const int64_t some = std::min(tile_pairs, pairs - pair);
                kernel_.pair_products(x, X_.stride(), rows, depth_, first_pair + pair, some, products, stride);
                for (int64_t p = 0; p < count; ++p) {
                    kernel_.wide().accumulate(products, stride, rows, some, c + p * c_size, nullptr,
                                              sums(p) + pair * width);
                }
            }
        }
        if (slices_ == 1) {
            for (int64_t p = 0; p < count; ++p) write(first + p, first_pair, pairs, sums(p));
        }
    }

    // Writes the pairs [first_pair, first_pair + pairs) of the panel's filters to both sides of the diagonal.
    void write(int64_t panel, int64_t first_pair, int64_t pairs, const T* sums) const {
        const PanelPlace place = panels_[panel];
        T* to = out_ + place.first * depth_ * depth_;
        int64_t a = 0, skipped = 0;
        while (skipped + depth_ - a <= first_pair) skipped += depth_ - a++;
        int64_t b = a + first_pair - skipped;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            for (int64_t j = 0; j < place.count; ++j) {
                T sum = 0;
                for (int64_t r = 0; r < slices_; ++r) sum += sums[r * slice_size() + pair * panels_.width + j];
                T* matrix = to + j * depth_ * depth_;
                T& upper = matrix[a * depth_ + b];
                T& lower = matrix[b * depth_ + a];
                const T above = add_ ? upper + weight_ * sum : sum, below = add_ ? lower + weight_ * sum : sum;
                upper = above;
                lower = below;
            }
            if (++b == depth_) b = ++a;
        }
    }

    const Kernels<T>& kernel_;
    const RowTiles<T> X_;
    const Matrix<T> C_;
    T* const out_;
    const T weight_;
    const bool add_;
    const int64_t depth_, pairs_;
    const PanelGrid panels_;
    const int64_t pair_blocks_, panel_blocks_;
    int64_t slices_;
    std::unique_ptr<T[]> partials_;  // (slices, panels, pairs, width), or null if there is one slice
};

// S_k for each filter k. Its columns are filters, and its rows entries, of a layer with a set of vectors per filter.
template <typename T>
struct FilterMatrices {
    const Kernels<T>& kernel;
    RowTiles<T> X;
    Matrix<T> C;
    LayerSums<T> sums;
    int64_t rows_per_tile;

    FilterMatrices(const Tensor& x, const Tensor& c, bool bias, const Tensor& result)
        : kernel(kernels<T>()),
          X(Matrix<T>(x), bias, kernel.wide().width),
          C(c),
          sums(result, result, choose_panels(kernel, result)),
          rows_per_tile(rows_of_tile<T>(X.depth())) {}

    double flops() const { return 2. * C.rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return C.rows / (2 * rows_per_tile); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, C.rows), end = sums.begin(place.slice + 1, C.rows);
        const int64_t size = sums.panel_size(), own = sums.has_partials() ? 0 : place.count * size;

        Scratch& scratch = Scratch::of_thread();
        scratch.reset(Scratch::bytes_for<T>(own) + Scratch::bytes_for<T>(rows_per_tile * panels.width) +
                      Scratch::bytes_for<T>(rows_per_tile) + Scratch::bytes_for<T>(panels.width) +
                      Scratch::bytes_for<T>(X.scratch(rows_per_tile)));
        T* own_sums = scratch.take<T>(own);
        T* scaled = scratch.take<T>(rows_per_tile * panels.width);
        T* c = scratch.take<T>(rows_per_tile);
        T* ones = scratch.take<T>(panels.width);
        T* x_copy = scratch.take<T>(X.scratch(rows_per_tile));
        std::fill(ones, ones + panels.width, T(1));

        T* total = sums.start(place, own_sums);
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            const T* x = X.get(row, rows, x_copy);
            for (int64_t p = 0; p < place.count; ++p) {
                const PanelPlace panel = panels[place.first + p];
                const PanelLoops<T>& loops = kernel.panels[panel.kind];
                if (p == 0 || panel.first == 0) C.copy(row, rows, panel.k, 1, c, 1);
                const Coefficients<T> columns{x + panel.first, X.stride()};
                loops.project(c, 1, rows, 1, ones, nullptr, columns, scaled);
                // What lies beyond the diagonal is the other triangle.
                const int64_t depth = std::min(panel.first + panel.width, sums.depth);
                loops.accumulate(x, X.stride(), rows, depth, scaled, nullptr, total + p * size);
            }
        }
        sums.finish(place, total);
    }
};

// Computes S, (M, D, D), or with `add` out += weight * S.
template <typename T>
void compute_by_filter(const Tensor& X, const Tensor& C, bool bias, const Tensor& out, T weight, bool add) {
    const Tensor S = add ? new_like(out) : out;
    std::list<FilterMatrices<T>> layers;
    layers.emplace_back(X, C, bias, S);
    run_layers(layers);
    const int64_t depth = out.size(1);
    run_tasks(out.size(0), [&](int64_t k) {
        T* from = mutable_data_of<T>(S) + k * depth * depth;
        T* to = mutable_data_of<T>(out) + k * depth * depth;
        for (int64_t a = 0; a < depth; ++a) {
            for (int64_t b = 0; b < a; ++b) from[b * depth + a] = from[a * depth + b];
        }
        for (int64_t i = 0; add && i < depth * depth; ++i) to[i] += weight * from[i];
    });
}

// Returns whether a product for each filter takes less time than one with the products of all pairs. Counts are
// multiply-adds per row; the factors were measured with AVX2 and AVX-512.
template <typename T>
bool is_faster_by_filter(int64_t M, int64_t depth) {
    constexpr int64_t per_filter = 128;       // scaling the columns of X, and short loops
    constexpr double forming_pairs = 9. / 8;  // forming the products of pairs as well
    const Kernels<T>& kernel = kernels<T>();
    const PanelGrid columns(1, depth, kernel, choose_panels(kernel, depth));
    int64_t by_filter = per_filter;
    for (int64_t p = 0; p < columns.size(); ++p) {
        by_filter += columns[p].width * std::min(columns[p].first + columns[p].width, depth);
    }
    const int64_t pairs = depth * (depth + 1) / 2, width = kernel.wide().width;
    return M * by_filter < forming_pairs * pairs * ceil_div(M, width) * width;
}

void compute(const Tensor& out, const Tensor& X, const Tensor& C, bool bias, double weight, bool add) {
    if (out.numel() == 0) return;
    with_dtype(out.scalar_type(), [&]<typename T>() {
        if (is_faster_by_filter<T>(out.size(0), out.size(1))) {
            compute_by_filter(X, C, bias, out, static_cast<T>(weight), add);
        } else {
            DenseMatrices<T>(X, C, bias, out, static_cast<T>(weight), add).run();
        }
    });
}

Tensor splitting_matrices(const Tensor& X, const Tensor& C, bool bias) {
    const ScalarType type = compute_dtype(dtype_of(X));
    CHECK_VALUE(X.dim() == 2 && C.dim() == 2, "X must have shape (N, D) and C (N, M), got ", X.sizes(), " and ",
                C.sizes());
    check_rows(X, C, type);
    const int64_t depth = X.size(1) + bias;
    const Tensor out = new_tensor({C.size(1), depth, depth}, X, type);
    compute(out, X, C, bias, 1, false);
    return out;
}

// Computes out += weight * S.
void add_splitting_matrices(const Tensor& out, const Tensor& X, const Tensor& C, bool bias, double weight) {
    check_compute_dtype("out", out);
    check_rows(X, C, out.scalar_type());
    const int64_t depth = X.size(1) + bias;
    const std::vector<int64_t> wanted{C.size(1), depth, depth};
    CHECK_VALUE(out.sizes() == Integers(wanted), "out must have shape ", Integers(wanted), ", got ", out.sizes());
    CHECK_VALUE(out.is_contiguous(), "out must be contiguous");
    check_apart("out", out, "X", X);
    check_apart("out", out, "C", C);
    mark_changed(out);
    compute(out, X, C, bias, weight, true);
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("splitting_matrices", TORCH_BOX(&splitting_matrices));
    m.impl("add_splitting_matrices", TORCH_BOX(&add_splitting_matrices));
}

}  // namespace
}  // namespace s3d
