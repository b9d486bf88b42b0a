// Declares the checks that several operators make before they touch memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace s3d {

// Raises unless the tensor is float32 or float64, the types that operators compute in.
void check_compute_dtype(const char* name, const at::Tensor& tensor);

// Raises unless the tensor has this dtype.
void check_dtype(const char* name, const at::Tensor& tensor, at::ScalarType type);

// Raises unless the tensor is on the device of `like`.
void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& like);

// Raises unless the tensor is dense, on the device of `compute`, and stored in the dtype of `compute`. For float32,
// bfloat16 and float16 are allowed too.
void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute);

// Raises unless X is (N, D) and C is (N, M), both stored as check_storage asks.
void check_rows(const at::Tensor& X, const at::Tensor& C, const at::Tensor& compute);

// Raises unless the tensor holds one coefficient for each row of X, (N, D), and each filter: (N, M), stored as
// check_storage asks.
void check_coefficients(const char* name, const at::Tensor& tensor, const at::Tensor& X, const at::Tensor& compute);

// Raises unless the tensor is a vector of this size, with the dtype and device of `like`.
void check_vector(const char* name, const at::Tensor& vector, int64_t size, const at::Tensor& like);

// Raises unless V is (M, D) or (K, M, D) with M = `filters` and D = `depth`.
void check_vectors(const at::Tensor& V, int64_t filters, int64_t depth);

}  // namespace s3d
