// Computes S v in bfloat16 with float32 sums: vectors, and the product between, are rounded.
#pragma once

#include <bit>

#include "layers.h"

namespace s3d {

// Returns the nearest bfloat16; of two, the even one. NaN stays NaN.
inline uint16_t round_to_bfloat16(float number) {
    const uint32_t bits = std::bit_cast<uint32_t>(number);
    if (number != number) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Tiles of rows of X in bfloat16: for the first product as they are, for the second one in pairs of rows.
class PairTiles {
 public:
    PairTiles(const PairKernels& kernel, const Tensor& x, bool bias)
        : kernel_(kernel),
          X_(bits_of(x)),
          bias_(bias),
          // Rows of odd length have no last pair.
          direct_(X_.column_stride == 1 && depth() % 2 == 0 && 2 * X_.row_stride <= max_direct_stride),
          stride_(direct_ ? X_.row_stride : odd_lines<uint16_t>(2 * pairs())) {}

    int64_t rows() const { return X_.rows; }
    int64_t depth() const { return X_.columns; }  // without the bias
    int64_t entries() const { return X_.columns + bias_; }
    int64_t pairs() const { return ceil_div(X_.columns, 2); }
    int64_t stride() const { return stride_; }
    bool has_bias() const { return bias_; }

    // Entries of memory for a tile, and pairs of entries for its pairs of rows.
    int64_t scratch(int64_t rows) const { return direct_ ? 0 : rows * stride_; }
    int64_t scratch_pairs(int64_t rows) const { return ceil_div(rows, 2) * entries(); }

    const uint16_t* get(int64_t row, int64_t rows, uint16_t* copy) const {
        if (direct_) return X_.at(row, 0);
        X_.copy(row, rows, 0, depth(), copy, stride_);
        for (int64_t i = 0; depth() % 2 && i < rows; ++i) copy[i * stride_ + depth()] = 0;
        return copy;
    }

    // Pairs the rows of a tile; with a bias, each would end with a 1.
    void pair(const uint16_t* tile, int64_t rows, uint32_t* to) const {
        constexpr uint32_t two_ones = 0x3f803f80;
        kernel_.pair_rows(tile, stride_, rows, depth(), to, entries());
        for (int64_t i = 0; bias_ && i < ceil_div(rows, 2); ++i) to[i * entries() + depth()] = two_ones;
    }

    // Packs what the vectors say about these rows, from entry `first` on: pairs of entries, and the bias.
    void pack(const Vectors<float>& V, const PanelPlace& place, int64_t first, uint32_t* panel, float* offset) const {
        std::memset(panel, 0, pairs() * place.width * sizeof(uint32_t));
        std::memset(offset, 0, place.width * sizeof(float));
        if (V.entry_stride == 1) {
            kernel_.pack_pairs(V.at(place, first), V.filter_stride, place.count, depth(), place.width, panel);
        } else {
            for (int64_t d = 0; d < depth(); ++d) {
                for (int64_t j = 0; j < place.count; ++j) {
                    const uint32_t rounded = round_to_bfloat16(V.get(place, j, first + d));
                    panel[d / 2 * place.width + j] |= rounded << (d % 2 * 16);
                }
            }
        }
        for (int64_t j = 0; bias_ && j < place.count; ++j) offset[j] = V.get(place, j, first + depth());
    }

    static Matrix<uint16_t> bits_of(const Tensor& tensor) {
        Matrix<uint16_t> bits(tensor);
        bits.storage = Storage::same;
        return bits;
    }

 private:
    const PairKernels& kernel_;
    Matrix<uint16_t> X_;
    bool bias_, direct_;
    int64_t stride_;
};

// Panels as wide as those of float32, which the loops in bfloat16 share.
inline PanelGrid rounded_panels(const Tensor& V) {
    const Kernels<float>& wide = kernels<float>();
    const int64_t M = V.size(-2), most = wide.panels[0].width, left = M % most;
    std::vector<int> kinds(M / most, 0);
    if (left) kinds.push_back(left <= wide.panels[1].width ? 1 : 0);
    return PanelGrid(sets_of(V), M, wide, kinds);
}

// Coefficients of some rows and the filters of a panel, in place if loops can read them there.
inline Coefficients<uint16_t> rounded_coefficients(const Matrix<uint16_t>& C, int64_t row, int64_t rows,
                                                   const PanelPlace& panel, uint16_t* copy) {
    if (C.column_stride == 1) return {C.at(row, panel.first), C.row_stride};
    C.copy(row, rows, panel.first, panel.count, copy, panel.width);
    return {copy, panel.width};
}

// One layer. X and C are bfloat16, V is float32.
struct RoundedLayer {
    const PairKernels& kernel;
    PairTiles X;
    Matrix<uint16_t> C;
    Vectors<float> V;
    LayerSums<float> sums;
    int64_t rows_per_tile;

    RoundedLayer(const PairKernels& kernel, const Tensor& x, const Tensor& c, const Tensor& v, bool bias,
                 const Tensor& result)
        : kernel(kernel),
          X(kernel, x, bias),
          C(PairTiles::bits_of(c)),
          V(v),
          sums(v, result, rounded_panels(v)),
          rows_per_tile(rows_of_tile<uint16_t>(X.depth())) {}

    double flops() const { return 4. * C.rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return C.rows / (2 * rows_per_tile); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, C.rows), end = sums.begin(place.slice + 1, C.rows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size, width = panels.width;
        const int64_t own = sums.has_partials() ? 0 : block, row_pairs = ceil_div(rows_per_tile, 2);
        const int64_t packed = X.pairs() * width;
        scratch.reset(Scratch::bytes_for<uint32_t>(place.count * packed) + Scratch::bytes_for<float>(own) +
                      Scratch::bytes_for<float>(place.count * width) + Scratch::bytes_for<uint32_t>(row_pairs * width) +
                      Scratch::bytes_for<uint32_t>(X.scratch_pairs(rows_per_tile)) +
                      Scratch::bytes_for<uint16_t>(X.scratch(rows_per_tile)) +
                      Scratch::bytes_for<uint16_t>(rows_per_tile * width));
        uint32_t* vectors = scratch.take<uint32_t>(place.count * packed);
        float* own_sums = scratch.take<float>(own);
        float* offsets = scratch.take<float>(place.count * width);
        uint32_t* product = scratch.take<uint32_t>(row_pairs * width);
        uint32_t* x_pairs = scratch.take<uint32_t>(X.scratch_pairs(rows_per_tile));
        uint16_t* x_copy = scratch.take<uint16_t>(X.scratch(rows_per_tile));
        uint16_t* c_copy = scratch.take<uint16_t>(rows_per_tile * width);

        for (int64_t p = 0; p < place.count; ++p) {
            X.pack(V, panels[place.first + p], 0, vectors + p * packed, offsets + p * width);
        }
        float* total = sums.start(place, own_sums);
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            const uint16_t* x = X.get(row, rows, x_copy);
            X.pair(x, rows, x_pairs);
            for (int64_t p = 0; p < place.count; ++p) {
                const PanelPlace panel = panels[place.first + p];
                const PairLoops& loops = kernel.panels[panel.kind];
                Coefficients<uint16_t> c = rounded_coefficients(C, row, rows, panel, c_copy);
                if (C.column_stride == 1) {
                    c.ahead = p + 1 < place.count ? c.data + panel.width : C.at(row + rows, panels[place.first].first);
                }
                loops.project(x, X.stride(), rows, X.pairs(), vectors + p * packed,
                              X.has_bias() ? offsets + p * width : nullptr, c, panel.count, product);
                loops.accumulate(x_pairs, X.entries(), ceil_div(rows, 2), X.entries(), product, total + p * size);
            }
        }
        sums.finish(place, total);
    }
};

}  // namespace s3d
