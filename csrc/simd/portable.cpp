// Compiles the loops for the compiler's default target: SSE2 on x86-64, NEON on AArch64.
#define S3D_ISA portable
#define S3D_ISA_NAME "portable"
#define S3D_VECTOR_BYTES 16
#define S3D_TILE_ROWS 4
#define S3D_NARROW_ROWS 8
#define S3D_HALF_VECTORS 0
#define S3D_HALF_LANES 0
#define S3D_EMULATED 0
#include "simd/set.h"
