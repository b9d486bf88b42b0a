// Creates the library of operators, torch.ops.s3d_fast, and the Python module s3d_fast._C.
#include <pybind11/stl.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "kernels.h"

// Each operator registers itself in its own file.
TORCH_LIBRARY(s3d_fast, m) {}

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
