// The operators that the extension registers with PyTorch's dispatcher; `..._meta` gives shapes only.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <vector>

namespace s3d {

at::Tensor splitting_matvec(const at::Tensor& X, const at::Tensor& C, const at::Tensor& V, bool bias);
at::Tensor splitting_matvec_meta(const at::Tensor& X, const at::Tensor& C, const at::Tensor& V, bool bias);

std::vector<at::Tensor> splitting_matvec_grouped(at::TensorList X, at::TensorList C, at::TensorList V,
                                                 c10::List<bool> bias);
std::vector<at::Tensor> splitting_matvec_grouped_meta(at::TensorList X, at::TensorList C, at::TensorList V,
                                                      c10::List<bool> bias);

// Raises unless `compute` is float32 or float64 and `tensor` is stored in that type, or in 16 bits for float32.
void check_storage(const char* name, const at::Tensor& tensor, const at::Tensor& compute);

}  // namespace s3d
