// Defines the checks that several operators make before they touch memory.
#include "checks.h"

#include "dtype.h"

namespace s3d {

void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute) {
    const at::ScalarType type = compute.scalar_type(), stored = tensor.scalar_type();
    TORCH_CHECK_TYPE(is_compute_dtype(type), "V must be float32 or float64, got ", type);
    const bool fits = stored == type || (type == at::kFloat && (stored == at::kBFloat16 || stored == at::kHalf));
    TORCH_CHECK_TYPE(fits, name, " must be ", type, type == at::kFloat ? ", bfloat16 or float16" : "", ", got ",
                     stored);
    TORCH_CHECK_VALUE(tensor.device() == compute.device(), name, " must be on ", compute.device(), ", got ",
                      tensor.device());
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && compute.layout() == at::kStrided, name, " must be dense");
}

}  // namespace s3d
