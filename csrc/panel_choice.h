// Declares the choice of panels for a number of filters.
#pragma once

#include "panels.h"

namespace s3d {

// Returns the kinds of the panels that M filters take the least time in, widest first.
template <typename T>
std::vector<int> choose_panels(const Kernels<T>& kernel, int64_t M);

// Returns the panels of vectors V, (M, D) or (K, M, D).
template <typename T>
PanelGrid choose_panels(const Kernels<T>& kernel, const Tensor& V) {
    return PanelGrid(sets_of(V), V.size(-2), kernel, choose_panels(kernel, V.size(-2)));
}

}  // namespace s3d
