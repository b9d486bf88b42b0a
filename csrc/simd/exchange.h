// Gathers from the winning neighbours of EdgeConv and scatters to them.

// The loop prefetches this number of rows ahead. It reads winners and coefficients once, a few bytes per row, and
// hardware does not predict that.
constexpr int64_t rows_ahead = 8;

template <typename T>
struct Exchange {
    // `columns` is the width of a panel if all its columns are filters, and 0 otherwise.
    template <int columns>
    static S3D_INLINE bool some(const int64_t* winner, int64_t winner_stride, int64_t first, int64_t rows,
                                int64_t points, int64_t filters, const T* C, int64_t c_stride, const T* offset,
                                const T* projected, T* received, T* t) {
        const int64_t count = columns ? columns : filters;
        for (int64_t n = 0; n < rows; ++n) {
            const int64_t* from = winner + n * winner_stride;
            const T* c = C + n * c_stride;
            T* own = t + n * width<T>;
            __builtin_prefetch(from + rows_ahead * winner_stride);
            __builtin_prefetch(from + rows_ahead * winner_stride + count - 1);
            __builtin_prefetch(c + rows_ahead * c_stride);
            uint64_t place[width<T>], out_of_range = 0;
            for (int64_t j = 0; j < count; ++j) {
                const uint64_t point = static_cast<uint64_t>(from[j]);
                // This sets the sign bit if the winner is negative or beyond the last point.
                out_of_range |= point | (static_cast<uint64_t>(points) - 1 - point);
                place[j] = point * width<T> + j;
            }
            if (out_of_range >> 63) return false;
            if constexpr (columns > 0) {
#pragma GCC unroll 4
                for (int v = 0; v < tile_vectors; ++v) {
                    const int start = v * lanes<T>;
                    Vector<T> gathered;
#pragma GCC unroll 16
                    for (int i = 0; i < lanes<T>; ++i) gathered[i] = projected[place[start + i]];
                    store<T>(own + start, load(c + start) * (load(own + start) + load(offset + start) + gathered));
                }
#pragma GCC unroll 32
                for (int j = 0; j < columns; ++j) received[place[j]] += own[j];
            } else {
                for (int64_t j = 0; j < count; ++j) own[j] = c[j] * (own[j] + offset[j] + projected[place[j]]);
                for (int64_t j = 0; j < count; ++j) received[place[j]] += own[j];
                for (int64_t j = count; j < width<T>; ++j) own[j] = 0;
            }
            T* given = received + (first + n) * width<T>;
#pragma GCC unroll 4
            for (int v = 0; v < tile_vectors; ++v) {
                store<T>(given + v * lanes<T>, load(given + v * lanes<T>) - load(own + v * lanes<T>));
            }
        }
        return true;
    }

    static bool run(const int64_t* winner, int64_t winner_stride, int64_t first, int64_t rows, int64_t points,
                    int64_t count, const T* C, int64_t c_stride, const T* offset, const T* projected, T* received,
                    T* t) {
        if (count == width<T>) {
            return some<width<T>>(winner, winner_stride, first, rows, points, count, C, c_stride, offset, projected,
                                  received, t);
        }
        return some<0>(winner, winner_stride, first, rows, points, count, C, c_stride, offset, projected, received, t);
    }
};
