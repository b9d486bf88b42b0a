// Registers the operators (torch.ops.s3d_fast.*) and makes the Python module s3d_fast._C.
#include <pybind11/stl.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "kernels.h"
#include "operators.h"

namespace s3d {

void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute) {
    const at::ScalarType type = compute.scalar_type(), stored = tensor.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, "V must be float32 or float64, got ", type);
    const bool fits = stored == type || (type == at::kFloat && (stored == at::kBFloat16 || stored == at::kHalf));
    TORCH_CHECK_TYPE(fits, name, " must be ", type, type == at::kFloat ? ", bfloat16 or float16" : "", ", got ", stored);
    TORCH_CHECK_VALUE(tensor.device() == compute.device(), name, " must be on ", compute.device(), ", got ", tensor.device());
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && compute.layout() == at::kStrided, name, " must be dense");
}

}  // namespace s3d

TORCH_LIBRARY(s3d_fast, m) {
    m.def("splitting_matvec(Tensor X, Tensor C, Tensor V, bool bias) -> Tensor");
    m.def("splitting_matvec_grouped(Tensor[] X, Tensor[] C, Tensor[] V, bool[] bias) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("splitting_matvec", s3d::splitting_matvec);
    m.impl("splitting_matvec_grouped", s3d::splitting_matvec_grouped);
}

TORCH_LIBRARY_IMPL(s3d_fast, Meta, m) {
    m.impl("splitting_matvec", s3d::splitting_matvec_meta);
    m.impl("splitting_matvec_grouped", s3d::splitting_matvec_grouped_meta);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "Compiled CPU kernels; the operators themselves are torch.ops.s3d_fast.*.";
    m.attr("compiler") = __VERSION__;
    m.def("isa", [] { return std::string(s3d::isa().name); }, "Return the instruction set in use.");
    m.def("available_isas", s3d::available_isas, "Return the instruction sets that this processor has, best first.");
    m.def("compiled_isas", s3d::compiled_isas, "Return the instruction sets that were compiled, best first.");
    m.def("use_isa", s3d::use_isa, pybind11::arg("name"), "Use the named instruction set from now on.");
}
