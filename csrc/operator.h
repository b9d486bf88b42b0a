// Registers operators with PyTorch's dispatcher, as torch.ops.s3d_fast.*.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

namespace s3d {

// Registers one operator. `cpu` computes it. `meta` checks the arguments as `cpu` does and returns results without
// data. Every operator refuses derivatives: without that, PyTorch would return a gradient of zero.
template <typename Signature>
void register_operator(torch::Library& library, const std::string& schema, Signature* cpu, Signature* meta) {
    const std::string name = schema.substr(0, schema.find('('));
    library.def(schema.c_str());
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, cpu));
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, meta));
    library.impl(name.c_str(),
                 torch::dispatch(c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
}

// Tells autograd that an operator changed this tensor in place.
inline void mark_changed(const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace s3d
