// Computes S v of one layer in bfloat16 with float32 sums: its vectors, and the product between, are rounded.
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

// X and C are bfloat16, V is float32.
struct RoundedLayer {
    const PairKernels& kernel;
    Matrix<uint16_t> X, C;
    Vectors<float> V;
    LayerSums<float> sums;
    int64_t depth, pairs;  // of X, without the bias
    bool bias;
    int64_t rows_per_tile;

    RoundedLayer(const PairKernels& kernel, const Tensor& x, const Tensor& c, const Tensor& v, bool bias,
                 const Tensor& result)
        : kernel(kernel),
          X(bits_of(x)),
          C(bits_of(c)),
          V(v),
          sums(v, result, panels_of(v)),
          depth(x.size(1)),
          pairs(ceil_div(depth, 2)),
          bias(bias),
          rows_per_tile(rows_of_tile<uint16_t>(depth)) {}

    double flops() const { return 4. * C.rows * sums.depth * sums.panels.K * sums.panels.M; }
    int64_t most_slices() const { return C.rows / (2 * rows_per_tile); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const PanelGrid& panels = sums.panels;
        const int64_t begin = sums.begin(place.slice, C.rows), end = sums.begin(place.slice + 1, C.rows);

        Scratch& scratch = Scratch::of_thread();
        const int64_t size = sums.panel_size(), block = place.count * size, width = panels.width;
        const int64_t own = sums.has_partials() ? 0 : block, row_pairs = ceil_div(rows_per_tile, 2);
        const int64_t x_stride = is_direct() ? X.row_stride : odd_lines<uint16_t>(2 * pairs);
        const int64_t x_size = is_direct() ? 0 : rows_per_tile * x_stride;
        scratch.reset(Scratch::bytes_for<uint32_t>(place.count * pairs * width) + Scratch::bytes_for<float>(own) +
                      Scratch::bytes_for<float>(place.count * width) + Scratch::bytes_for<uint32_t>(row_pairs * width) +
                      Scratch::bytes_for<uint32_t>(row_pairs * sums.depth) + Scratch::bytes_for<uint16_t>(x_size) +
                      Scratch::bytes_for<uint16_t>(rows_per_tile * width));
        uint32_t* vectors = scratch.take<uint32_t>(place.count * pairs * width);
        float* own_sums = scratch.take<float>(own);
        float* offsets = scratch.take<float>(place.count * width);
        uint32_t* product = scratch.take<uint32_t>(row_pairs * width);
        uint32_t* x_pairs = scratch.take<uint32_t>(row_pairs * sums.depth);
        uint16_t* x_copy = scratch.take<uint16_t>(x_size);
        uint16_t* c_copy = scratch.take<uint16_t>(rows_per_tile * width);

        for (int64_t p = 0; p < place.count; ++p) {
            pack(panels[place.first + p], vectors + p * pairs * width, offsets + p * width);
        }
        float* total = sums.start(place, own_sums);
        for (int64_t row = begin; row < end; row += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - row);
            if (!is_direct()) copy_rows(row, rows, x_copy, x_stride);
            const uint16_t* x = is_direct() ? X.at(row, 0) : x_copy;
            kernel.pair_rows(x, x_stride, rows, depth, x_pairs, sums.depth);
            for (int64_t i = 0; bias && i < row_pairs; ++i) x_pairs[i * sums.depth + depth] = two_ones;
            for (int64_t p = 0; p < place.count; ++p) {
                const PanelPlace panel = panels[place.first + p];
                const PairLoops& loops = kernel.panels[panel.kind];
                Coefficients<uint16_t> c{C.at(row, panel.first), C.row_stride};
                if (C.column_stride == 1) {
                    c.ahead = p + 1 < place.count ? c.data + panel.width : C.at(row + rows, panels[place.first].first);
                } else {
                    C.copy(row, rows, panel.first, panel.count, c_copy, width);
                    c = {c_copy, width};
                }
                loops.project(x, x_stride, rows, pairs, vectors + p * pairs * width,
                              bias ? offsets + p * width : nullptr, c, panel.count, product);
                loops.accumulate(x_pairs, sums.depth, ceil_div(rows, 2), sums.depth, product, total + p * size);
            }
        }
        sums.finish(place, total);
    }

 private:
    // Each row of X would end with a 1.
    static constexpr uint32_t two_ones = 0x3f803f80;

    static Matrix<uint16_t> bits_of(const Tensor& tensor) {
        Matrix<uint16_t> bits(tensor);
        bits.storage = Storage::same;
        return bits;
    }

    static PanelGrid panels_of(const Tensor& V) {
        const Kernels<float>& wide = kernels<float>();
        const int64_t M = V.size(-2), most = wide.panels[0].width, left = M % most;
        std::vector<int> kinds(M / most, 0);
        if (left) kinds.push_back(left <= wide.panels[1].width ? 1 : 0);
        return PanelGrid(sets_of(V), M, wide, kinds);
    }

    // Rows of odd length have no last pair.
    bool is_direct() const { return X.column_stride == 1 && depth % 2 == 0 && 2 * X.row_stride <= max_direct_stride; }

    void copy_rows(int64_t row, int64_t rows, uint16_t* to, int64_t stride) const {
        X.copy(row, rows, 0, depth, to, stride);
        for (int64_t i = 0; depth % 2 && i < rows; ++i) to[i * stride + depth] = 0;
    }

    void pack(const PanelPlace& place, uint32_t* panel, float* offset) const {
        std::memset(panel, 0, pairs * place.width * sizeof(uint32_t));
        std::memset(offset, 0, place.width * sizeof(float));
        for (int64_t d = 0; d < depth; ++d) {
            for (int64_t j = 0; j < place.count; ++j) {
                const uint32_t rounded = round_to_bfloat16(V.get(place, j, d));
                panel[d / 2 * place.width + j] |= rounded << (d % 2 * 16);
            }
        }
        for (int64_t j = 0; bias && j < place.count; ++j) offset[j] = V.get(place, j, depth);
    }
};

}  // namespace s3d
