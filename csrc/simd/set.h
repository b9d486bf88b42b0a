// Defines s3d::S3D_ISA::instruction_set, which holds all loops of this folder, compiled for S3D_X86_TARGET.
//
// Each source file of this folder defines the S3D_ macros and includes this header once. Without S3D_X86_TARGET, the
// loops use the compiler's default target. With it, other processors than x86-64 skip the file.
#include "kernels.h"

#if !defined(S3D_X86_TARGET) || defined(__x86_64__)

#if defined(S3D_X86_TARGET)
#include <immintrin.h>

// A pragma does not expand macros, but _Pragma does. The headers above stay outside of the target: see vector.h.
#define S3D_PRAGMA_TEXT(pragma) _Pragma(#pragma)
#define S3D_PRAGMA(pragma) S3D_PRAGMA_TEXT(pragma)
#if defined(__clang__)
S3D_PRAGMA(clang attribute push(__attribute__((target(S3D_X86_TARGET))), apply_to = function))
#else
S3D_PRAGMA(GCC push_options)
S3D_PRAGMA(GCC target(S3D_X86_TARGET))
#endif
#endif

namespace s3d::S3D_ISA {

#include "simd/vector.h"
#include "simd/panel.h"
#include "simd/filter.h"
#include "simd/elementwise.h"
#include "simd/exchange.h"
#include "simd/stencil.h"

template <typename T>
constexpr Kernels<T> table() {
    PanelLoops<T> half = {};
#if S3D_HALF_VECTORS
    half = NarrowPanels<T, S3D_VECTOR_BYTES / 2>::loops();
#endif
    return {
        .lanes = lanes<T>,
        .emulated = S3D_EMULATED,
        .panels = {WidePanels<T>::loops(), NarrowPanels<T>::loops(), half},
        .turn_filter = Filter<T>::turn,
        .stencil = Stencil<T>::line,
        .shifted_dots = Stencil<T>::shifted_dots,
        .window_norms = Stencil<T>::window_norms,
        .exchange_int32 = Exchange<T>::template run<int32_t>,
        .exchange_int64 = Exchange<T>::template run<int64_t>,
        .pair_products = Entries<T>::pair_products,
        .curvature = Entries<T>::curvature,
        .curvature_rows = Entries<T>::curvature_rows,
        .slopes = Entries<T>::slopes,
        .dot = Entries<T>::dot,
        .add = Entries<T>::add,
        .grow_row = Entries<T>::grow_row,
    };
}

extern const InstructionSet instruction_set = {
    S3D_ISA_NAME, table<float>(), table<double>(), {widen_bfloat16, widen_float16}};

}  // namespace s3d::S3D_ISA

#if defined(S3D_X86_TARGET)
#if defined(__clang__)
S3D_PRAGMA(clang attribute pop)
#else
S3D_PRAGMA(GCC pop_options)
#endif
#endif

#endif
