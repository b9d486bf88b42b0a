// Computes the two products of S v in bfloat16 with float32 sums, by AVX512_BF16.
//
// An instruction multiplies pairs of numbers and adds both products: the first product takes pairs along a row of X,
// the second one pairs of rows. It flushes subnormal numbers to zero.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define S3D_BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define S3D_BF16_INLINE S3D_BF16_TARGET inline __attribute__((always_inline))

namespace s3d::avx512_bf16 {

constexpr int lanes = 16;

// tile[i, :] += sum over pairs k of A[i * step_i + k * step_k] B[k, :].
template <int R, int vectors>
S3D_BF16_INLINE void multiply(__m512 (&tile)[R][vectors], const char* A, int64_t step_i, int64_t step_k, int64_t depth,
                              const uint32_t* B) {
    for (int64_t k = 0; k < depth; ++k) {
        __m512i b[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) b[v] = _mm512_loadu_si512(B + (k * vectors + v) * lanes);
#pragma GCC unroll 32
        for (int i = 0; i < R; ++i) {
            int32_t pair;
            __builtin_memcpy(&pair, A + i * step_i + k * step_k, sizeof(pair));
            const __m512i a = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) tile[i][v] = _mm512_dpbf16_ps(tile[i][v], (__m512bh)b[v], (__m512bh)a);
        }
    }
}

// The lower lanes of a vector, as many as there are entries left.
S3D_BF16_INLINE __mmask16 lower_lanes(int64_t left) { return left >= lanes ? 0xffff : left <= 0 ? 0 : (1 << left) - 1; }

// The numbers, rounded, in the lower halves.
S3D_BF16_INLINE __m512i rounded(__m512 numbers) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(numbers)); }

template <int vectors>
struct PairPanels {
    static constexpr int width = vectors * lanes;
    static constexpr int most_rows = vectors == 1 ? 8 : 12, most_columns = vectors == 1 ? 24 : 12;
    static_assert(most_rows % 2 == 0, "pairs of rows must not be divided");

    S3D_BF16_INLINE static __m512 widened(const uint16_t* c, __mmask16 mask) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, c));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }

    template <int R>
    S3D_BF16_INLINE static void project_tile(__m512 (&tile)[R][vectors], const uint16_t* X, int64_t x_stride,
                                             int64_t pairs, const uint32_t* V, const float* start) {
#pragma GCC unroll 32
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v)
                tile[i][v] = start ? _mm512_loadu_ps(start + v * lanes) : _mm512_setzero_ps();
        const int64_t bytes = sizeof(uint16_t);
        multiply<R, vectors>(tile, reinterpret_cast<const char*>(X), x_stride * bytes, 2 * bytes, pairs, V);
    }

    template <int R>
    struct Project {
        S3D_BF16_TARGET static __attribute__((noinline)) void run(const uint16_t* X, int64_t x_stride, int64_t pairs,
                                                                  const uint32_t* V, const float* start,
                                                                  const Coefficients<uint16_t>& C, int64_t row,
                                                                  int64_t count, uint32_t* U) {
            const uint16_t* c = C.data + row * C.stride;
            if (C.ahead) {
#pragma GCC unroll 32
                for (int i = 0; i < R; ++i) __builtin_prefetch(C.ahead + (row + i) * C.stride, 0, 2);
            }
            __m512 tile[R][vectors];
            project_tile<R>(tile, X, x_stride, pairs, V, start);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const __mmask16 mask = lower_lanes(count - v * lanes);
#pragma GCC unroll 32
                for (int i = 0; i < R; i += 2) {
                    __m512i both = rounded(_mm512_mul_ps(tile[i][v], widened(c + i * C.stride + v * lanes, mask)));
                    if (i + 1 < R) {
                        const __m512 next = _mm512_mul_ps(tile[i + 1 < R ? i + 1 : i][v],
                                                          widened(c + (i + 1) * C.stride + v * lanes, mask));
                        both = _mm512_or_si512(both, _mm512_slli_epi32(rounded(next), 16));
                    }
                    _mm512_storeu_si512(U + i / 2 * width + v * lanes, both);
                }
            }
        }
    };

    template <int R>
    struct ProjectPlain {
        S3D_BF16_TARGET static __attribute__((noinline)) void run(const uint16_t* X, int64_t x_stride, int64_t pairs,
                                                                  const uint32_t* V, const float* start, float* U) {
            __m512 tile[R][vectors];
            project_tile<R>(tile, X, x_stride, pairs, V, start);
#pragma GCC unroll 32
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) _mm512_storeu_ps(U + i * width + v * lanes, tile[i][v]);
        }
    };

    template <int R>
    struct Accumulate {
        S3D_BF16_TARGET static __attribute__((noinline)) void run(const uint32_t* X, int64_t x_stride, int64_t pairs,
                                                                  const uint32_t* U, float* out) {
            __m512 tile[R][vectors];
#pragma GCC unroll 32
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) tile[i][v] = _mm512_loadu_ps(out + i * width + v * lanes);
            const int64_t bytes = sizeof(uint32_t);
            multiply<R, vectors>(tile, reinterpret_cast<const char*>(X), bytes, x_stride * bytes, pairs, U);
#pragma GCC unroll 32
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) _mm512_storeu_ps(out + i * width + v * lanes, tile[i][v]);
        }
    };

    template <int R, template <int> class Kernel, typename... Arguments>
    static void with_rows(int64_t rows, const Arguments&... arguments) {
        if constexpr (R == 1) {
            Kernel<1>::run(arguments...);
        } else {
            if (rows == R) return Kernel<R>::run(arguments...);
            with_rows<R - 1, Kernel>(rows, arguments...);
        }
    }

    static void project(const uint16_t* X, int64_t x_stride, int64_t rows, int64_t pairs, const uint32_t* V,
                        const float* start, const Coefficients<uint16_t>& C, int64_t count, uint32_t* U) {
        for (int64_t n = 0; n < rows; n += most_rows) {
            const int64_t some = rows - n < most_rows ? rows - n : int64_t(most_rows);
            with_rows<most_rows, Project>(some, X + n * x_stride, x_stride, pairs, V, start, C, n, count,
                                          U + n / 2 * width);
        }
    }

    static void project_plain(const uint16_t* X, int64_t x_stride, int64_t rows, int64_t pairs, const uint32_t* V,
                              const float* start, float* U) {
        for (int64_t n = 0; n < rows; n += most_rows) {
            const int64_t some = rows - n < most_rows ? rows - n : int64_t(most_rows);
            with_rows<most_rows, ProjectPlain>(some, X + n * x_stride, x_stride, pairs, V, start, U + n * width);
        }
    }

    S3D_BF16_TARGET static void combine(int64_t rows, int64_t parts, const Coefficients<uint16_t>* C,
                                        const float* const* U, int64_t count, uint32_t* out) {
        for (int v = 0; v < vectors; ++v) {
            const __mmask16 mask = lower_lanes(count - v * lanes);
            for (int64_t n = 0; n < rows; n += 2) {
                __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
                for (int64_t b = 0; b < parts; ++b) {
                    const uint16_t* c = C[b].data + n * C[b].stride + v * lanes;
                    const float* u = U[b] + n * width + v * lanes;
                    first = _mm512_fmadd_ps(widened(c, mask), _mm512_loadu_ps(u), first);
                    if (n + 1 < rows)
                        second = _mm512_fmadd_ps(widened(c + C[b].stride, mask), _mm512_loadu_ps(u + width), second);
                }
                const __m512i both = _mm512_or_si512(rounded(first), _mm512_slli_epi32(rounded(second), 16));
                _mm512_storeu_si512(out + n / 2 * width + v * lanes, both);
            }
        }
    }

    static void accumulate(const uint32_t* X, int64_t x_stride, int64_t pairs, int64_t depth, const uint32_t* U,
                           float* out) {
        const int64_t groups = (depth + most_columns - 1) / most_columns;
        for (int64_t group = 0, d = 0; group < groups; ++group) {
            const int64_t some = (depth - d + groups - group - 1) / (groups - group);
            with_rows<most_columns, Accumulate>(some, X + d, x_stride, pairs, U, out + d * width);
            d += some;
        }
    }

    static constexpr PairLoops loops() { return {width, project, project_plain, combine, accumulate}; }
};

S3D_BF16_TARGET void pack_pairs(const float* V, int64_t filter_stride, int64_t count, int64_t depth, int64_t width,
                                uint32_t* panel) {
    const __m512i steps = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                             _mm512_set1_epi32(static_cast<int>(width)));
    for (int64_t d = 0; d < depth; d += 2 * lanes) {
        const __mmask16 lower = lower_lanes(depth - d), upper = lower_lanes(depth - d - lanes);
        const __mmask16 pairs = lower_lanes((depth - d + 1) / 2);
        for (int64_t j = 0; j < count; ++j) {
            const float* entries = V + j * filter_stride + d;
            const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(upper, entries + lanes),
                                                         _mm512_maskz_loadu_ps(lower, entries));
            _mm512_mask_i32scatter_epi32(panel + d / 2 * width + j, pairs, steps, (__m512i)rounded, 4);
        }
    }
}

S3D_BF16_TARGET void round_pairs(const float* U, int64_t rows, int64_t width, uint32_t* out) {
    for (int64_t n = 0; n < rows; n += 2) {
        for (int64_t j = 0; j < width; j += lanes) {
            const float* u = U + n * width + j;
            const __m512 next = n + 1 < rows ? _mm512_loadu_ps(u + width) : _mm512_setzero_ps();
            const __m512i both = _mm512_or_si512(rounded(_mm512_loadu_ps(u)), _mm512_slli_epi32(rounded(next), 16));
            _mm512_storeu_si512(out + n / 2 * width + j, both);
        }
    }
}

S3D_BF16_TARGET void pair_rows(const uint16_t* X, int64_t x_stride, int64_t rows, int64_t depth, uint32_t* to,
                               int64_t to_stride) {
    for (int64_t n = 0; n < rows; n += 2) {
        const uint16_t* row = X + n * x_stride;
        for (int64_t d = 0; d < depth; d += lanes) {
            const __mmask16 mask = lower_lanes(depth - d);
            const __mmask16 next = n + 1 < rows ? mask : 0;
            const __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + d));
            const __m512i second = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(next, row + x_stride + d));
            _mm512_mask_storeu_epi32(to + n / 2 * to_stride + d, mask,
                                     _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
        }
    }
}

extern const PairKernels kernels = {
    {PairPanels<2>::loops(), PairPanels<1>::loops()}, pack_pairs, round_pairs, pair_rows};

}  // namespace s3d::avx512_bf16

#endif
