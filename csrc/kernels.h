// The inner loops that every instruction set provides, as tables of functions, and the choice between them.
//
// A panel is a block of `width` filters stored filter-fastest: entry (d, j) of a panel is at [d * width + j]. All
// products run over panels, so the loops below never see a ragged edge in the filters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace s3d {

// Where act'' comes from. The numbers are part of the operators' schema: see _CURVATURES in ops.py.
enum class Curvature : int64_t { none, silu, gelu, gelu_tanh, softplus, tanh, sigmoid, elu, hardswish, gaussian };

// act''(z) = curvature(z) + sum over kinks of jump * sharpness * sigmoid'(sharpness * (z - at)).
struct CurvatureFormula {
    Curvature curvature = Curvature::none;
    double a = 0, b = 0;  // softplus: beta and threshold; elu: alpha
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

// Which columns of the old row the entries of a new row copy. Where the `lanes` entries of block b all lie within one
// vector of the old row, it begins at first[b] and they are at place[i] in it; first[b] is -1 where they do not.
template <typename T>
struct Columns {
    const int64_t* index;
    const int64_t* first;
    const Integer<T>* place;
};

template <typename T>
struct Kernels {
    int width;  // filters per panel
    int lanes;  // entries per vector

    // U[n, :] = C[n, :] * sum_d X[n, d] V[d, :]; without C where it is null.
    // X is (rows, depth) with row stride x_stride, V a panel of `depth` rows, C has row stride c_stride, and U is a
    // panel of `rows` rows.
    void (*project)(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* V, const T* C, int64_t c_stride,
                    T* U);

    // out[d, :] += sum_n X[n, d] U[n, :].
    void (*accumulate)(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* U, T* out);

    // The exchange between the points of a cloud: for point n of `rows` points from number `first` on,
    //     t[n, :] = C[n, :] * (t[n, :] + offset[:] + projected[winner[n, :], :]),
    //     received[winner[n, :], :] += t[n, :],  received[n, :] -= t[n, :],
    // where t, projected and received are panels, and `count` of their columns are filters. Returns false, at once,
    // when a winner is not in [0, points).
    bool (*exchange)(const int64_t* winner, int64_t winner_stride, int64_t first, int64_t rows, int64_t points,
                     int64_t count, const T* C, int64_t c_stride, const T* offset, const T* projected, T* received,
                     T* t);

    // Y[n, p] = X[n, a] X[n, b] for the pairs a <= b in the order (0, 0), (0, 1), ..., (1, 1), ...: `pairs` of them
    // from number `first` on. Up to lanes - 1 entries beyond the end of a row of X are read, and of Y written.
    void (*pair_products)(const T* X, int64_t x_stride, int64_t rows, int64_t depth, int64_t first, int64_t pairs, T* Y,
                          int64_t y_stride);

    // out[n] = g[n] * act''(z[n]) * factor * scale[n]^2; scale may be null. out may be g.
    void (*curvature)(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, T factor, int64_t count,
                      T* out);

    // sum_i a[i] b[i].
    T (*dot)(const T* a, const T* b, int64_t count);

    // y += factor * x.
    void (*add)(T factor, const T* x, int64_t count, T* y);

    // out[i] = (row[columns[i]] * row_scale + shift_scale * shift[columns[i]]) * column_scale[i]. shift, columns and
    // column_scale may be null: then nothing is added, columns[i] = i, and nothing is multiplied. Columns are in range.
    void (*grow_row)(const T* row, T row_scale, const T* shift, T shift_scale, const Columns<T>* columns,
                     const T* column_scale, int64_t count, T* out);
};

// Numbers stored in 16 bits, widened.
struct Widen {
    void (*bfloat16)(const uint16_t* from, int64_t count, float* to);
    void (*float16)(const uint16_t* from, int64_t count, float* to);
};

struct InstructionSet {
    const char* name;
    Kernels<float> f32;
    Kernels<double> f64;
    Widen widen;
};

// The one in use: the best that this processor has, unless `use_isa` chose another.
const InstructionSet& isa();

// Those that were compiled and that this processor can run, best first.
std::vector<std::string> available_isas();

// Those that were compiled, best first.
std::vector<std::string> compiled_isas();

// Choose by name, for tests and comparisons. Operators that are running finish as they began; throws
// std::invalid_argument if it is not available.
void use_isa(const std::string& name);

template <typename T>
const Kernels<T>& kernels() {
    if constexpr (sizeof(T) == sizeof(float)) {
        return isa().f32;
    } else {
        return isa().f64;
    }
}

}  // namespace s3d
