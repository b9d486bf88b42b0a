// Computes the two matrix products of S v on panels, U = C * (X V) and out += X^T U, and what stands between them.
//
// Both products use the loop `multiply`. It keeps a tile of S3D_TILE_ROWS x S3D_TILE_VECTORS vectors in registers and
// multiplies entries of X with vectors of a panel. The products differ in the index of X that runs along the tile.

constexpr int tile_rows = S3D_TILE_ROWS;
constexpr int tile_vectors = S3D_TILE_VECTORS;
template <typename T>
constexpr int width = tile_vectors * lanes<T>;

// This number of rows of V stays in the first-level cache while the loop reads all rows of X.
constexpr int64_t depth_block = 256;

template <typename T, int R>
using Tile = Vector<T>[R][tile_vectors];

// tile[i, :] += sum_k A[i * step_i + k * step_k] B[k, :].
template <typename T, int R>
S3D_INLINE void multiply(Tile<T, R>& tile, const T* A, int64_t step_i, int64_t step_k, int64_t depth, const T* B) {
    for (int64_t k = 0; k < depth; ++k) {
        Vector<T> b[tile_vectors];
#pragma GCC unroll 4
        for (int v = 0; v < tile_vectors; ++v) b[v] = load(B + k * width<T> + v * lanes<T>);
#pragma GCC unroll 32
        for (int i = 0; i < R; ++i) {
            const T a = A[i * step_i + k * step_k];
#pragma GCC unroll 4
            for (int v = 0; v < tile_vectors; ++v) tile[i][v] += a * b[v];
        }
    }
}

template <typename T, int R>
S3D_INLINE void load_tile(Tile<T, R>& tile, const T* from) {
#pragma GCC unroll 32
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < tile_vectors; ++v) tile[i][v] = load(from + i * width<T> + v * lanes<T>);
}

template <typename T, int R>
S3D_INLINE void store_tile(const Tile<T, R>& tile, T* to) {
#pragma GCC unroll 32
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < tile_vectors; ++v) store(to + i * width<T> + v * lanes<T>, tile[i][v]);
}

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

// Divides `total` rows into as few groups of at most tile_rows as possible, of nearly equal sizes. In a group of one or
// two rows, each multiplication would wait for the one before it.
struct Groups {
    int64_t count, size, larger;
    explicit Groups(int64_t total)
        : count((total + tile_rows - 1) / tile_rows), size(count ? total / count : 0), larger(total - count * size) {}
    int operator[](int64_t group) const { return static_cast<int>(size + (group < larger)); }
};

template <typename T>
struct Panels {
    template <int R>
    struct Project {
        static __attribute__((noinline)) void run(const T* X, int64_t x_stride, int64_t depth, const T* V, const T* C,
                                                  int64_t c_stride, T* U, bool first) {
            Tile<T, R> tile = {};
            if (!first) load_tile<T, R>(tile, U);
            if (C) {
                // The loop reads C once, a few bytes per row. Hardware does not predict that: prefetch the rows.
                for (int i = 0; i < R; ++i) __builtin_prefetch(C + (i + 2 * R) * c_stride);
            }
            multiply<T, R>(tile, X, x_stride, 1, depth, V);
            if (C) {
#pragma GCC unroll 32
                for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                    for (int v = 0; v < tile_vectors; ++v) tile[i][v] *= load(C + i * c_stride + v * lanes<T>);
            }
            store_tile<T, R>(tile, U);
        }
    };

    template <int R>
    struct Accumulate {
        static __attribute__((noinline)) void run(const T* X, int64_t x_stride, int64_t rows, const T* U, T* out) {
            Tile<T, R> tile;
            load_tile<T, R>(tile, out);
            multiply<T, R>(tile, X, 1, x_stride, rows, U);
            store_tile<T, R>(tile, out);
        }
    };

    static void project(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* V, const T* C,
                        int64_t c_stride, T* U) {
        const Groups groups(rows);
        for (int64_t start = 0; start < depth || start == 0; start += depth_block) {
            const int64_t block = depth - start < depth_block ? depth - start : depth_block;
            const bool last = start + block == depth;
            int64_t n = 0;
            for (int64_t group = 0; group < groups.count; ++group) {
                const int size = groups[group];
                with_rows<tile_rows, Project>(size, X + n * x_stride + start, x_stride, block, V + start * width<T>,
                                              last && C ? C + n * c_stride : static_cast<const T*>(nullptr), c_stride,
                                              U + n * width<T>, start == 0);
                n += size;
            }
        }
    }

    static void accumulate(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* U, T* out) {
        const Groups groups(depth);
        int64_t d = 0;
        for (int64_t group = 0; group < groups.count; ++group) {
            const int size = groups[group];
            with_rows<tile_rows, Accumulate>(size, X + d, x_stride, rows, U, out + d * width<T>);
            d += size;
        }
    }

    template <bool both>
    static S3D_INLINE void combine_rows(int64_t rows, const T* A, int64_t a_stride, const T* r, const T* B,
                                        int64_t b_stride, const T* s, T* out) {
        for (int64_t n = 0; n < rows; ++n) {
            const T* a = A + n * a_stride;
            const T* b = B + n * b_stride;
            // Coefficients are read once, a few bytes per row. Hardware does not predict that: prefetch the rows.
            __builtin_prefetch(a + 2 * tile_rows * a_stride);
            if constexpr (both) __builtin_prefetch(b + 2 * tile_rows * b_stride);
#pragma GCC unroll 4
            for (int v = 0; v < tile_vectors; ++v) {
                const int64_t at = n * width<T> + v * lanes<T>;
                Vector<T> sum = load(a + v * lanes<T>) * load(r + at);
                if constexpr (both) sum += load(b + v * lanes<T>) * load(s + at);
                store<T>(out + at, sum);
            }
        }
    }

    static void combine(int64_t rows, const T* A, int64_t a_stride, const T* r, const T* B, int64_t b_stride,
                        const T* s, T* out) {
        if (B) return combine_rows<true>(rows, A, a_stride, r, B, b_stride, s, out);
        combine_rows<false>(rows, A, a_stride, r, A, 0, r, out);
    }
};
