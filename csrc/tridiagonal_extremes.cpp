// Finds the extreme eigenpairs of symmetric tridiagonal matrices, one per filter: see reference.tridiagonal_extremes.
#include "checks.h"
#include "dtype.h"
#include "operator.h"
#include "parallel.h"
#include "tridiagonal.h"

namespace s3d {
namespace {

template <typename T>
void extremes(const at::Tensor& alpha, const at::Tensor& beta, const at::Tensor& length, const at::Tensor& values,
              const at::Tensor& vectors) {
    const int64_t filters = alpha.size(0), steps = alpha.size(1), per_task = 4;
    run_tasks(ceil_div(filters, per_task), [&](int64_t task) {
        std::vector<double> work(tridiagonal::work_size(steps));
        for (int64_t j = task * per_task; j < std::min(filters, (task + 1) * per_task); ++j) {
            double* vector = vectors.mutable_data_ptr<double>() + 2 * j * steps;
            double* const ends[2] = {vector, vector + steps};
            std::fill(vector, vector + 2 * steps, 0.);
            tridiagonal::extremes(alpha.const_data_ptr<T>() + j * alpha.stride(0),
                                  beta.const_data_ptr<T>() + j * beta.stride(0), length.const_data_ptr<int64_t>()[j],
                                  work.data(), values.mutable_data_ptr<double>() + 2 * j, ends);
        }
    });
}

std::tuple<at::Tensor, at::Tensor> tridiagonal_extremes_meta(const at::Tensor& alpha, const at::Tensor& beta,
                                                             const at::Tensor& length) {
    check_compute_dtype("alpha", alpha);
    check_dtype("beta", beta, alpha.scalar_type());
    check_dtype("length", length, at::kLong);
    TORCH_CHECK_VALUE(alpha.dim() == 2 && alpha.size(1) > 0, "alpha must have shape (M, k) with k > 0, got ",
                      alpha.sizes());
    TORCH_CHECK_VALUE(beta.sizes() == alpha.sizes(), "beta must have shape ", alpha.sizes(), ", got ", beta.sizes());
    TORCH_CHECK_VALUE(length.dim() == 1 && length.size(0) == alpha.size(0), "length must have shape (", alpha.size(0),
                      "), got ", length.sizes());
    check_device("beta", beta, alpha);
    check_device("length", length, alpha);
    const auto options = alpha.options().dtype(at::kDouble);
    return {at::empty({alpha.size(0), 2}, options), at::empty({alpha.size(0), 2, alpha.size(1)}, options)};
}

std::tuple<at::Tensor, at::Tensor> tridiagonal_extremes(const at::Tensor& alpha, const at::Tensor& beta,
                                                        const at::Tensor& length) {
    auto result = tridiagonal_extremes_meta(alpha, beta, length);
    const at::Tensor lengths = length.contiguous();
    for (int64_t j = 0; j < lengths.numel(); ++j) {
        const int64_t n = lengths.const_data_ptr<int64_t>()[j];
        TORCH_CHECK_INDEX(1 <= n && n <= alpha.size(1), "length must lie in [1, ", alpha.size(1), "], got ", n);
    }
    const at::Tensor a = alpha.stride(1) == 1 ? alpha : alpha.contiguous();
    const at::Tensor b = beta.stride(1) == 1 ? beta : beta.contiguous();
    with_dtype(a.scalar_type(),
               [&]<typename T>() { extremes<T>(a, b, lengths, std::get<0>(result), std::get<1>(result)); });
    return result;
}

TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    register_operator(m, "tridiagonal_extremes(Tensor alpha, Tensor beta, Tensor length) -> (Tensor, Tensor)",
                      tridiagonal_extremes, tridiagonal_extremes_meta);
}

}  // namespace
}  // namespace s3d
