// Names PyTorch's stable ABI for the rest of the folder, and adds what it lacks.
//
// Everything here works through C functions that every PyTorch from 2.10 on exports. A call that PyTorch finds by its
// name costs about a microsecond, so these functions skip the calls that would change nothing.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <ostream>
#include <vector>

namespace s3d {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Integers = torch::headeronly::IntHeaderOnlyArrayRef;
using Numbers = torch::headeronly::HeaderOnlyArrayRef<double>;

// Returns the dtype, or Undefined if the stable ABI of PyTorch 2.10 has no name for it.
inline ScalarType dtype_of(const Tensor& tensor) {
    try {
        return tensor.scalar_type();
    } catch (const std::runtime_error&) {
        return ScalarType::Undefined;
    }
}

// Returns the data of a tensor whose dtype is known to be T.
template <typename T>
const T* data_of(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data_of(const Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
}

// Returns a contiguous tensor without values, on the device of `like`.
inline Tensor new_tensor(Integers sizes, const Tensor& like, ScalarType type) {
    int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
    AtenTensorHandle result;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), sizes.data(), sizes.size(), &dtype, nullptr,
                                                            nullptr, 0, nullptr, &result));
    return Tensor(result);
}

inline Tensor new_tensor(std::initializer_list<int64_t> sizes, const Tensor& like, ScalarType type) {
    return new_tensor(Integers(sizes.begin(), sizes.size()), like, type);
}

// Returns a contiguous tensor without values that has the sizes and the dtype of `like`.
inline Tensor new_like(const Tensor& like) { return new_tensor(like.sizes(), like, like.scalar_type()); }

inline Tensor as_contiguous(const Tensor& tensor) {
    return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline OptionalTensor as_contiguous(const OptionalTensor& tensor) {
    return tensor ? OptionalTensor(as_contiguous(*tensor)) : std::nullopt;
}

inline Tensor to_dtype(const Tensor& tensor, ScalarType type) {
    return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

inline OptionalTensor to_dtype(const OptionalTensor& tensor, ScalarType type) {
    return tensor ? OptionalTensor(to_dtype(*tensor, type)) : std::nullopt;
}

// Tells autograd that an operator changes this tensor in place. Copying a tensor to itself does nothing else.
inline void mark_changed(const Tensor& tensor) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(tensor.get(), tensor.get(), 0));
}

// Sizes read [2, 3].
inline std::ostream& operator<<(std::ostream& stream, Integers numbers) {
    stream << "[";
    for (size_t i = 0; i < numbers.size(); ++i) stream << (i ? ", " : "") << numbers[i];
    return stream << "]";
}

}  // namespace s3d
