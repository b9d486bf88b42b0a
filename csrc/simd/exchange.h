// Gathers from the winning neighbours of EdgeConv, and from their runners-up, and scatters to them.

// The loop prefetches this number of rows ahead. It reads winners and coefficients once, a few bytes per row, and
// hardware does not predict that.
constexpr int64_t rows_ahead = 8;

template <typename T>
struct Exchange {
    // place[j] = where entry j of a panel's row `index[j]` is. Returns a number whose sign bit is set if an index is
    // not in [0, points).
    static S3D_INLINE uint64_t find(const int64_t* index, int64_t count, int64_t points, uint64_t* place) {
        uint64_t out_of_range = 0;
        for (int64_t j = 0; j < count; ++j) {
            const uint64_t point = static_cast<uint64_t>(index[j]);
            // This sets the sign bit if the index is negative or beyond the last point.
            out_of_range |= point | (static_cast<uint64_t>(points) - 1 - point);
            place[j] = point * width<T> + j;
        }
        return out_of_range;
    }

    static S3D_INLINE Vector<T> gather(const T* from, const uint64_t* place) {
        Vector<T> gathered;
#pragma GCC unroll 16
        for (int i = 0; i < lanes<T>; ++i) gathered[i] = from[place[i]];
        return gathered;
    }

    // Prefetches `count` entries of the row that is `rows_ahead` rows later, and with them every line of memory.
    template <typename Entry>
    static S3D_INLINE void prefetch(const Entry* row, int64_t stride, int64_t count) {
        constexpr int64_t line = 64 / sizeof(Entry);
        const Entry* ahead = row + rows_ahead * stride;
        for (int64_t j = 0; j < count; j += line) __builtin_prefetch(ahead + j);
        __builtin_prefetch(ahead + count - 1);
    }

    // What one row sends, for numbers or vectors of them: `sent` to the winner, `back` to the runner-up. `own` comes in
    // as the product without the winner's part and goes out as what the point itself keeps.
    template <bool sloped, typename Number>
    static S3D_INLINE void tie(Number c, Number k, Number first_slope, Number second_slope, Number winner,
                               Number runner, Number& own, Number& sent, Number& back) {
        if constexpr (sloped) {
            const Number u = own + winner;
            const Number t = k * (first_slope * u - second_slope * (own + runner));
            sent = c * u + first_slope * t;
            back = -second_slope * t;
            own = sent + back;
        } else {
            own = c * (own + winner);
            back = k * (runner - winner);
            sent = own - back;
        }
    }

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
            prefetch(from, winner_stride, count);
            prefetch(c, c_stride, count);
            uint64_t place[width<T>];
            if (find(from, count, points, place) >> 63) return false;
            if constexpr (columns > 0) {
#pragma GCC unroll 4
                for (int v = 0; v < tile_vectors; ++v) {
                    const int start = v * lanes<T>;
                    const Vector<T> gathered = gather(projected, place + start);
                    store<T>(own + start, load(c + start) * (load(own + start) + load(offset + start) + gathered));
                }
#pragma GCC unroll 32
                for (int j = 0; j < columns; ++j) received[place[j]] += own[j];
            } else {
                for (int64_t j = 0; j < count; ++j) own[j] = c[j] * (own[j] + offset[j] + projected[place[j]]);
                for (int64_t j = 0; j < count; ++j) received[place[j]] += own[j];
                for (int64_t j = count; j < width<T>; ++j) own[j] = 0;
            }
            give(received + (first + n) * width<T>, own);
        }
        return true;
    }

    template <int columns, bool sloped>
    static S3D_INLINE bool some_tied(const int64_t* winner, int64_t winner_stride, int64_t first, int64_t rows,
                                     int64_t points, int64_t filters, const T* C, int64_t c_stride, const Ties<T>& ties,
                                     const T* offset, const T* projected, T* received, T* t) {
        const int64_t count = columns ? columns : filters;
        for (int64_t n = 0; n < rows; ++n) {
            const int64_t* from = winner + n * winner_stride;
            const int64_t* other = ties.runner + n * ties.runner_stride;
            const T* c = C + n * c_stride;
            const T* k = ties.K + n * ties.k_stride;
            const T* d1 = sloped ? ties.d1 + n * ties.d1_stride : k;
            const T* d2 = sloped ? ties.d2 + n * ties.d2_stride : k;
            T* own = t + n * width<T>;
            prefetch(from, winner_stride, count);
            prefetch(other, ties.runner_stride, count);
            prefetch(c, c_stride, count);
            prefetch(k, ties.k_stride, count);
            if constexpr (sloped) {
                prefetch(d1, ties.d1_stride, count);
                prefetch(d2, ties.d2_stride, count);
            }
            uint64_t place[width<T>], second[width<T>];
            if ((find(from, count, points, place) | find(other, count, points, second)) >> 63) return false;
            T sent[width<T>], back[width<T>];
            if constexpr (columns > 0) {
#pragma GCC unroll 4
                for (int v = 0; v < tile_vectors; ++v) {
                    const int at = v * lanes<T>;
                    Vector<T> kept = load(own + at) + load(offset + at), to_winner, to_runner;
                    tie<sloped, Vector<T>>(load(c + at), load(k + at), load(d1 + at), load(d2 + at),
                                           gather(projected, place + at), gather(projected, second + at), kept,
                                           to_winner, to_runner);
                    store<T>(own + at, kept);
                    store<T>(sent + at, to_winner);
                    store<T>(back + at, to_runner);
                }
            } else {
                for (int64_t j = 0; j < count; ++j) {
                    own[j] += offset[j];
                    tie<sloped, T>(c[j], k[j], d1[j], d2[j], projected[place[j]], projected[second[j]], own[j], sent[j],
                                   back[j]);
                }
                for (int64_t j = count; j < width<T>; ++j) own[j] = 0;
            }
#pragma GCC unroll 32
            for (int64_t j = 0; j < count; ++j) received[place[j]] += sent[j];
#pragma GCC unroll 32
            for (int64_t j = 0; j < count; ++j) received[second[j]] += back[j];
            give(received + (first + n) * width<T>, own);
        }
        return true;
    }

    // received -= own, for one row.
    static S3D_INLINE void give(T* received, const T* own) {
#pragma GCC unroll 4
        for (int v = 0; v < tile_vectors; ++v) {
            store<T>(received + v * lanes<T>, load(received + v * lanes<T>) - load(own + v * lanes<T>));
        }
    }

    template <int columns>
    static S3D_INLINE bool any(const int64_t* winner, int64_t winner_stride, int64_t first, int64_t rows,
                               int64_t points, int64_t count, const T* C, int64_t c_stride, const Ties<T>* ties,
                               const T* offset, const T* projected, T* received, T* t) {
        if (!ties) {
            return some<columns>(winner, winner_stride, first, rows, points, count, C, c_stride, offset, projected,
                                 received, t);
        }
        if (ties->d1) {
            return some_tied<columns, true>(winner, winner_stride, first, rows, points, count, C, c_stride, *ties,
                                            offset, projected, received, t);
        }
        return some_tied<columns, false>(winner, winner_stride, first, rows, points, count, C, c_stride, *ties, offset,
                                         projected, received, t);
    }

    static bool run(const int64_t* winner, int64_t winner_stride, int64_t first, int64_t rows, int64_t points,
                    int64_t count, const T* C, int64_t c_stride, const Ties<T>* ties, const T* offset,
                    const T* projected, T* received, T* t) {
        if (count == width<T>) {
            return any<width<T>>(winner, winner_stride, first, rows, points, count, C, c_stride, ties, offset,
                                 projected, received, t);
        }
        return any<0>(winner, winner_stride, first, rows, points, count, C, c_stride, ties, offset, projected, received,
                      t);
    }
};
