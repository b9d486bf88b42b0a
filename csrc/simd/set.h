// Defines `instruction_set` from all loops of this folder: compiled once per instruction set, inside its namespace.
#include "simd/vector.h"
#include "simd/panel.h"
#include "simd/elementwise.h"
#include "simd/exchange.h"

template <typename T>
constexpr Kernels<T> table() {
    return {width<T>,
            lanes<T>,
            Panels<T>::project,
            Panels<T>::accumulate,
            Exchange<T>::run,
            Entries<T>::pair_products,
            Entries<T>::curvature,
            Entries<T>::dot,
            Entries<T>::add,
            Entries<T>::grow_row};
}

extern const InstructionSet instruction_set = {
    S3D_ISA_NAME, table<float>(), table<double>(), {widen_bfloat16, widen_float16}};
