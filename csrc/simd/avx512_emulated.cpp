// AVX-512's vectors and tiles made of AVX2 instructions: slow, and never chosen, but the same loops. With it, tests
// cover them on machines that have no AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#define S3D_ISA_NAME "avx512-emulated"
#define S3D_VECTOR_BYTES 64
#define S3D_TILE_ROWS 12
#define S3D_TILE_VECTORS 2
#define S3D_HALF_LANES 8

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace s3d::avx512_emulated {
#include "simd/set.h"
}  // namespace s3d::avx512_emulated
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
