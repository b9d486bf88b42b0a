// Compiles the loops for x86-64 with AVX-512: 32 registers of 64 bytes, 24 of which hold the tile.
#define S3D_ISA avx512
#define S3D_ISA_NAME "avx512"
#define S3D_X86_TARGET "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c"
#define S3D_VECTOR_BYTES 64
#define S3D_TILE_ROWS 12
#define S3D_NARROW_ROWS 10
#define S3D_HALF_VECTORS 1
#define S3D_HALF_LANES 16
#define S3D_EMULATED 0
#include "simd/set.h"
