// Defines the checks that several operators make before they touch memory.
#include "checks.h"

#include "dtype.h"

namespace s3d {

void check_compute_dtype(const char* name, const Tensor& tensor) {
    const ScalarType type = dtype_of(tensor);
    CHECK_TYPE(is_compute_dtype(type), name, " must be float32 or float64, got ", type);
    check_device(name, tensor);
}

void check_dtype(const char* name, const Tensor& tensor, ScalarType type) {
    CHECK_TYPE(dtype_of(tensor) == type, name, " must be ", type, ", got ", dtype_of(tensor));
}

void check_device(const char* name, const Tensor& tensor) {
    CHECK_VALUE(tensor.is_cpu(), name, " must be on the CPU, got a tensor on another device");
}

void check_storage(const char* name, const Tensor& tensor, ScalarType type) {
    const ScalarType stored = dtype_of(tensor);
    const bool single = type == ScalarType::Float;
    CHECK_TYPE(stored == type || (single && (stored == ScalarType::BFloat16 || stored == ScalarType::Half)), name,
               " must be ", type, single ? ", bfloat16 or float16" : "", ", got ", stored);
    check_device(name, tensor);
}

void check_rows(const Tensor& X, const Tensor& C, ScalarType type) {
    check_storage("X", X, type);
    CHECK_VALUE(X.dim() == 2, "X must have shape (N, D), got ", X.sizes());
    check_coefficients("C", C, X, type);
}

void check_coefficients(const char* name, const Tensor& tensor, const Tensor& X, ScalarType type) {
    check_storage(name, tensor, type);
    CHECK_VALUE(tensor.dim() == 2 && tensor.size(0) == X.size(0), name, " must have shape (", X.size(0), ", M), got ",
                tensor.sizes());
}

void check_vectors(const Tensor& V, int64_t filters, int64_t depth) {
    CHECK_VALUE(V.dim() == 2 || V.dim() == 3, "V must have shape (M, D) or (K, M, D), got ", V.sizes());
    CHECK_VALUE(V.size(-2) == filters && V.size(-1) == depth, "V must have shape (..., ", filters, ", ", depth,
                "), got ", V.sizes());
}

namespace {

struct Extent {
    const char *begin, *end;
};

// Returns the memory from a tensor's first entry to its last; empty if it has none.
Extent extent_of(const Tensor& tensor) {
    const char* begin = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.numel() == 0) return {begin, begin};
    const Integers sizes = tensor.sizes(), strides = tensor.strides();
    int64_t entries = 1;
    for (size_t d = 0; d < sizes.size(); ++d) entries += (sizes[d] - 1) * strides[d];
    return {begin, begin + entries * static_cast<int64_t>(tensor.element_size())};
}

}  // namespace

void check_apart(const char* changed_name, const Tensor& changed, const char* name, const Tensor& read) {
    const Extent written = extent_of(changed), other = extent_of(read);
    CHECK_VALUE(written.end <= other.begin || other.end <= written.begin, name, " must not share memory with ",
                changed_name, ", which the operator changes: clone one of them");
}

}  // namespace s3d
