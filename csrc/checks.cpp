// Defines the checks that several operators make before they touch memory.
#include "checks.h"

#include "dtype.h"

namespace s3d {

void check_compute_dtype(const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(is_compute_dtype(tensor.scalar_type()), name, " must be float32 or float64, got ",
                     tensor.scalar_type());
}

void check_dtype(const char* name, const at::Tensor& tensor, at::ScalarType type) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == type, name, " must be ", type, ", got ", tensor.scalar_type());
}

void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& like) {
    TORCH_CHECK_VALUE(tensor.device() == like.device(), name, " must be on ", like.device(), ", got ", tensor.device());
}

void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute) {
    const at::ScalarType type = compute.scalar_type(), stored = tensor.scalar_type();
    const bool single = type == at::kFloat;
    TORCH_CHECK_TYPE(stored == type || (single && (stored == at::kBFloat16 || stored == at::kHalf)), name, " must be ",
                     type, single ? ", bfloat16 or float16" : "", ", got ", stored);
    check_device(name, tensor, compute);
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && compute.layout() == at::kStrided, name, " must be dense");
}

void check_rows(const at::Tensor& X, const at::Tensor& C, const at::Tensor& compute) {
    check_storage("X", X, compute);
    TORCH_CHECK_VALUE(X.dim() == 2, "X must have shape (N, D), got ", X.sizes());
    check_coefficients("C", C, X, compute);
}

void check_coefficients(const char* name, const at::Tensor& tensor, const at::Tensor& X, const at::Tensor& compute) {
    check_storage(name, tensor, compute);
    TORCH_CHECK_VALUE(tensor.dim() == 2 && tensor.size(0) == X.size(0), name, " must have shape (", X.size(0),
                      ", M), got ", tensor.sizes());
}

void check_vector(const char* name, const at::Tensor& vector, int64_t size, const at::Tensor& like) {
    check_dtype(name, vector, like.scalar_type());
    TORCH_CHECK_VALUE(vector.dim() == 1 && vector.size(0) == size, name, " must have shape (", size, "), got ",
                      vector.sizes());
    check_device(name, vector, like);
}

void check_vectors(const at::Tensor& V, int64_t filters, int64_t depth) {
    TORCH_CHECK_VALUE(V.dim() == 2 || V.dim() == 3, "V must have shape (M, D) or (K, M, D), got ", V.sizes());
    TORCH_CHECK_VALUE(V.size(-2) == filters && V.size(-1) == depth, "V must have shape (..., ", filters, ", ", depth,
                      "), got ", V.sizes());
}

}  // namespace s3d
