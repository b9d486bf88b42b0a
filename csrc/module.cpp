// Creates the Python module s3d_fast._C. The operators, torch.ops.s3d_fast.*, register themselves in their own files;
// s3d_fast/backends/schemas.py has their schemas.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "errors.h"
#include "panel_choice.h"
#include "timing.h"

namespace s3d {

// PyTorch hands pybind11's exceptions on to Python, and turns all others into RuntimeError.
void raise(Error kind, const std::string& message) {
    switch (kind) {
        case Error::type:
            throw pybind11::type_error(message);
        case Error::index:
            throw pybind11::index_error(message);
        case Error::value:
            break;
    }
    throw pybind11::value_error(message);
}

}  // namespace s3d

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled CPU kernels; the operators themselves are torch.ops.s3d_fast.*.";
#if defined(__clang__)
    m.attr("compiler") = "Clang " __clang_version__;
#else
    m.attr("compiler") = "GCC " __VERSION__;
#endif
    m.attr("torch") = TORCH_VERSION;
    m.def("isa", [] { return std::string(s3d::isa().name); }, "Return the instruction set in use.");
    m.def("available_isas", s3d::available_isas, "Return the instruction sets that this processor has, best first.");
    m.def("compiled_isas", s3d::compiled_isas, "Return the instruction sets that were compiled, best first.");
    m.def("use_isa", s3d::use_isa, pybind11::arg("name"), "Use the named instruction set from now on.");
    m.def(
        "panel_widths",
        [](int64_t filters) {
            std::vector<int> widths;
            const s3d::Kernels<float>& kernel = s3d::kernels<float>();
            for (const int kind : s3d::choose_panels(kernel, filters)) widths.push_back(kernel.panels[kind].width);
            return widths;
        },
        pybind11::arg("filters"), "Return the widths of the panels that this number of filters takes, in float32.");
    m.def(
        "has_bfloat16_products", [] { return s3d::pair_kernels() != nullptr; },
        "Return whether the instruction set in use multiplies bfloat16 numbers.");
    m.def("fma_peak", s3d::fma_peak, pybind11::arg("isa"),
          "Return the float32 operations per second that one thread reaches in registers.");
    m.def("read_bandwidth", s3d::read_bandwidth, pybind11::arg("bytes"),
          "Return the bytes per second at which one thread reads this number of bytes again and again.");
}
