// Declares the checks that several operators make before they touch memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace s3d {

// Raises unless `compute` is float32 or float64 and `tensor` is stored in that type, or in 16 bits for float32.
void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute);

}  // namespace s3d
