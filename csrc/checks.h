// Declares the checks that several operators make before they touch memory.
#pragma once

#include "errors.h"

namespace s3d {

// Raises unless the tensor is float32 or float64, the types that operators compute in.
void check_compute_dtype(const char* name, const Tensor& tensor);

// Raises unless the tensor has this dtype.
void check_dtype(const char* name, const Tensor& tensor, ScalarType type);

// Raises unless the tensor is on the CPU.
void check_device(const char* name, const Tensor& tensor);

// Raises unless the tensor is on the CPU and stored in the dtype `type`. For float32, bfloat16 and float16 are allowed
// too.
void check_storage(const char* name, const Tensor& tensor, ScalarType type);

// Raises unless X is (N, D) and C is (N, M), both stored as check_storage asks.
void check_rows(const Tensor& X, const Tensor& C, ScalarType type);

// Raises unless the tensor holds one coefficient for each row of X, (N, D), and each filter: (N, M), stored as
// check_storage asks.
void check_coefficients(const char* name, const Tensor& tensor, const Tensor& X, ScalarType type);

// Raises unless V is (M, D) or (K, M, D) with M = `filters` and D = `depth`.
void check_vectors(const Tensor& V, int64_t filters, int64_t depth);

// Raises if `read` may lie in the memory of `changed`, which is contiguous.
void check_apart(const char* changed_name, const Tensor& changed, const char* name, const Tensor& read);

}  // namespace s3d
