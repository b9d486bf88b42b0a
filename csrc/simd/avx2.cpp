// Compiles the loops for x86-64 with AVX2, FMA and F16C: 16 registers of 32 bytes, 12 of which hold the tile.
#define S3D_ISA avx2
#define S3D_ISA_NAME "avx2"
#define S3D_X86_TARGET "avx2,fma,f16c"
#define S3D_VECTOR_BYTES 32
#define S3D_TILE_ROWS 6
#define S3D_NARROW_ROWS 10
#define S3D_HALF_VECTORS 0
#define S3D_HALF_LANES 8
#define S3D_EMULATED 0
#include "simd/set.h"
