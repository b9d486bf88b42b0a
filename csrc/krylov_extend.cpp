// Adds one Lanczos vector to the Krylov space of every filter: see reference.krylov_extend.
//
// The work per filter is small. In PyTorch it would be many small calls.
#include "checks.h"
#include "dtype.h"
#include "kernels.h"
#include "parallel.h"

namespace s3d {
namespace {

// Returns the norm of a vector. It divides entries by the largest one, so that no square overflows or underflows.
template <typename T>
T safe_norm(const T* a, int64_t count) {
    T largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(a[i]));
    T sum = 0;
    if (!(largest > 0) || std::isinf(largest)) {
        // The norm is zero, infinity or NaN, and so is the sum.
        for (int64_t i = 0; i < count; ++i) sum += std::abs(a[i]);
        return sum;
    }
    for (int64_t i = 0; i < count; ++i) sum += (a[i] / largest) * (a[i] / largest);
    return std::sqrt(sum) * largest;
}

// Returns the larger number, or NaN if one of them is NaN. std::max returns its first argument if the second is NaN.
template <typename T>
T maximum(T a, T b) {
    return std::isnan(a) || a >= b ? a : b;
}

template <typename T>
void extend(const Tensor& basis, const Tensor& product, const Tensor& alpha, const Tensor& beta, const Tensor& length,
            const Tensor& scale, int64_t step) {
    const int64_t filters = basis.size(0), width = basis.size(2);
    const T noise = std::numeric_limits<T>::epsilon() * (T(10) + std::sqrt(static_cast<T>(width)));
    const int64_t per_task = std::max<int64_t>(1, 20000 / ((step + 1) * width));
    const Kernels<T>& kernel = kernels<T>();
    T* const spaces = mutable_data_of<T>(basis);
    T* const diagonals = mutable_data_of<T>(alpha);
    T* const couplings = mutable_data_of<T>(beta);
    T* const scales = mutable_data_of<T>(scale);
    int64_t* const lengths = mutable_data_of<int64_t>(length);
    const T* const products = data_of<T>(product);
    const int64_t basis_stride = basis.stride(0), product_stride = product.stride(0);
    const int64_t alpha_stride = alpha.stride(0), beta_stride = beta.stride(0);
    run_tasks(ceil_div(filters, per_task), [&](int64_t task) {
        std::vector<T> components(step + 1);
        for (int64_t j = task * per_task; j < std::min(filters, (task + 1) * per_task); ++j) {
            T* vectors = spaces + j * basis_stride;
            T* next = vectors + (step + 1) * width;
            T* const off_diagonal = couplings + j * beta_stride;
            T& a = diagonals[j * alpha_stride + step];
            T& b = off_diagonal[step];
            T& largest = scales[j];
            int64_t& dimension = lengths[j];
            if (step > 0 && off_diagonal[step - 1] == 0) {
                // The space is invariant already, so the step adds nothing.
                a = b = 0;
                std::fill(next, next + width, T(0));
                continue;
            }
            dimension = step + 1;
            const T* from = products + j * product_stride;
            std::copy(from, from + width, next);
            a = kernel.dot(vectors + step * width, next, width);
            // The first pass removes the components along the space. The second pass removes what rounding left of
            // them. Each pass computes all components first: the reference uses classical Gram-Schmidt too.
            for (int pass = 0; pass < 2; ++pass) {
                for (int64_t i = 0; i <= step; ++i) components[i] = kernel.dot(vectors + i * width, next, width);
                for (int64_t i = 0; i <= step; ++i) kernel.add(-components[i], vectors + i * width, width, next);
            }
            b = safe_norm(next, width);
            largest = maximum(largest, std::abs(a) + b);
            const bool exhausted = b <= noise * largest || step + 1 == width;
            if (exhausted) b = 0;
            for (int64_t d = 0; d < width; ++d) next[d] = exhausted ? T(0) : next[d] / b;
        }
    });
}

void check(const Tensor& basis, const Tensor& product, const Tensor& alpha, const Tensor& beta, const Tensor& length,
           const Tensor& scale, int64_t step) {
    check_compute_dtype("basis", basis);
    CHECK_VALUE(basis.dim() == 3 && basis.size(2) > 0 && basis.is_contiguous(),
                "basis must be contiguous and must have shape (M, capacity, D) with D > 0, got ", basis.sizes());
    const int64_t filters = basis.size(0);
    CHECK_VALUE(0 <= step && step < basis.size(1) - 1, "step must lie in [0, ", basis.size(1) - 1, "), got ", step);
    CHECK_VALUE(product.dim() == 2 && product.size(0) == filters && product.size(1) == basis.size(2),
                "product must have shape (", filters, ", ", basis.size(2), "), got ", product.sizes());
    for (const Tensor* numbers : {&alpha, &beta}) {
        CHECK_VALUE(
            numbers->dim() == 2 && numbers->size(0) == filters && numbers->size(1) > step && numbers->is_contiguous(),
            "alpha and beta must be contiguous and must have shape (", filters, ", steps) with steps > ", step,
            ", got ", numbers->sizes());
    }
    CHECK_VALUE(length.dim() == 1 && length.size(0) == filters && length.is_contiguous(),
                "length must be contiguous and must have shape (", filters, "), got ", length.sizes());
    CHECK_VALUE(scale.dim() == 1 && scale.size(0) == filters && scale.is_contiguous(),
                "scale must be contiguous and must have shape (", filters, "), got ", scale.sizes());
    check_dtype("length", length, ScalarType::Long);
    check_device("length", length);
    const std::pair<const char*, const Tensor*> others[] = {
        {"product", &product}, {"alpha", &alpha}, {"beta", &beta}, {"scale", &scale}};
    for (const auto& [name, tensor] : others) {
        check_dtype(name, *tensor, basis.scalar_type());
        check_device(name, *tensor);
    }
}

void krylov_extend(const Tensor& basis, const Tensor& product, const Tensor& alpha, const Tensor& beta,
                   const Tensor& length, const Tensor& scale, int64_t step) {
    check(basis, product, alpha, beta, length, scale, step);
    const Tensor dense = as_contiguous(product);
    for (const Tensor* changed : {&basis, &alpha, &beta, &length, &scale}) mark_changed(*changed);
    with_dtype(basis.scalar_type(), [&]<typename T>() { extend<T>(basis, dense, alpha, beta, length, scale, step); });
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("krylov_extend", TORCH_BOX(&krylov_extend)); }

}  // namespace
}  // namespace s3d
