// Computes S v of a single filter, where a panel would be mostly empty: vectors lie along the rows of X.

template <typename T, int bytes = S3D_VECTOR_BYTES>
S3D_INLINE T sum_of_lanes(Vector<T, bytes> x) {
    if constexpr (bytes == 16) {
        T sum = x[0];
        for (int i = 1; i < 16 / static_cast<int>(sizeof(T)); ++i) sum += x[i];
        return sum;
    } else {
        Vector<T, bytes / 2> halves[2];
        __builtin_memcpy(halves, &x, bytes);
        return sum_of_lanes<T, bytes / 2>(halves[0] + halves[1]);
    }
}

template <typename T>
struct Filter {
    static constexpr int L = lanes<T>;

    // The last vector of a row ends with the row. Its first lanes belong to the vector before it.
    struct Tail {
        int64_t at;
        Integers<T> own;
        Vector<T> sum = {};
        S3D_INLINE Vector<T> get(const T* row) const {
            return reinterpret_cast<Vector<T>>(own & reinterpret_cast<Integers<T>>(load(row + at)));
        }
    };

    template <int R>
    static S3D_INLINE void block(const T* X, int64_t x_stride, int64_t whole, const T* v, T start, const T* c,
                                 int64_t c_stride, Tail& tail, T* out, T& total) {
        Vector<T> dot[R];
        const Vector<T> last = load(v + tail.at);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) dot[i] = last * tail.get(X + i * x_stride);
        for (int64_t d = 0; d < whole; d += L) {
            const Vector<T> own = load(v + d);
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i) dot[i] += own * load(X + i * x_stride + d);
        }
        T u[R];
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
            u[i] = c[i * c_stride] * (start + sum_of_lanes<T>(dot[i]));
            total += u[i];
        }
        for (int64_t d = 0; d < whole; d += L) {
            Vector<T> sum = load(out + d);
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i) sum += u[i] * load(X + i * x_stride + d);
            store<T>(out + d, sum);
        }
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) tail.sum += u[i] * tail.get(X + i * x_stride);
    }

    static void turn(const T* X, int64_t x_stride, int64_t rows, int64_t depth, const T* v, const T* start, const T* c,
                     int64_t c_stride, T* out) {
        constexpr int most = 4;
        const int64_t whole = depth / L * L;
        Tail tail{depth - L, {}};
        for (int i = 0; i < L; ++i) tail.own[i] = tail.at + i >= whole ? -1 : 0;
        const T first = start ? *start : T(0);
        T total = 0;
        int64_t n = 0;
        for (; n + most <= rows; n += most)
            block<most>(X + n * x_stride, x_stride, whole, v, first, c + n * c_stride, c_stride, tail, out, total);
        for (; n < rows; ++n)
            block<1>(X + n * x_stride, x_stride, whole, v, first, c + n * c_stride, c_stride, tail, out, total);
        store<T>(out + tail.at, load(out + tail.at) + tail.sum);
        if (start) out[depth] += total;
    }
};
