// Registers the operators (torch.ops.s3d_fast.*) and makes the Python module s3d_fast._C.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "kernels.h"
#include "operators.h"

namespace s3d {

void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute) {
    const at::ScalarType type = compute.scalar_type(), stored = tensor.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, "V must be float32 or float64, got ", type);
    const bool fits = stored == type || (type == at::kFloat && (stored == at::kBFloat16 || stored == at::kHalf));
    TORCH_CHECK_TYPE(fits, name, " must be ", type, type == at::kFloat ? ", bfloat16 or float16" : "", ", got ",
                     stored);
    TORCH_CHECK_VALUE(tensor.device() == compute.device(), name, " must be on ", compute.device(), ", got ",
                      tensor.device());
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && compute.layout() == at::kStrided, name, " must be dense");
}

void mark_changed(const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace s3d

TORCH_LIBRARY(s3d_fast, m) {
    m.def("splitting_matvec(Tensor X, Tensor C, Tensor V, bool bias) -> Tensor");
    m.def("splitting_matvec_grouped(Tensor[] X, Tensor[] C, Tensor[] V, bool[] bias) -> Tensor[]");
    m.def("edgeconv_matvec(Tensor X, Tensor winner, Tensor C, Tensor V, bool bias) -> Tensor");
    m.def("splitting_matrices(Tensor X, Tensor C, bool bias) -> Tensor");
    m.def("add_splitting_matrices(Tensor(a!) out, Tensor X, Tensor C, bool bias, float weight) -> ()");
    m.def(
        "curvature_coefficients(Tensor g, Tensor z, Tensor? scale, int axis, int curvature, float a, float b, float[] "
        "kink_at, float[] kink_jump, float sharpness) -> Tensor");
    m.def(
        "curvature_coefficients_(Tensor(a!) g, Tensor z, Tensor? scale, int axis, int curvature, float a, float b, "
        "float[] kink_at, float[] kink_jump, float sharpness) -> ()");
    m.def(
        "grow_weights(Tensor[] weight, Tensor[] rows, Tensor?[] row_scale, Tensor?[] shift, Tensor?[] shift_rows, "
        "Tensor?[] columns, Tensor?[] column_scale, float[] shift_scale) -> Tensor[]");
    m.def(
        "krylov_extend(Tensor(a!) basis, Tensor product, Tensor(b!) alpha, Tensor(c!) beta, Tensor(d!) length, "
        "Tensor(e!) scale, int step) -> ()");
    m.def("symmetric_extremes(Tensor S) -> (Tensor, Tensor)");
    m.def("tridiagonal_extremes(Tensor alpha, Tensor beta, Tensor length) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("splitting_matvec", s3d::splitting_matvec);
    m.impl("splitting_matvec_grouped", s3d::splitting_matvec_grouped);
    m.impl("edgeconv_matvec", s3d::edgeconv_matvec);
    m.impl("splitting_matrices", s3d::splitting_matrices);
    m.impl("add_splitting_matrices", s3d::add_splitting_matrices);
    m.impl("curvature_coefficients", s3d::curvature_coefficients);
    m.impl("curvature_coefficients_", s3d::curvature_coefficients_inplace);
    m.impl("grow_weights", s3d::grow_weights);
    m.impl("krylov_extend", s3d::krylov_extend);
    m.impl("symmetric_extremes", s3d::symmetric_extremes);
    m.impl("tridiagonal_extremes", s3d::tridiagonal_extremes);
}

TORCH_LIBRARY_IMPL(s3d_fast, Meta, m) {
    m.impl("splitting_matvec", s3d::splitting_matvec_meta);
    m.impl("splitting_matvec_grouped", s3d::splitting_matvec_grouped_meta);
    m.impl("edgeconv_matvec", s3d::edgeconv_matvec_meta);
    m.impl("splitting_matrices", s3d::splitting_matrices_meta);
    m.impl("add_splitting_matrices", s3d::add_splitting_matrices_meta);
    m.impl("curvature_coefficients", s3d::curvature_coefficients_meta);
    m.impl("curvature_coefficients_", s3d::curvature_coefficients_inplace_meta);
    m.impl("grow_weights", s3d::grow_weights_meta);
    m.impl("krylov_extend", s3d::krylov_extend_meta);
    m.impl("symmetric_extremes", s3d::symmetric_extremes_meta);
    m.impl("tridiagonal_extremes", s3d::tridiagonal_extremes_meta);
}

// None of them can be differentiated: an error, and not a gradient of zero.
TORCH_LIBRARY_IMPL(s3d_fast, Autograd, m) {
    m.impl("splitting_matvec", torch::autograd::autogradNotImplementedFallback());
    m.impl("splitting_matvec_grouped", torch::autograd::autogradNotImplementedFallback());
    m.impl("edgeconv_matvec", torch::autograd::autogradNotImplementedFallback());
    m.impl("splitting_matrices", torch::autograd::autogradNotImplementedFallback());
    m.impl("add_splitting_matrices", torch::autograd::autogradNotImplementedFallback());
    m.impl("curvature_coefficients", torch::autograd::autogradNotImplementedFallback());
    m.impl("curvature_coefficients_", torch::autograd::autogradNotImplementedFallback());
    m.impl("grow_weights", torch::autograd::autogradNotImplementedFallback());
    m.impl("krylov_extend", torch::autograd::autogradNotImplementedFallback());
    m.impl("symmetric_extremes", torch::autograd::autogradNotImplementedFallback());
    m.impl("tridiagonal_extremes", torch::autograd::autogradNotImplementedFallback());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "Compiled CPU kernels; the operators themselves are torch.ops.s3d_fast.*.";
#if defined(__clang__)
    m.attr("compiler") = "Clang " __clang_version__;
#else
    m.attr("compiler") = "GCC " __VERSION__;
#endif
    m.def("isa", [] { return std::string(s3d::isa().name); }, "Return the instruction set in use.");
    m.def("available_isas", s3d::available_isas, "Return the instruction sets that this processor has, best first.");
    m.def("compiled_isas", s3d::compiled_isas, "Return the instruction sets that were compiled, best first.");
    m.def("use_isa", s3d::use_isa, pybind11::arg("name"), "Use the named instruction set from now on.");
}
