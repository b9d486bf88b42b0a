// Computes the two matrix products of S v on panels, U = C * (X V) and out += X^T U, and what stands between them.
//
// Both products use the loop `multiply`. It keeps a tile of sums in registers and multiplies entries of X with vectors
// of a panel. The products differ in the index of X that runs along the tile.

// This number of rows of V stays in the first-level cache while the loop reads all rows of X.
constexpr int64_t depth_block = 256;

// Calls Kernel<rows>, for 1 <= rows <= R.
template <int R, template <int> class Kernel, typename... Arguments>
S3D_INLINE void with_rows(int rows, const Arguments&... arguments) {
    if constexpr (R == 1) {
        Kernel<1>::run(arguments...);
    } else {
        if (rows == R)
            Kernel<R>::run(arguments...);
        else
            with_rows<R - 1, Kernel>(rows, arguments...);
    }
}

// Divides `total` rows into as few groups of at most `most` as possible, of nearly equal sizes. In a group of one or
// two rows, each multiplication would wait for the one before it.
struct Groups {
    int64_t count, size, larger;
    Groups(int64_t total, int64_t most)
        : count((total + most - 1) / most), size(count ? total / count : 0), larger(total - count * size) {}
    int operator[](int64_t group) const { return static_cast<int>(size + (group < larger)); }
};

// A panel's row is `vectors` vectors of `bytes` bytes. A tile has at most `most_rows` rows of X, or `most_columns`
// columns.
template <typename T, int bytes, int vectors, int most_rows, int most_columns>
struct Panels {
    static constexpr int lanes = bytes / static_cast<int>(sizeof(T)), width = vectors * lanes;
    using Vector = S3D_ISA::Vector<T, bytes>;

    template <int R>
    using Tile = Vector[R][vectors];

    static S3D_INLINE Vector at(const T* row, int v) { return load<T, bytes>(row + v * lanes); }

    // tile[i, :] += sum_k A[i * step_i + k * step_k] B[k, :]. Prefetches ahead[k * step_k], unless `ahead` is null.
    template <int R>
    static S3D_INLINE void multiply(Tile<R>& tile, const T* A, int64_t step_i, int64_t step_k, int64_t depth,
                                    const T* B, const T* ahead = nullptr) {
        for (int64_t k = 0; k < depth; ++k) {
            if (ahead) __builtin_prefetch(ahead + k * step_k, 0, 2);
            Vector b[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) b[v] = at(B + k * width, v);
#pragma GCC unroll 32
            for (int i = 0; i < R; ++i) {
                const T a = A[i * step_i + k * step_k];
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) tile[i][v] += a * b[v];
            }
        }
    }

    // The rows of the tile are `stride` entries apart in memory.
    template <int R>
    static S3D_INLINE void load_tile(Tile<R>& tile, const T* from, int64_t stride) {
#pragma GCC unroll 32
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) tile[i][v] = at(from + i * stride, v);
    }

    template <int R>
    static S3D_INLINE void store_tile(const Tile<R>& tile, T* to) {
#pragma GCC unroll 32
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) store<T, bytes>(to + i * width + v * lanes, tile[i][v]);
    }

    // The sums begin with the rows at `start`, which are `start_stride` apart; with zero if `start` is null.
    template <int R>
    struct Project {
        static __attribute__((noinline)) void run(const T* X, int64_t x_stride, int64_t depth, const T* V,
                                                  const T* start, int64_t start_stride, const Coefficients<T>& C,
                                                  int64_t row, T* U) {
            Tile<R> tile = {};
            if (start) load_tile<R>(tile, start, start_stride);
            if (C.ahead) {
                const T* ahead = C.ahead + row * C.stride;
#pragma GCC unroll 32
                for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) __builtin_prefetch(ahead + i * C.stride + v * lanes, 0, 2);
            }
            multiply<R>(tile, X, x_stride, 1, depth, V);
            if (C.data) {
                const T* c = C.data + row * C.stride;
#pragma GCC unroll 32
                for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) tile[i][v] *= at(c + i * C.stride, v);
            }
            store_tile<R>(tile, U);
        }
    };

    template <int R>
    struct Accumulate {
        static __attribute__((noinline)) void run(const T* X, int64_t x_stride, int64_t rows, const T* U,
                                                  const T* ahead, T* out) {
            Tile<R> tile;
            load_tile<R>(tile, out, width);
            multiply<R>(tile, X, 1, x_stride, rows, U, ahead);
            store_tile<R>(tile, out);
        }
    };

    static void project(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* V, const T* start,
                        const Coefficients<T>& C, T* U) {
        const Groups groups(rows, most_rows);
        for (int64_t k = 0; k < depth || k == 0; k += depth_block) {
            const int64_t block = depth - k < depth_block ? depth - k : depth_block;
            const Coefficients<T> own = k + block == depth ? C : Coefficients<T>{};
            int64_t n = 0;
            for (int64_t group = 0; group < groups.count; ++group) {
                const int size = groups[group];
                with_rows<most_rows, Project>(size, X + n * x_stride + k, x_stride, block, V + k * width,
                                              k ? U + n * width : start, k ? int64_t(width) : int64_t(0), own, n,
                                              U + n * width);
                n += size;
            }
        }
    }

    static void accumulate(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* U, const T* ahead,
                           T* out) {
        const Groups groups(depth, most_columns);
        int64_t d = 0;
        for (int64_t group = 0; group < groups.count; ++group) {
            const int size = groups[group];
            with_rows<most_columns, Accumulate>(size, X + d, x_stride, rows, U, ahead ? ahead + d : X + d,
                                                out + d * width);
            d += size;
        }
    }

    static void add_rows(int64_t rows, const T* U, T* out) {
        // An addition does not wait for the one before it.
        constexpr int sums = 4;
        Tile<sums> tile = {};
        load_tile<1>(reinterpret_cast<Tile<1>&>(tile), out, width);
        int64_t n = 0;
        for (; n + sums <= rows; n += sums) {
#pragma GCC unroll 4
            for (int i = 0; i < sums; ++i)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) tile[i][v] += at(U + (n + i) * width, v);
        }
        for (; n < rows; ++n) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) tile[0][v] += at(U + n * width, v);
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) tile[0][v] += tile[1][v] + (tile[2][v] + tile[3][v]);
        store_tile<1>(reinterpret_cast<const Tile<1>&>(tile), out);
    }

    template <bool both>
    static S3D_INLINE void combine_rows(int64_t rows, const T* A, int64_t a_stride, const T* r, const T* B,
                                        int64_t b_stride, const T* s, T* out) {
        // Coefficients are read once, a few bytes per row. Hardware does not predict that: prefetch the rows.
        constexpr int64_t ahead = 24;
        for (int64_t n = 0; n < rows; ++n) {
            const T* a = A + n * a_stride;
            const T* b = B + n * b_stride;
            __builtin_prefetch(a + ahead * a_stride);
            if constexpr (both) __builtin_prefetch(b + ahead * b_stride);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const int64_t place = n * width;
                Vector sum = at(a, v) * at(r + place, v);
                if constexpr (both) sum += at(b, v) * at(s + place, v);
                store<T, bytes>(out + place + v * lanes, sum);
            }
        }
    }

    static void combine(int64_t rows, const T* A, int64_t a_stride, const T* r, const T* B, int64_t b_stride,
                        const T* s, T* out) {
        if (B) return combine_rows<true>(rows, A, a_stride, r, B, b_stride, s, out);
        combine_rows<false>(rows, A, a_stride, r, A, 0, r, out);
    }

    static T multiply_adds(int64_t count, T x, T y) {
        Vector sum[fma_chains];
        // If all began alike, the compiler would keep one.
        for (int s = 0; s < fma_chains; ++s) sum[s] = Vector{} + T(s);
        for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 32
            for (int s = 0; s < fma_chains; ++s) sum[s] = sum[s] * x + y;
        }
        T total = 0;
        for (int s = 0; s < fma_chains; ++s) total += sum[s][0];
        return total;
    }

    static constexpr PanelLoops<T> loops() {
        return {width, vectors, multiply_adds, project, accumulate, add_rows, combine};
    }
};

// The widest panel. Stencils and the exchange of EdgeConv use it alone.
constexpr int tile_rows = S3D_TILE_ROWS;
constexpr int tile_vectors = 2;
template <typename T>
using WidePanels = Panels<T, S3D_VECTOR_BYTES, tile_vectors, tile_rows, tile_rows>;
template <typename T>
constexpr int width = WidePanels<T>::width;
template <typename T, int R>
using Tile = typename WidePanels<T>::template Tile<R>;
// Each of its products takes an entry of X from memory. More rows would take more addresses than there are registers.
template <typename T, int bytes = S3D_VECTOR_BYTES>
using NarrowPanels = Panels<T, bytes, 1, S3D_NARROW_ROWS, 2 * tile_rows>;
