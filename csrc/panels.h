// Converts between tensors and panels: packs vectors, writes panels back, and prepares tiles of X and C.
#pragma once

#include <vector>

#include "matrix.h"
#include "parallel.h"

namespace s3d {

// Returns the number of sets of vectors V, (M, D) or (K, M, D).
inline int64_t sets_of(const Tensor& V) { return V.dim() == 3 ? V.size(0) : 1; }

// The filters of a panel: filters [first, first + count) of vector set k. The panel is one of panels[kind] of the
// instruction set, or a single filter.
struct PanelPlace {
    static constexpr int single = -1;
    int64_t k, first, count, width;
    int kind;
};

// The panels that K sets of M filters make. No panel crosses two sets.
class PanelGrid {
 public:
    // All panels have the largest width.
    template <typename T>
    static PanelGrid wide(int64_t K, int64_t M, const Kernels<T>& kernel) {
        return PanelGrid(K, M, kernel, std::vector<int>(ceil_div(M, kernel.wide().width), 0));
    }

    // Each filter is a panel of its own.
    static PanelGrid single(int64_t K, int64_t M) {
        PanelGrid grid(K, M);
        for (int64_t j = 0; j < M; ++j) grid.of_set_.push_back({0, j, 1, 1, PanelPlace::single});
        grid.width = 1;
        return grid;
    }

    // `kinds` are those of the panels of one set.
    template <typename T>
    PanelGrid(int64_t K, int64_t M, const Kernels<T>& kernel, const std::vector<int>& kinds) : PanelGrid(K, M) {
        for (int64_t first = 0; const int kind : kinds) {
            const int64_t own = kernel.panels[kind].width;
            of_set_.push_back({0, first, std::min(own, M - first), own, kind});
            width = std::max(width, own);
            first += own;
        }
    }

    int64_t K, M;
    int64_t width = 0;  // of the widest panel

    int64_t size() const { return K * static_cast<int64_t>(of_set_.size()); }
    PanelPlace operator[](int64_t panel) const {
        const int64_t per_set = of_set_.size();
        PanelPlace place = of_set_[panel % per_set];
        place.k = panel / per_set;
        return place;
    }

 private:
    PanelGrid(int64_t K, int64_t M) : K(K), M(M) {}

    std::vector<PanelPlace> of_set_;
};

// Calls function(begin, end) for short ranges of [0, count). Loops that transpose take one range of all rows after the
// other: rows whose distance is a multiple of a power of two share a few sets of the cache.
template <typename Function>
void for_each_line(int64_t count, const Function& function) {
    constexpr int64_t entries = 16;
    for (int64_t begin = 0; begin < count; begin += entries) function(begin, std::min(begin + entries, count));
}

// The vectors of the filters, (K, M, D), with any strides.
template <typename T>
struct Vectors {
    const T* data;
    int64_t set_stride, filter_stride, entry_stride;

    // V is (M, D) or (K, M, D).
    explicit Vectors(const Tensor& V)
        : data(data_of<T>(V)),
          set_stride(V.dim() == 3 ? V.stride(0) : 0),
          filter_stride(V.stride(-2)),
          entry_stride(V.stride(-1)) {}

    // Returns where entry d of the panel's first filter is.
    const T* at(const PanelPlace& place, int64_t d) const {
        return data + place.k * set_stride + place.first * filter_stride + d * entry_stride;
    }
    T get(const PanelPlace& place, int64_t j, int64_t d) const { return at(place, d)[j * filter_stride]; }

    // panel[d, j] = entry first + d of filter j. Columns without a filter are zero.
    void pack(const PanelPlace& place, int64_t first, int64_t depth, T* panel) const {
        const int64_t width = place.width;
        if (place.count < width) std::memset(panel, 0, depth * width * sizeof(T));
        for_each_line(depth, [&](int64_t begin, int64_t end) {
            for (int64_t j = 0; j < place.count; ++j) {
                for (int64_t d = begin; d < end; ++d) panel[d * width + j] = get(place, j, first + d);
            }
        });
    }
};

// to[j * stride + d] = sum over r of panel[r * panel_stride + (d, j)], added in the order of r.
template <typename T>
void unpack_panels(const T* panel, int64_t panels, int64_t panel_stride, int64_t count, int64_t depth, int64_t width,
                   T* to, int64_t stride) {
    for_each_line(depth, [&](int64_t begin, int64_t end) {
        for (int64_t j = 0; j < count; ++j) {
            for (int64_t d = begin; d < end; ++d) {
                T sum = panel[d * width + j];
                for (int64_t r = 1; r < panels; ++r) sum += panel[r * panel_stride + d * width + j];
                to[j * stride + d] = sum;
            }
        }
    });
}

// Returns the row stride of a scratch matrix, an odd number of cache lines. With an even number, the entries of a
// column would share a few sets of the cache.
template <typename T>
int64_t odd_lines(int64_t columns) {
    const int64_t line = 64 / sizeof(T);
    return (ceil_div(columns, line) | 1) * line;
}

// The most bytes between two rows of X that loops read in place. A column of a tile must not fill its sets of the
// cache.
constexpr int64_t max_direct_stride = 2048;

// Tiles of the rows of X. With a bias, a 1 follows each row. A tile is the memory of X itself if the products can read
// it there, and a copy otherwise.
template <typename T>
class RowTiles {
 public:
    // Loops may read `room` entries beyond the end of a row.
    RowTiles(const Matrix<T>& X, bool bias, int64_t room = 0) : X_(X), bias_(bias) {
        const int64_t bytes = X.row_stride * static_cast<int64_t>(sizeof(T));
        direct_ = X.is_direct() && !bias && room == 0 && bytes <= max_direct_stride;
        stride_ = direct_ ? X.row_stride : odd_lines<T>(depth() + room);
    }

    int64_t depth() const { return X_.columns + bias_; }
    int64_t stride() const { return stride_; }
    int64_t scratch(int64_t rows) const { return direct_ ? 0 : rows * stride_; }

    // Returns where the tile at `row` is to be prefetched; null if it will be a copy, which hardware predicts.
    const T* ahead(int64_t row) const { return direct_ ? X_.at(row, 0) : nullptr; }

    const T* get(int64_t row, int64_t count, T* scratch) const {
        if (direct_) return X_.at(row, 0);
        X_.copy(row, count, 0, X_.columns, scratch, stride_);
        if (bias_) {
            for (int64_t i = 0; i < count; ++i) scratch[i * stride_ + X_.columns] = 1;
        }
        return scratch;
    }

 private:
    Matrix<T> X_;
    bool bias_, direct_;
    int64_t stride_;
};

// A tile of the columns of C that belong to one panel. It is the memory of C itself if the products can read it there,
// and a copy otherwise. Columns without a filter may hold anything: a column of a product depends on no other.
template <typename T>
struct CoefficientTile : Coefficients<T> {
    CoefficientTile(const Matrix<T>& C, int64_t row, int64_t rows, const PanelPlace& place, T* scratch) {
        const int64_t last = row + rows - 1, end = place.first + place.width;
        // What follows the end of a row is the next row.
        if (C.is_direct() && (C.rows - 1 - last) * C.row_stride + C.columns >= end) {
            this->data = C.at(row, place.first);
            this->stride = C.row_stride;
            return;
        }
        if (place.count < place.width) std::memset(scratch, 0, rows * place.width * sizeof(T));
        C.copy(row, rows, place.first, place.count, scratch, place.width);
        this->data = scratch;
        this->stride = place.width;
    }
};

}  // namespace s3d
