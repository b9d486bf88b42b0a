// Computes S_j v_j for every EdgeConv filter from points alone, without a tensor over edges.
//
// The row of point i and filter j is its winning edge [x_w - x_i, x_i]. With v = [a, b],
//     u = a.x_w + (b - a).x_i,  t = C u,  S v = [sum_i t (x_w - x_i), sum_i t x_i].
// These are products over points, a gather and a scatter. A task takes one panel of filters and a slice of the clouds.
//
// Where a runner-up r nearly ties with the winner, K e e^T is added with e = d1 edge(w) - d2 edge(r). That takes one
// more gather and scatter, and no further product.
#include <memory>

#include "checks.h"
#include "dtype.h"
#include "panels.h"

namespace s3d {
namespace {

constexpr int64_t tile_rows = 96;
constexpr int64_t tasks_per_thread = 8;

// The optional arguments for ties: runner and K, or all four.
struct TieTensors {
    OptionalTensor runner, K, d1, d2;
};

template <typename T, typename Index>
class EdgeConvProduct {
 public:
    // The last dimension of `winner` and of `ties.runner` is contiguous.
    EdgeConvProduct(const Tensor& X, const Tensor& winner, const Tensor& C, const TieTensors& ties, const Tensor& V,
                    bool bias, const Tensor& out)
        : kernel_(kernels<T>()),
          X_(X),
          C_(C),
          V_(V),
          winner_(data_of<Index>(winner)),
          winner_strides_{winner.stride(0), winner.stride(1)},
          cloud_strides_{X.stride(0), C.stride(0)},
          out_(mutable_data_of<T>(out)),
          bias_(bias),
          clouds_(X.size(0)),
          points_(X.size(1)),
          features_(X.size(2)),
          panels_(PanelGrid::wide(sets_of(V), V.size(-2), kernel_)),
          sums_size_((2 * features_ + 1) * panels_.width),
          slices_(std::clamp<int64_t>(ceil_div(thread_count() * tasks_per_thread, panels_.size()), 1, clouds_)),
          partials_(new T[slices_ * panels_.size() * sums_size_]) {
        if (!ties.runner) return;
        runner_ = data_of<Index>(*ties.runner);
        runner_strides_[0] = ties.runner->stride(0);
        runner_strides_[1] = ties.runner->stride(1);
        for (const auto& tensor : {ties.K, ties.d1, ties.d2}) {
            if (!tensor) continue;
            tie_coefficients_.emplace_back(*tensor);
            tie_strides_.push_back(tensor->stride(0));
        }
    }

    void run() {
        std::atomic<bool> in_range{true};
        run_tasks(slices_ * panels_.size(), [&](int64_t task) {
            if (!run_task(task % slices_, task / slices_)) in_range = false;
        });
        CHECK_INDEX(in_range, runner_ ? "winner and runner" : "winner", " must lie in [0, ", points_, ")");
        run_tasks(panels_.size(), [&](int64_t panel) {
            const PanelPlace place = panels_[panel];
            const int64_t depth = 2 * features_ + bias_;
            unpack_panels(partials_.get() + panel * sums_size_, slices_, panels_.size() * sums_size_, place.count,
                          depth, panels_.width, out_ + (place.k * panels_.M + place.first) * depth, depth);
        });
    }

 private:
    // Returns whether all winners are in range. Each winner is checked right before it is used as an index.
    bool run_task(int64_t slice, int64_t panel) const {
        const PanelPlace place = panels_[panel];
        const int64_t width = panels_.width, tile = tile_rows * width;
        const RowTiles<T> any_cloud(X_, false);

        Scratch& scratch = Scratch::of_thread();
        scratch.reset(2 * Scratch::bytes_for<T>(features_ * width) + 2 * Scratch::bytes_for<T>(points_ * width) +
                      5 * Scratch::bytes_for<T>(tile) + Scratch::bytes_for<T>(any_cloud.scratch(tile_rows)) +
                      Scratch::bytes_for<T>(width));
        T* a = scratch.take<T>(features_ * width);
        T* b_less_a = scratch.take<T>(features_ * width);
        T* projected = scratch.take<T>(points_ * width);  // a.x of all points
        T* received = scratch.take<T>(points_ * width);   // sum of t over the edges that a point wins, minus its own t
        T* t = scratch.take<T>(tile);
        T* c_copy = scratch.take<T>(tile);
        T* tie_copies[3] = {scratch.take<T>(tile), scratch.take<T>(tile), scratch.take<T>(tile)};
        T* x_copy = scratch.take<T>(any_cloud.scratch(tile_rows));
        T* offset = scratch.take<T>(width);

        V_.pack(place, 0, features_, a);
        V_.pack(place, features_, features_, b_less_a);
        for (int64_t i = 0; i < features_ * width; ++i) b_less_a[i] -= a[i];
        std::fill(offset, offset + width, T(0));
        for (int64_t j = 0; bias_ && j < place.count; ++j) offset[j] = V_.get(place, j, 2 * features_);

        T* sums = partials_.get() + (slice * panels_.size() + panel) * sums_size_;
        T* sums_a = sums;
        T* sums_b = sums + features_ * width;
        T* sums_bias = sums + 2 * features_ * width;
        std::memset(sums, 0, sums_size_ * sizeof(T));

        for (int64_t cloud = clouds_ * slice / slices_; cloud < clouds_ * (slice + 1) / slices_; ++cloud) {
            const RowTiles<T> X(X_.shifted(cloud * cloud_strides_[0]), false);
            const Matrix<T> C = C_.shifted(cloud * cloud_strides_[1]);
            const Index* winner = winner_ + cloud * winner_strides_[0] + place.first;
            for (int64_t row = 0; row < points_; row += tile_rows) {
                const int64_t rows = std::min(tile_rows, points_ - row);
                const T* x = X.get(row, rows, x_copy);
                kernel_.wide().project(x, X.stride(), rows, features_, a, nullptr, {}, projected + row * width);
            }
            std::memset(received, 0, points_ * width * sizeof(T));
            for (int64_t row = 0; row < points_; row += tile_rows) {
                const int64_t rows = std::min(tile_rows, points_ - row);
                const T* x = X.get(row, rows, x_copy);
                kernel_.wide().project(x, X.stride(), rows, features_, b_less_a, nullptr, {}, t);
                const CoefficientTile<T> c(C, row, rows, place, c_copy);
                const Ties<T, Index> ties = ties_of(cloud, row, rows, place, tie_copies);
                if (!kernel_.template exchange<Index>()(winner + row * winner_strides_[1], winner_strides_[1], row,
                                                        rows, points_, place.count, c.data, c.stride,
                                                        runner_ ? &ties : nullptr, offset, projected, received, t)) {
                    return false;
                }
                kernel_.wide().accumulate(x, X.stride(), rows, features_, t, nullptr, sums_b);
                if (bias_) kernel_.wide().add_rows(rows, t, sums_bias);
            }
            for (int64_t row = 0; row < points_; row += tile_rows) {
                const int64_t rows = std::min(tile_rows, points_ - row);
                kernel_.wide().accumulate(X.get(row, rows, x_copy), X.stride(), rows, features_, received + row * width,
                                          nullptr, sums_a);
            }
        }
        return true;
    }

    Ties<T, Index> ties_of(int64_t cloud, int64_t row, int64_t rows, const PanelPlace& place, T** copies) const {
        Ties<T, Index> ties{};
        if (!runner_) return ties;
        ties.runner = runner_ + cloud * runner_strides_[0] + row * runner_strides_[1] + place.first;
        ties.runner_stride = runner_strides_[1];
        const T** data[] = {&ties.K, &ties.d1, &ties.d2};
        int64_t* strides[] = {&ties.k_stride, &ties.d1_stride, &ties.d2_stride};
        for (size_t i = 0; i < tie_coefficients_.size(); ++i) {
            const Matrix<T> own = tie_coefficients_[i].shifted(cloud * tie_strides_[i]);
            const CoefficientTile<T> tile(own, row, rows, place, copies[i]);
            *data[i] = tile.data;
            *strides[i] = tile.stride;
        }
        return ties;
    }

    const Kernels<T>& kernel_;
    const Matrix<T> X_, C_;  // of the first cloud
    const Vectors<T> V_;
    const Index* const winner_;
    const int64_t winner_strides_[2], cloud_strides_[2];
    T* const out_;
    const bool bias_;
    const int64_t clouds_, points_, features_;
    const PanelGrid panels_;
    const int64_t sums_size_, slices_;
    const std::unique_ptr<T[]> partials_;  // (slices, panels, 2 features + 1, width)
    const Index* runner_ = nullptr;
    int64_t runner_strides_[2];
    std::vector<Matrix<T>> tie_coefficients_;  // K, or K, d1 and d2, of the first cloud
    std::vector<int64_t> tie_strides_;         // between clouds
};

void check_index(const char* name, const Tensor& index, const Tensor& C) {
    const ScalarType type = dtype_of(index);
    CHECK_TYPE(type == ScalarType::Int || type == ScalarType::Long, name, " must be ", ScalarType::Int, " or ",
               ScalarType::Long, ", got ", type);
    CHECK_VALUE(index.sizes() == C.sizes(), name, " must have shape ", C.sizes(), ", got ", index.sizes());
    check_device(name, index);
}

void check(const Tensor& X, const Tensor& winner, const Tensor& C, const Tensor& V, bool bias,
           const OptionalTensor& runner, const OptionalTensor& K, const OptionalTensor& d1, const OptionalTensor& d2) {
    check_compute_dtype("V", V);
    const ScalarType type = V.scalar_type();
    check_storage("X", X, type);
    check_storage("C", C, type);
    CHECK_VALUE(X.dim() == 3, "X must have shape (B, P, F), got ", X.sizes());
    CHECK_VALUE(C.dim() == 3 && C.size(0) == X.size(0) && C.size(1) == X.size(1), "C must have shape (", X.size(0),
                ", ", X.size(1), ", M), got ", C.sizes());
    check_index("winner", winner, C);
    CHECK_VALUE(runner.has_value() == K.has_value() && d1.has_value() == d2.has_value() && (K || !d1),
                "runner and K must be given together, and d1 and d2 with both of them");
    if (runner) check_index("runner", *runner, C);
    const std::pair<const char*, const OptionalTensor*> coefficients[] = {{"K", &K}, {"d1", &d1}, {"d2", &d2}};
    for (const auto& [name, tensor] : coefficients) {
        if (!*tensor) continue;
        check_storage(name, **tensor, type);
        CHECK_VALUE((*tensor)->sizes() == C.sizes(), name, " must have shape ", C.sizes(), ", got ",
                    (*tensor)->sizes());
    }
    check_vectors(V, C.size(2), 2 * X.size(2) + bias);
}

// Edges sorted by the point they come in at. Kernels of GPUs need them; here a scatter takes no order.
using Sorted = std::optional<std::vector<Tensor>>;

Tensor edgeconv_matvec(const Tensor& X, const Tensor& winner, const Tensor& C, const Tensor& V, bool bias,
                       const OptionalTensor& runner, const OptionalTensor& K, const OptionalTensor& d1,
                       const OptionalTensor& d2, const Sorted&, const Sorted&) {
    check(X, winner, C, V, bias, runner, K, d1, d2);
    Tensor result = new_like(V);
    if (result.numel() == 0 || C.numel() == 0) return torch::stable::zero_(result);
    // Indices of two types are read as the wider one.
    const bool is_narrow =
        winner.scalar_type() == ScalarType::Int && (!runner || runner->scalar_type() == ScalarType::Int);
    const auto dense = [&](const Tensor& index) {
        const Tensor same = to_dtype(index, is_narrow ? ScalarType::Int : ScalarType::Long);
        return same.stride(-1) == 1 ? same : as_contiguous(same);
    };
    TieTensors ties{runner, K, d1, d2};
    if (runner) ties.runner = dense(*runner);
    with_dtype(V.scalar_type(), [&]<typename T>() {
        if (is_narrow) {
            EdgeConvProduct<T, int32_t>(X, dense(winner), C, ties, V, bias, result).run();
        } else {
            EdgeConvProduct<T, int64_t>(X, dense(winner), C, ties, V, bias, result).run();
        }
    });
    return result;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("edgeconv_matvec", TORCH_BOX(&edgeconv_matvec)); }

}  // namespace
}  // namespace s3d
