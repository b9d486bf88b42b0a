// x86-64 with AVX-512: 32 registers of 64 bytes, 24 of which hold the tile.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#define S3D_ISA_NAME "avx512"
#define S3D_VECTOR_BYTES 64
#define S3D_TILE_ROWS 12
#define S3D_TILE_VECTORS 2
#define S3D_HALF_LANES 16

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
#endif
namespace s3d::avx512 {
#include "simd/set.h"
}  // namespace s3d::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
