// Compiles the loops with the vectors and tiles of AVX-512 but the instructions of AVX2.
//
// This set is slow, and `isa` never chooses it. It lets tests run the loops of AVX-512 on processors without AVX-512.
#define S3D_ISA avx512_emulated
#define S3D_ISA_NAME "avx512-emulated"
#define S3D_X86_TARGET "avx2,fma,f16c"
#define S3D_VECTOR_BYTES 64
#define S3D_TILE_ROWS 12
#define S3D_NARROW_ROWS 10
#define S3D_HALF_VECTORS 1
#define S3D_HALF_LANES 8
#define S3D_EMULATED 1
#include "simd/set.h"
