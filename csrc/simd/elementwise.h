// Computes entry by entry: act'(z) and act''(z), products of pairs, sums of vectors, weight rows after splits, and
// 16-bit numbers.

// Returns e^x for x <= 0, to about one unit in the last place. Where e^x is subnormal, it returns 0. NaN gives NaN.
template <typename T>
S3D_INLINE Vector<T> exp_negative(Vector<T> x) {
    constexpr bool is_float = sizeof(T) == 4;
    constexpr int mantissa = is_float ? 23 : 52;
    const T least = is_float ? T(-87.3) : T(-708.3);
    const auto vanishes = x < least;
    x = maximum<T>(x, broadcast<T>(least));
    // x = k ln 2 + r with |r| <= ln 2 / 2. Adding and subtracting 1.5 * 2^mantissa rounds to the nearest integer.
    const T round = T(1.5) * T(int64_t(1) << mantissa);
    const Vector<T> shifted = x * T(1.4426950408889634074) + round;
    const Vector<T> k = shifted - round;
    const T high = is_float ? T(0.693359375) : T(0.693145751953125);
    const T low = is_float ? T(-2.12194440054690583e-4) : T(1.42860682030941723212e-6);
    const Vector<T> r = (x - k * high) - k * low;
    // The Taylor polynomial is enough: on this interval, its first missing term is below half a unit in the last place.
    constexpr int degree = is_float ? 7 : 13;
    constexpr double inverse_factorial[] = {
        1.,        1.,         1. / 2,      1. / 6,       1. / 24,       1. / 120,       1. / 720,
        1. / 5040, 1. / 40320, 1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
    Vector<T> sum = broadcast<T>(T(inverse_factorial[degree]));
#pragma GCC unroll 16
    for (int i = degree - 1; i >= 0; --i) sum = T(inverse_factorial[i]) + sum * r;
    const auto exponent = reinterpret_cast<Integers<T>>(shifted) << mantissa;
    const auto result = reinterpret_cast<Vector<T>>(reinterpret_cast<Integers<T>>(sum) + exponent);
    return select<T>(vanishes, Vector<T>{}, select<T>(x == x, result, x));
}

// The sigmoid, its derivative, sigmoid(x) sigmoid(-x), and tanh(x / 2) = 2 sigmoid(x) - 1, without cancellation.
template <typename T>
struct Sigmoid {
    Vector<T> value, slope, tanh_half;
    S3D_INLINE explicit Sigmoid(Vector<T> x) {
        const Vector<T> e = exp_negative<T>(-absolute<T>(x));
        const Vector<T> inverse = T(1) / (T(1) + e);
        value = select<T>(x < 0, e * inverse, inverse);
        slope = e * inverse * inverse;
        const Vector<T> magnitude = (T(1) - e) * inverse;
        // Near zero, 1 - e cancels, so tanh comes from its series.
        const Vector<T> h = x * T(0.5), q = h * h;
        const Vector<T> series = h * (T(1) - q * (T(1) / 3 - q * (T(2) / 15 - q * (T(17) / 315))));
        const T near = sizeof(T) == 4 ? T(0.1) : T(0.02);
        tanh_half = select<T>(absolute<T>(h) < near, series, select<T>(x < 0, -magnitude, magnitude));
    }
};

template <typename T>
S3D_INLINE Vector<T> clamp(Vector<T> x, T bound) {
    return maximum<T>(minimum<T>(x, broadcast<T>(bound)), broadcast<T>(-bound));
}

template <typename T, Curvature kind>
S3D_INLINE Vector<T> smooth_curvature(Vector<T> z, T a, T b) {
    const T root_2pi = T(2.50662827463100050242);
    const Vector<T> zero = {};
    if constexpr (kind == Curvature::silu) {
        const Sigmoid<T> s(z);
        // The slope is 0 for large z. The clamp avoids 0 times infinity.
        return s.slope * (T(2) - clamp<T>(z, T(1e4)) * s.tanh_half);
    } else if constexpr (kind == Curvature::gelu) {
        const Vector<T> x = clamp<T>(z, T(40));
        return (T(2) - x * x) * exp_negative<T>(x * x * T(-0.5)) / root_2pi;
    } else if constexpr (kind == Curvature::gelu_tanh) {
        const T p = T(0.79788456080286535588), q = T(0.044715);
        const Vector<T> x = clamp<T>(z, T(10));
        const Vector<T> u = p * (x + q * x * x * x);
        const Vector<T> du = p * (T(1) + T(3) * q * x * x), ddu = T(6) * p * q * x;
        const Sigmoid<T> s(u * T(2));
        return T(4) * s.slope * (du + T(0.5) * x * (ddu - T(2) * s.tanh_half * du * du));
    } else if constexpr (kind == Curvature::softplus) {
        return select<T>(a * z > b, zero, a * Sigmoid<T>(a * z).slope);
    } else if constexpr (kind == Curvature::tanh) {
        const Sigmoid<T> s(z * T(2));
        return T(-8) * s.tanh_half * s.slope;
    } else if constexpr (kind == Curvature::sigmoid) {
        const Sigmoid<T> s(z);
        return -s.slope * s.tanh_half;
    } else if constexpr (kind == Curvature::elu) {
        return select<T>(z > 0, zero, a * exp_negative<T>(minimum<T>(z, zero)));
    } else if constexpr (kind == Curvature::hardswish) {
        return select<T>(absolute<T>(z) < T(3), broadcast<T>(T(1) / T(3)), zero);
    } else if constexpr (kind == Curvature::gaussian) {
        const Vector<T> x = clamp<T>(z, T(40));
        return (x * x - T(1)) * exp_negative<T>(x * x * T(-0.5));
    } else {
        return zero;
    }
}

// act'(z) of the activation whose smooth curvature is of this kind, without the jumps of `none`.
template <typename T, Curvature kind>
S3D_INLINE Vector<T> smooth_slope(Vector<T> z, T a, T b) {
    const Vector<T> zero = {}, one = broadcast<T>(1);
    if constexpr (kind == Curvature::silu) {
        const Sigmoid<T> s(z);
        return s.value + clamp<T>(z, T(1e4)) * s.slope;
    } else if constexpr (kind == Curvature::gelu_tanh) {
        const T p = T(0.79788456080286535588), q = T(0.044715);
        const Vector<T> x = clamp<T>(z, T(10));
        const Sigmoid<T> s(T(2) * p * (x + q * x * x * x));
        return s.value + T(2) * x * s.slope * p * (T(1) + T(3) * q * x * x);
    } else if constexpr (kind == Curvature::softplus) {
        return select<T>(a * z > b, one, Sigmoid<T>(a * z).value);
    } else if constexpr (kind == Curvature::tanh) {
        return T(4) * Sigmoid<T>(z * T(2)).slope;
    } else if constexpr (kind == Curvature::sigmoid) {
        return Sigmoid<T>(z).slope;
    } else if constexpr (kind == Curvature::elu) {
        return select<T>(z > 0, one, a * exp_negative<T>(minimum<T>(z, zero)));
    } else if constexpr (kind == Curvature::hardswish) {
        return select<T>(absolute<T>(z) < T(3), (T(2) * z + T(3)) / T(6), select<T>(z > 0, one, zero));
    } else if constexpr (kind == Curvature::gaussian) {
        const Vector<T> x = clamp<T>(z, T(40));
        return -x * exp_negative<T>(x * x * T(-0.5));
    } else {
        return broadcast<T>(a);
    }
}

template <typename T>
struct Entries {
    // Each run of pairs writes whole vectors, and the next run overwrites the surplus. Rows of X and Y therefore need
    // room for one more vector.
    static void pair_products(const T* X, int64_t x_stride, int64_t rows, int64_t depth, int64_t first, int64_t pairs,
                              T* Y, int64_t y_stride) {
        int64_t a = 0, skipped = 0;
        while (skipped + depth - a <= first) skipped += depth - a++;
        int64_t b = a + first - skipped;
        for (int64_t done = 0; done < pairs;) {
            const int64_t count = depth - b < pairs - done ? depth - b : pairs - done;
            for (int64_t n = 0; n < rows; ++n) {
                const T* x = X + n * x_stride;
                T* y = Y + n * y_stride + done;
                const T left = x[a];
                for (int64_t i = 0; i < count; i += lanes<T>) store<T>(y + i, left * load(x + b + i));
            }
            done += count;
            b = ++a;
        }
    }

    template <Curvature kind>
    static S3D_INLINE Vector<T> coefficient(const CurvatureFormula& formula, Vector<T> g, Vector<T> z, Vector<T> scale,
                                            T factor) {
        Vector<T> second = smooth_curvature<T, kind>(z, T(formula.a), T(formula.b));
        const T beta = T(formula.sharpness);
        for (int i = 0; i < formula.kinks; ++i) {
            const Vector<T> slope = Sigmoid<T>(beta * (z - T(formula.kink_at[i]))).slope;
            second += (T(formula.kink_jump[i]) * beta) * slope;
        }
        return g * second * (scale * scale * factor);
    }

    // The same with a sharpness of 1 / width for each entry. Where the width is not a normal number, kinks add nothing.
    template <Curvature kind>
    static S3D_INLINE Vector<T> coefficient_by_width(const CurvatureFormula& formula, Vector<T> g, Vector<T> z,
                                                     Vector<T> scale, Vector<T> kink_width) {
        Vector<T> second = smooth_curvature<T, kind>(z, T(formula.a), T(formula.b));
        constexpr T least = sizeof(T) == 4 ? T(0x1p-126) : T(0x1p-1022);
        const auto vanishes = kink_width < least;
        const Vector<T> inverse = T(1) / select<T>(vanishes, broadcast<T>(1), kink_width);
        const Vector<T> beta = select<T>(vanishes, Vector<T>{}, inverse);
        for (int i = 0; i < formula.kinks; ++i) {
            const Vector<T> slope = Sigmoid<T>(beta * (z - T(formula.kink_at[i]))).slope;
            second += T(formula.kink_jump[i]) * beta * slope;
        }
        return g * second * (scale * scale);
    }

    template <Curvature kind>
    static void all_rows(const CurvatureFormula& formula, const KinkWidths<T>& widths, const T* g, const T* z,
                         int64_t rows, int64_t count, T* out) {
        const Vector<T> one = broadcast<T>(1);
        for (int64_t n = 0; n < rows; ++n, g += count, z += count, out += count) {
            const Vector<T> across = broadcast<T>(widths.across ? widths.across[n] : T(1));
            const T* entries = widths.entries ? widths.entries + n * count : nullptr;
            const Vector<T> factor = widths.across_scale ? broadcast<T>(widths.across_scale[n]) : one;
            const T* along_scale = widths.along_scale;
            int64_t i = 0;
            for (; i + lanes<T> <= count; i += lanes<T>) {
                const Vector<T> scale = along_scale ? factor * load(along_scale + i) : factor;
                Vector<T> width = widths.along ? across * load(widths.along + i) : across;
                if (entries) width *= load(entries + i);
                store<T>(out + i, coefficient_by_width<kind>(formula, load(g + i), load(z + i), scale, width));
            }
            if (i < count) {
                T last[4][lanes<T>] = {};
                for (int64_t k = i; k < count; ++k) {
                    last[0][k - i] = g[k], last[1][k - i] = z[k], last[2][k - i] = along_scale ? along_scale[k] : T(1);
                    last[3][k - i] = (widths.along ? widths.along[k] : T(1)) * (entries ? entries[k] : T(1));
                }
                store<T>(last[0], coefficient_by_width<kind>(formula, load(last[0]), load(last[1]),
                                                             factor * load(last[2]), across * load(last[3])));
                for (int64_t k = i; k < count; ++k) out[k] = last[0][k - i];
            }
        }
    }

    static void curvature_rows(const CurvatureFormula& formula, const KinkWidths<T>& widths, const T* g, const T* z,
                               int64_t rows, int64_t count, T* out) {
        switch (formula.curvature) {
#define S3D_CASE(kind)    \
    case Curvature::kind: \
        return all_rows<Curvature::kind>(formula, widths, g, z, rows, count, out);
            S3D_CASE(none)
            S3D_CASE(silu)
            S3D_CASE(gelu)
            S3D_CASE(gelu_tanh)
            S3D_CASE(softplus)
            S3D_CASE(tanh)
            S3D_CASE(sigmoid)
            S3D_CASE(elu)
            S3D_CASE(hardswish)
            S3D_CASE(gaussian)
#undef S3D_CASE
        }
    }

    template <Curvature kind>
    static void all(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, T factor, int64_t count,
                    T* out) {
        const Vector<T> one = broadcast<T>(1);
        int64_t i = 0;
        for (; i + lanes<T> <= count; i += lanes<T>) {
            store<T>(out + i,
                     coefficient<kind>(formula, load(g + i), load(z + i), scale ? load(scale + i) : one, factor));
        }
        if (i < count) {
            T last[3][lanes<T>] = {};
            for (int64_t k = i; k < count; ++k) {
                last[0][k - i] = g[k], last[1][k - i] = z[k], last[2][k - i] = scale ? scale[k] : T(1);
            }
            store<T>(last[0], coefficient<kind>(formula, load(last[0]), load(last[1]), load(last[2]), factor));
            for (int64_t k = i; k < count; ++k) out[k] = last[0][k - i];
        }
    }

    static void curvature(const CurvatureFormula& formula, const T* g, const T* z, const T* scale, T factor,
                          int64_t count, T* out) {
        switch (formula.curvature) {
#define S3D_CASE(kind)    \
    case Curvature::kind: \
        return all<Curvature::kind>(formula, g, z, scale, factor, count, out);
            S3D_CASE(none)
            S3D_CASE(silu)
            S3D_CASE(gelu)
            S3D_CASE(gelu_tanh)
            S3D_CASE(softplus)
            S3D_CASE(tanh)
            S3D_CASE(sigmoid)
            S3D_CASE(elu)
            S3D_CASE(hardswish)
            S3D_CASE(gaussian)
#undef S3D_CASE
        }
    }

    template <Curvature kind>
    static S3D_INLINE Vector<T> slope(const CurvatureFormula& formula, Vector<T> z) {
        Vector<T> first = smooth_slope<T, kind>(z, T(formula.a), T(formula.b));
        if constexpr (kind == Curvature::none) {
            for (int i = 0; i < formula.kinks; ++i) {
                // The smaller slope holds at the kink itself.
                const T at = T(formula.kink_at[i]), jump = T(formula.kink_jump[i]);
                const auto beyond = jump > 0 ? z > at : z >= at;
                first += select<T>(beyond, broadcast<T>(jump), Vector<T>{});
            }
        }
        return first;
    }

    template <Curvature kind>
    static void all_slopes(const CurvatureFormula& formula, const T* z, const T* scale, T factor, int64_t count,
                           T* out) {
        int64_t i = 0;
        for (; i + lanes<T> <= count; i += lanes<T>) {
            const Vector<T> first = factor * slope<kind>(formula, load(z + i));
            store<T>(out + i, scale ? first * load(scale + i) : first);
        }
        if (i < count) {
            T last[lanes<T>] = {};
            for (int64_t k = i; k < count; ++k) last[k - i] = z[k];
            store<T>(last, factor * slope<kind>(formula, load(last)));
            for (int64_t k = i; k < count; ++k) out[k] = scale ? last[k - i] * scale[k] : last[k - i];
        }
    }

    static void slopes(const CurvatureFormula& formula, const T* z, const T* scale, T factor, int64_t count, T* out) {
        switch (formula.curvature) {
#define S3D_CASE(kind)    \
    case Curvature::kind: \
        return all_slopes<Curvature::kind>(formula, z, scale, factor, count, out);
            S3D_CASE(none)
            S3D_CASE(silu)
            S3D_CASE(gelu_tanh)
            S3D_CASE(softplus)
            S3D_CASE(tanh)
            S3D_CASE(sigmoid)
            S3D_CASE(elu)
            S3D_CASE(hardswish)
            S3D_CASE(gaussian)
#undef S3D_CASE
            case Curvature::gelu:
                // The operator refuses it: the slope needs the error function.
                return;
        }
    }

    static T dot(const T* a, const T* b, int64_t count) {
        constexpr int L = lanes<T>, sums = 4;
        Vector<T> sum[sums] = {};
        int64_t i = 0;
        for (; i + sums * L <= count; i += sums * L) {
#pragma GCC unroll 4
            for (int s = 0; s < sums; ++s) sum[s] += load(a + i + s * L) * load(b + i + s * L);
        }
        for (; i + L <= count; i += L) sum[0] += load(a + i) * load(b + i);
        sum[0] += sum[1] + (sum[2] + sum[3]);
        T total = 0;
        for (int k = 0; k < L; ++k) total += sum[0][k];
        for (; i < count; ++i) total += a[i] * b[i];
        return total;
    }

    static void add(T factor, const T* x, int64_t count, T* y) {
        int64_t i = 0;
        for (; i + lanes<T> <= count; i += lanes<T>) store<T>(y + i, load(y + i) + factor * load(x + i));
        for (; i < count; ++i) y[i] += factor * x[i];
    }

    // Computes the entries [begin, end) of a grown row one by one.
    static S3D_INLINE void grow_entries(const T* row, T row_scale, const T* shift, T shift_scale,
                                        const Columns<T>* columns, const T* column_scale, int64_t begin, int64_t end,
                                        T* out) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t from = columns ? columns->index[i] : i;
            T value = row[from] * row_scale;
            if (shift) value += shift_scale * shift[from];
            out[i] = column_scale ? value * column_scale[i] : value;
        }
    }

    template <bool has_shift, bool has_columns, bool has_column_scale>
    static S3D_INLINE void grow(const T* row, T row_scale, const T* shift, T shift_scale, const Columns<T>* columns,
                                const T* column_scale, int64_t count, T* out) {
        constexpr int L = lanes<T>;
        int64_t i = 0;
        for (; i + L <= count; i += L) {
            Vector<T> value, moved = {};
            if constexpr (!has_columns) {
                value = load(row + i);
                if constexpr (has_shift) moved = load(shift + i);
            } else {
#if S3D_CAN_PERMUTE
                const int64_t first = columns->first[i / L];
                if (first < 0) {
                    grow_entries(row, row_scale, shift, shift_scale, columns, column_scale, i, i + L, out);
                    continue;
                }
                const auto place = load(columns->place + i);
                value = __builtin_shuffle(load(row + first), place);
                if constexpr (has_shift) moved = __builtin_shuffle(load(shift + first), place);
#else
                grow_entries(row, row_scale, shift, shift_scale, columns, column_scale, i, i + L, out);
                continue;
#endif
            }
            value *= row_scale;
            if constexpr (has_shift) value += shift_scale * moved;
            if constexpr (has_column_scale) value *= load(column_scale + i);
            store<T>(out + i, value);
        }
        grow_entries(row, row_scale, shift, shift_scale, columns, column_scale, i, count, out);
    }

    static void grow_row(const T* row, T row_scale, const T* shift, T shift_scale, const Columns<T>* columns,
                         const T* column_scale, int64_t count, T* out) {
        if (columns) {
            if (shift && column_scale)
                return grow<true, true, true>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
            if (shift)
                return grow<true, true, false>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
            if (column_scale)
                return grow<false, true, true>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
            return grow<false, true, false>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
        }
        if (shift && column_scale)
            return grow<true, false, true>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
        if (shift)
            return grow<true, false, false>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
        if (column_scale)
            return grow<false, false, true>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
        return grow<false, false, false>(row, row_scale, shift, shift_scale, columns, column_scale, count, out);
    }
};

static void widen_bfloat16(const uint16_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
        __builtin_memcpy(to + i, &bits, 4);
    }
}

static void widen_float16(const uint16_t* from, int64_t count, float* to) {
    int64_t i = 0;
#if S3D_HALF_LANES == 16
    for (; i + 16 <= count; i += 16) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(0xffff, half));
    }
#elif S3D_HALF_LANES == 8
    for (; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
#endif
    for (; i < count; ++i) {
        // Moving exponent and mantissa into place gives the number times 2^-112. This is exact for subnormals too.
        const uint32_t magnitude = static_cast<uint32_t>(from[i] & 0x7fff) << 13;
        float value;
        __builtin_memcpy(&value, &magnitude, 4);
        value *= 0x1p112f;
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        // In both formats, infinity and NaN have all bits of the exponent set.
        if ((from[i] & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
        bits |= static_cast<uint32_t>(from[i] & 0x8000) << 16;
        __builtin_memcpy(to + i, &bits, 4);
    }
}
