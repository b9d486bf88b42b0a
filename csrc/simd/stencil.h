// Computes what depthwise convolutions need: lines of them on panels, products of neighbouring rows, and norms of
// windows.

template <typename T>
struct Stencil {
    // The number of places of a line that share the loads of a weight.
    static constexpr int places = tile_rows / 2;

    template <int R>
    struct Block {
        static S3D_INLINE void run(const TapRun& run, const int64_t* row_tap, const int64_t* row_place, int64_t rows,
                                   const T* in, int64_t in_columns, const T* weight, int64_t kernel_columns,
                                   int64_t first, T* out) {
            Tile<T, R> tile = {};
            for (int64_t r = 0; r < rows; ++r) {
                const T* line = in + (row_place[r] * in_columns + first * run.advance) * width<T>;
                const T* own = weight + row_tap[r] * kernel_columns * width<T>;
                for (int64_t c = 0; c < run.taps; ++c) {
                    const T* from = line + run.place[c] * width<T>;
                    const T* w = own + run.tap[c] * width<T>;
                    Vector<T> b[tile_vectors];
#pragma GCC unroll 4
                    for (int v = 0; v < tile_vectors; ++v) b[v] = load(w + v * lanes<T>);
#pragma GCC unroll 32
                    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                        for (int v = 0; v < tile_vectors; ++v) {
                            tile[i][v] += b[v] * load(from + i * run.advance * width<T> + v * lanes<T>);
                        }
                }
            }
            T* to = out + (run.first + first * run.step) * width<T>;
#pragma GCC unroll 32
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                for (int v = 0; v < tile_vectors; ++v) store(to + i * run.step * width<T> + v * lanes<T>, tile[i][v]);
        }
    };

    static void line(const TapRun& run, const int64_t* row_tap, const int64_t* row_place, int64_t rows, const T* in,
                     int64_t in_columns, const T* weight, int64_t kernel_columns, T* out) {
        for (int64_t first = 0; first < run.count; first += places) {
            const int64_t left = run.count - first;
            with_rows<places, Block>(static_cast<int>(left < places ? left : places), run, row_tap, row_place, rows, in,
                                     in_columns, weight, kernel_columns, first, out);
        }
    }

    template <int R>
    struct Dots {
        static S3D_INLINE void run(const T* a, const T* b, int64_t stride, int64_t depth, int64_t columns,
                                   int64_t first, int64_t step, T* out, int64_t out_stride) {
            for (int64_t x = 0; x < columns; x += lanes<T>) {
                Vector<T> sum[R] = {};
                for (int64_t d = 0; d < depth; ++d) {
                    const Vector<T> left = load(a + d * stride + x);
                    const T* right = b + d * stride + x + first;
#pragma GCC unroll 8
                    for (int s = 0; s < R; ++s) sum[s] += left * load(right + s * step);
                }
#pragma GCC unroll 8
                for (int s = 0; s < R; ++s) store<T>(out + s * out_stride + x, sum[s]);
            }
        }
    };

    static void shifted_dots(const T* a, const T* b, int64_t stride, int64_t depth, int64_t columns, int64_t first,
                             int64_t step, int64_t count, T* out, int64_t out_stride) {
        constexpr int64_t most = 8;
        for (int64_t s = 0; s < count; s += most) {
            const int64_t left = count - s;
            with_rows<most, Dots>(static_cast<int>(left < most ? left : most), a, b, stride, depth, columns,
                                  first + s * step, step, out + s * out_stride, out_stride);
        }
    }

    // The norm of one window for N vectors of channels. `known` is the number of taps if it is known when the loop is
    // compiled, so that their values stay in registers; otherwise 0, and they are in `work`.
    template <int N, int known>
    static S3D_INLINE void norm(const Windows<T>& windows, const T* d, const T* gram, int64_t c, T* work, T* out) {
        const int64_t taps = known ? known : windows.taps;
        const int64_t* place = windows.gram_place;
        Vector<T> sum[N] = {}, held[known ? known : 1][N];
#pragma GCC unroll 16
        for (int64_t t = 0; t < taps; ++t) {
            Vector<T> own[N], inner[N];
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) {
                const int64_t at = c + v * lanes<T>;
                own[v] = load(windows.weight[t] + at) * load(d + windows.d_place[t] + at);
                inner[v] = gram[place[t]] * own[v];
                if constexpr (known > 0) {
                    held[t][v] = own[v];
                } else {
                    store<T>(work + (t * N + v) * lanes<T>, own[v]);
                }
            }
#pragma GCC unroll 16
            for (int64_t s = 0; s < t; ++s) {
                const T product = gram[place[s]];
#pragma GCC unroll 4
                for (int v = 0; v < N; ++v) {
                    if constexpr (known > 0) {
                        inner[v] += product * held[s][v];
                    } else {
                        inner[v] += product * load(work + (s * N + v) * lanes<T>);
                    }
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) sum[v] += own[v] * inner[v];
            place += t + 1;
        }
        for (int v = 0; v < N; ++v) store<T>(out + v * lanes<T>, maximum<T>(sum[v], Vector<T>{}));
    }

    template <int known>
    static S3D_INLINE void norms(const Windows<T>& windows, int64_t channels, T* work, T* out) {
        constexpr int L = lanes<T>;
        for (int64_t i = 0; i < windows.count; ++i, out += channels) {
            const T* d = windows.d + i * windows.advance * channels;
            const T* gram = windows.gram + i * windows.advance;
            int64_t c = 0;
            for (; c + 2 * L <= channels; c += 2 * L) norm<2, known>(windows, d, gram, c, work, out + c);
            for (; c + L <= channels; c += L) norm<1, known>(windows, d, gram, c, work, out + c);
            for (; c < channels; ++c) {
                T sum = 0;
                const int64_t* place = windows.gram_place;
                for (int64_t t = 0; t < windows.taps; place += ++t) {
                    work[t] = windows.weight[t][c] * d[windows.d_place[t] + c];
                    for (int64_t s = 0; s <= t; ++s) sum += work[t] * gram[place[s]] * work[s];
                }
                out[c] = sum < 0 ? T(0) : sum;
            }
        }
    }

    static void window_norms(const Windows<T>& windows, int64_t channels, T* work, T* out) {
        // The usual kernel is 3 x 3.
        if (windows.taps == 9) return norms<9>(windows, channels, work, out);
        norms<0>(windows, channels, work, out);
    }
};
