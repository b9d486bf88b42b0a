// x86-64 with AVX2, FMA and F16C: 16 registers of 32 bytes, 12 of which hold the tile.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#define S3D_ISA_NAME "avx2"
#define S3D_VECTOR_BYTES 32
#define S3D_TILE_ROWS 6
#define S3D_TILE_VECTORS 2
#define S3D_HALF_LANES 8

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace s3d::avx2 {
#include "simd/set.h"
}  // namespace s3d::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
