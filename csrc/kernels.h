// Declares the table of inner loops that every instruction set provides, and the choice between the sets.
//
// A panel is a block of `width` filters. Entry (d, j) of a panel, where j is the filter, is at [d * width + j]. All
// products use whole panels, so the loops need no special case for the last filters.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace s3d {

// The smooth part of act''. The numbers are arguments of the operators: see FORMULAS in backends/cpu.py.
enum class Curvature : int64_t { none, silu, gelu, gelu_tanh, softplus, tanh, sigmoid, elu, hardswish, gaussian };

// act''(z) = curvature(z) + sum over kinks of jump * sharpness * sigmoid'(sharpness * (z - at)).
struct CurvatureFormula {
    Curvature curvature = Curvature::none;
    double a = 0, b = 0;  // none: the slope before the first kink; softplus: beta and threshold; elu: alpha
    static constexpr int max_kinks = 8;
    int kinks = 0;
    double kink_at[max_kinks], kink_jump[max_kinks];
    double sharpness = 1;
};

template <std::size_t size>
struct IntegerOfSize;
template <>
struct IntegerOfSize<4> {
    typedef int32_t type;
};
template <>
struct IntegerOfSize<8> {
    typedef int64_t type;
};
template <typename T>
using Integer = typename IntegerOfSize<sizeof(T)>::type;

// The columns of the old row that the entries of a new row copy. Entry i copies index[i]. Block b is `lanes` entries of
// the new row. If one vector of the old row holds them all, that vector begins at first[b], and entry i is at place[i]
// in it. Otherwise first[b] is -1.
template <typename T>
struct Columns {
    const int64_t* index;
    const int64_t* first;
    const Integer<T>* place;
};

// Places of a line that take the same taps of a convolution: first + i * step for i < count. Place i is a sum over
// c < taps of the weight's column tap[c] times the input's column place[c] + i * advance.
struct TapRun {
    int64_t first, step, count;
    const int64_t *tap, *place;
    int64_t taps, advance;
};

// The widths of kinks: across[n] * along[k] * entries[n, k] at row n and entry k; a kink whose width is zero or
// subnormal adds nothing. Whatever is null counts as 1.
template <typename T>
struct KinkWidths {
    const T *across, *along, *entries, *across_scale, *along_scale;
};

// The runners-up of EdgeConv's maxima, with their coefficients and slopes, for some rows and the filters of a panel.
template <typename T, typename Index>
struct Ties {
    const Index* runner;
    int64_t runner_stride;
    const T* K;
    int64_t k_stride;
    const T *d1, *d2;  // null if all slopes are 1
    int64_t d1_stride, d2_stride;
};

// The exchange between the points of a cloud. For each of `rows` points, n, where `first` is the first point, with
// w = winner[n, :] and u = t[n, :] + offset[:] + projected[w, :],
//     t[n, :] = C[n, :] * u,  received[w, :] += t[n, :],  received[first + n, :] -= t[n, :].
// With ties, r = runner[n, :] and tau = K[n, :] * (d1[n, :] * u - d2[n, :] * u'), where u' has r in place of w; in
// addition, received[w, :] += d1 * tau, received[r, :] -= d2 * tau, and t[n, :] += (d1 - d2) * tau before it is
// subtracted. If d1 and d2 are null, both are 1.
// t, projected and received are panels of the largest width, and the first `count` columns are filters. The loop
// stops and returns false if a winner or a runner-up is not in [0, points).
template <typename T, typename Index>
using ExchangeLoop = bool (*)(const Index* winner, int64_t winner_stride, int64_t first, int64_t rows, int64_t points,
                              int64_t count, const T* C, int64_t c_stride, const Ties<T, Index>* ties, const T* offset,
                              const T* projected, T* received, T* t);

// Windows of `taps` places, one after the other: window i begins i * advance places later than the first. With channels
// c, u[t] = weight[t][c] * d[i * advance * channels + d_place[t] + c], and entry (t, s) of the lower triangle G is
// gram[i * advance + gram_place[t (t + 1) / 2 + s]]. Entries off the diagonal count for both triangles.
template <typename T>
struct Windows {
    int64_t taps, count, advance;
    const T* const* weight;
    const T* d;
    const int64_t* d_place;
    const T* gram;
    const int64_t* gram_place;
};

// Coefficients of some rows and the filters of a panel: entry (n, j) is at data[n * stride + j]. If `data` is null, all
// are 1. The loop that reads them prefetches what is read next, as many rows and columns from `ahead`, unless it is
// null.
template <typename T>
struct Coefficients {
    const T* data = nullptr;
    int64_t stride = 0;
    const T* ahead = nullptr;
};

// The loops over panels of one width.
template <typename T>
struct PanelLoops {
    int width;    // filters per panel; 0 if the set has no such panel
    int vectors;  // vectors per row of a panel

    // Computes s = x s + y `count` times for each of `fma_chains` vectors, to measure what a multiply-add takes.
    T (*multiply_adds)(int64_t count, T x, T y);

    // U[n, :] = C[n, :] * (start[:] + sum_d X[n, d] V[d, :]). If start is null, it is 0.
    // X is (rows, depth) with row stride x_stride. V is a panel of `depth` rows. U is a panel of `rows` rows.
    void (*project)(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* V, const T* start,
                    const Coefficients<T>& C, T* U);

    // out[d, :] += sum_n X[n, d] U[n, :]. Prefetches as many rows from `ahead`, unless it is null.
    void (*accumulate)(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* U, const T* ahead, T* out);

    // out[:] += sum_n U[n, :].
    void (*add_rows)(int64_t rows, const T* U, T* out);

    // out[n, :] = A[n, :] * r[n, :] + B[n, :] * s[n, :]. If B is null, the second term is absent.
    // A and B have the row strides a_stride and b_stride. r, s and out are panels of `rows` rows; out may be r or s.
    void (*combine)(int64_t rows, const T* A, int64_t a_stride, const T* r, const T* B, int64_t b_stride, const T* s,
                    T* out);
};
constexpr int fma_chains = 12;

template <typename T>
struct Kernels {
    int lanes;      // entries per vector
    bool emulated;  // whether the loops stand for those of another set, in tests

    // Widest first.
    std::array<PanelLoops<T>, 3> panels;
    const PanelLoops<T>& wide() const { return panels[0]; }

    // For one filter, with u[n] = c[n] (start + X[n, :] . v), out[:] += sum_n u[n] X[n, :] and out[depth] += sum_n
    // u[n]. If start is null, it is 0, and out has no entry [depth]. `depth` is at least `lanes`.
    void (*turn_filter)(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* v, const T* start,
                        const T* c, int64_t c_stride, T* out);

    // One line of a depthwise convolution. For each place i of the run, with o = run.first + i * run.step,
    //     out[o, :] = sum over r < rows and c < run.taps of weight[row_tap[r] * kernel_columns + run.tap[c], :]
    //                 * in[row_place[r] * in_columns + run.place[c] + i * run.advance, :].
    // in, weight and out are panels of the largest width.
    void (*stencil)(const TapRun& run, const int64_t* row_tap, const int64_t* row_place, int64_t rows, const T* in,
                    int64_t in_columns, const T* weight, int64_t kernel_columns, T* out);

    // out[s, x] = sum_d a[d, x] b[d, x + first + s * step] for s < count and x < columns. a and b have `depth` rows
    // with row stride `stride`, and out has row stride out_stride. The loop handles whole vectors: it reads up to lanes
    // - 1 entries beyond the last column, and writes as many.
    void (*shifted_dots)(const T* a, const T* b, int64_t stride, int64_t depth, int64_t columns, int64_t first,
                         int64_t step, int64_t count, T* out, int64_t out_stride);

    // out[i, c] = max(0, sum over s <= t < taps of G[t, s] u[t] u[s]) for each window i and channel c: see Windows.
    // `work` has room for 2 * lanes * taps entries.
    void (*window_norms)(const Windows<T>& windows, int64_t channels, T* work, T* out);

    // The exchange between the points of an EdgeConv layer, for either type of indices.
    ExchangeLoop<T, int32_t> exchange_int32;
    ExchangeLoop<T, int64_t> exchange_int64;
    template <typename Index>
    ExchangeLoop<T, Index> exchange() const {
        if constexpr (sizeof(Index) == sizeof(int32_t)) {
            return exchange_int32;
        } else {
            return exchange_int64;
        }
    }

    // Y[n, p] = X[n, a] X[n, b] for pairs a <= b in the order (0, 0), (0, 1), ..., (1, 1), .... Pair `first` is the
    // first of `pairs` pairs. The loop reads up to lanes - 1 entries beyond the end of a row of X, and writes as many
    // beyond the end of a row of Y.
    void (*pair_products)(const T* X, int64_t x_stride, int64_t rows, int64_t depth, int64_t first, int64_t pairs, T* Y,
                          int64_t y_stride);

    // out[n] = g[n] * act''(z[n]) * factor * scale[n]^2. If scale is null, scale[n] is 1. out may be g.
    void (*curvature)(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, T factor, int64_t count,
                      T* out);

    // The same for `rows` rows of `count` entries, where a kink has the sharpness 1 / width and the factor is
    // (across_scale[n] * along_scale[k])^2: see KinkWidths.
    void (*curvature_rows)(const CurvatureFormula& formula, const KinkWidths<T>& widths, const T* g, const T* z,
                           int64_t rows, int64_t count, T* out);

    // out[n] = act'(z[n]) * factor * scale[n]. If scale is null, scale[n] is 1.
    void (*slopes)(const CurvatureFormula& formula, const T* z, const T* scale, T factor, int64_t count, T* out);

    // sum_i a[i] b[i].
    T (*dot)(const T* a, const T* b, int64_t count);

    // y += factor * x.
    void (*add)(T factor, const T* x, int64_t count, T* y);

    // out[i] = (row[columns[i]] * row_scale + shift_scale * shift[columns[i]]) * column_scale[i].
    // If shift is null, it is 0. If columns is null, columns[i] is i. If column_scale is null, it is 1. The caller has
    // checked that all columns are in range.
    void (*grow_row)(const T* row, T row_scale, const T* shift, T shift_scale, const Columns<T>* columns,
                     const T* column_scale, int64_t count, T* out);
};

// Loops that convert 16-bit numbers to float.
struct Widen {
    void (*bfloat16)(const uint16_t* from, int64_t count, float* to);
    void (*float16)(const uint16_t* from, int64_t count, float* to);
};

// The loops over panels of one width in bfloat16, with float32 sums. Numbers come in pairs, the first in the lower
// half: a pair takes the place of a number in the panels V and U.
struct PairLoops {
    int width;

    // Pair p of U, (ceil(rows / 2), width), is rows 2 p and 2 p + 1 of C[n, :] * (start[:] + sum_k X[n, k] . V[k, :]),
    // or one row and zero. X has `pairs` pairs per row, and C has `count` columns. If start is null, it is 0.
    void (*project)(const uint16_t* X, int64_t x_stride, int64_t rows, int64_t pairs, const uint32_t* V,
                    const float* start, const Coefficients<uint16_t>& C, int64_t count, uint32_t* U);

    // U[n, :] = start[:] + sum_k X[n, k] . V[k, :], not rounded, as wide as a panel.
    void (*project_plain)(const uint16_t* X, int64_t x_stride, int64_t rows, int64_t pairs, const uint32_t* V,
                          const float* start, float* U);

    // Pair p of out is rows 2 p and 2 p + 1 of the sum over b < parts of C[b][n, :] * U[b][n, :], or one row and zero.
    // Each C has `count` columns; each U is a panel.
    void (*combine)(int64_t rows, int64_t parts, const Coefficients<uint16_t>* C, const float* const* U, int64_t count,
                    uint32_t* out);

    // out[d, :] += sum_p X[p, d] . U[p, :].
    void (*accumulate)(const uint32_t* X, int64_t x_stride, int64_t pairs, int64_t depth, const uint32_t* U,
                       float* out);
};

struct PairKernels {
    std::array<PairLoops, 2> panels;  // as wide as those of Kernels<float>

    // Pair k of panel[:, j] is entries 2 k and 2 k + 1 of filter j, rounded, or one entry and zero, for `count`
    // filters.
    void (*pack_pairs)(const float* V, int64_t filter_stride, int64_t count, int64_t depth, int64_t width,
                       uint32_t* panel);

    // Pair p of out is rows 2 p and 2 p + 1 of U, rounded, or one row and zero. U has `width` columns.
    void (*round_pairs)(const float* U, int64_t rows, int64_t width, uint32_t* out);

    // to[p, d] = entries (2 p, d) and (2 p + 1, d) of X, or one entry and zero.
    void (*pair_rows)(const uint16_t* X, int64_t x_stride, int64_t rows, int64_t depth, uint32_t* to,
                      int64_t to_stride);
};

struct InstructionSet {
    const char* name;
    Kernels<float> f32;
    Kernels<double> f64;
    Widen widen;
};

// Returns the set in use: the best set that this processor has, unless `use_isa` chose another.
const InstructionSet& isa();

// Returns a set by name. Throws std::invalid_argument if this processor cannot run it.
const InstructionSet& find_isa(const std::string& name);

// Returns the names of the compiled sets that this processor can run, best first.
std::vector<std::string> available_isas();

// Returns the names of all compiled sets, best first.
std::vector<std::string> compiled_isas();

// Chooses a set by name, or the best one with "auto". Running operators finish with the set that they began with.
// Throws std::invalid_argument if this processor cannot run the set.
void use_isa(const std::string& name);

// Returns the loops in bfloat16 that belong to the set in use; null if there are none, or if this processor lacks them.
const PairKernels* pair_kernels();

template <typename T>
const Kernels<T>& kernels() {
    if constexpr (sizeof(T) == sizeof(float)) {
        return isa().f32;
    } else {
        return isa().f64;
    }
}

}  // namespace s3d
