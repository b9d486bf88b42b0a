// Gathers from the winning neighbours of EdgeConv, and from their runners-up, and scatters to them.

// The loop prefetches this number of rows ahead. It reads winners and coefficients once, a few bytes per row, and
// hardware does not predict that.
constexpr int64_t rows_ahead = 12;

template <typename T>
struct Exchange {
    // The loops handle this number of columns at a time: few enough that the places of winners and runners-up stay in
    // registers between gather and scatter.
    static constexpr int part = 16 / sizeof(T);
    using Part = Vector<T, 16>;
    using Places = uint64_t[part];

    // place[j] = where entry j of a panel's row `index[j]` is. Returns a number whose sign bit is set if an index is
    // not in [0, points).
    template <typename Index>
    static S3D_INLINE uint64_t find(const Index* index, int64_t count, int64_t points, uint64_t* place) {
        uint64_t out_of_range = 0;
        for (int64_t j = 0; j < count; ++j) {
            const uint64_t point = static_cast<uint64_t>(static_cast<int64_t>(index[j]));
            // This sets the sign bit if the index is negative or beyond the last point.
            out_of_range |= point | (static_cast<uint64_t>(points) - 1 - point);
            place[j] = point * width<T> + j;
        }
        return out_of_range;
    }

    // Makes the compiler load the places of a row from memory, one instruction each. Otherwise it takes them out of the
    // vectors that computed them, which takes several.
    static S3D_INLINE void spill(uint64_t* place) { asm("" : "+m"(*reinterpret_cast<uint64_t (*)[width<T>]>(place))); }

    static S3D_INLINE void take(const uint64_t* from, Places& to) {
#pragma GCC unroll 4
        for (int i = 0; i < part; ++i) to[i] = from[i];
    }

    // The initializer becomes insertions of entries from memory. Assignments to entries would become masked broadcasts.
    static S3D_INLINE Part gather(const T* from, const Places& place) {
        if constexpr (part == 4) {
            return Part{from[place[0]], from[place[1]], from[place[2]], from[place[3]]};
        } else {
            return Part{from[place[0]], from[place[1]]};
        }
    }

    static S3D_INLINE void scatter(Part sent, const Places& place, T* to) {
#pragma GCC unroll 4
        for (int i = 0; i < part; ++i) to[place[i]] += sent[i];
    }

    static S3D_INLINE Part load_part(const T* from) { return load<T, 16>(from); }

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
    template <int columns, typename Index>
    static S3D_INLINE bool some(const Index* winner, int64_t winner_stride, int64_t first, int64_t rows, int64_t points,
                                int64_t filters, const T* C, int64_t c_stride, const T* offset, const T* projected,
                                T* received, T* t) {
        const int64_t count = columns ? columns : filters;
        for (int64_t n = 0; n < rows; ++n) {
            const Index* from = winner + n * winner_stride;
            const T* c = C + n * c_stride;
            T* own = t + n * width<T>;
            prefetch(from, winner_stride, count);
            prefetch(c, c_stride, count);
            uint64_t place[width<T>];
            if (find(from, count, points, place) >> 63) return false;
            if constexpr (columns > 0) {
                spill(place);
#pragma GCC unroll 32
                for (int at = 0; at < columns; at += part) {
                    Places to;
                    take(place + at, to);
                    const Part u = load_part(own + at) + load_part(offset + at) + gather(projected, to);
                    const Part kept = load_part(c + at) * u;
                    store<T, 16>(own + at, kept);
                    scatter(kept, to, received);
                }
            } else {
                for (int64_t j = 0; j < count; ++j) own[j] = c[j] * (own[j] + offset[j] + projected[place[j]]);
                for (int64_t j = 0; j < count; ++j) received[place[j]] += own[j];
                for (int64_t j = count; j < width<T>; ++j) own[j] = 0;
            }
            give(received + (first + n) * width<T>, own);
        }
        return true;
    }

    template <int columns, bool sloped, typename Index>
    static S3D_INLINE bool some_tied(const Index* winner, int64_t winner_stride, int64_t first, int64_t rows,
                                     int64_t points, int64_t filters, const T* C, int64_t c_stride,
                                     const Ties<T, Index>& ties, const T* offset, const T* projected, T* received,
                                     T* t) {
        const int64_t count = columns ? columns : filters;
        for (int64_t n = 0; n < rows; ++n) {
            const Index* from = winner + n * winner_stride;
            const Index* other = ties.runner + n * ties.runner_stride;
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
            if constexpr (columns > 0) {
                spill(place);
                spill(second);
#pragma GCC unroll 32
                for (int at = 0; at < columns; at += part) {
                    Places to, to_second;
                    take(place + at, to);
                    take(second + at, to_second);
                    Part kept = load_part(own + at) + load_part(offset + at), sent, back;
                    tie<sloped, Part>(load_part(c + at), load_part(k + at), load_part(d1 + at), load_part(d2 + at),
                                      gather(projected, to), gather(projected, to_second), kept, sent, back);
                    store<T, 16>(own + at, kept);
                    scatter(sent, to, received);
                    scatter(back, to_second, received);
                }
            } else {
                for (int64_t j = 0; j < count; ++j) {
                    T kept = own[j] + offset[j], sent, back;
                    tie<sloped, T>(c[j], k[j], d1[j], d2[j], projected[place[j]], projected[second[j]], kept, sent,
                                   back);
                    own[j] = kept;
                    received[place[j]] += sent;
                    received[second[j]] += back;
                }
                for (int64_t j = count; j < width<T>; ++j) own[j] = 0;
            }
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

    template <int columns, typename Index>
    static S3D_INLINE bool any(const Index* winner, int64_t winner_stride, int64_t first, int64_t rows, int64_t points,
                               int64_t count, const T* C, int64_t c_stride, const Ties<T, Index>* ties, const T* offset,
                               const T* projected, T* received, T* t) {
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

    template <typename Index>
    static bool run(const Index* winner, int64_t winner_stride, int64_t first, int64_t rows, int64_t points,
                    int64_t count, const T* C, int64_t c_stride, const Ties<T, Index>* ties, const T* offset,
                    const T* projected, T* received, T* t) {
        if (count == width<T>) {
            return any<width<T>>(winner, winner_stride, first, rows, points, count, C, c_stride, ties, offset,
                                 projected, received, t);
        }
        return any<0>(winner, winner_stride, first, rows, points, count, C, c_stride, ties, offset, projected, received,
                      t);
    }
};
