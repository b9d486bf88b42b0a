// Finds the extreme eigenpairs of symmetric tridiagonal matrices, one per filter: see reference.tridiagonal_extremes.
#include "checks.h"
#include "dtype.h"
#include "parallel.h"
#include "tridiagonal.h"

namespace s3d {
namespace {

template <typename T>
void extremes(const Tensor& alpha, const Tensor& beta, const Tensor& length, const Tensor& values,
              const Tensor& vectors) {
    const int64_t filters = alpha.size(0), steps = alpha.size(1), per_task = 4;
    const int64_t alpha_stride = alpha.stride(0), beta_stride = beta.stride(0);
    const T *const diagonals = data_of<T>(alpha), *const couplings = data_of<T>(beta);
    const int64_t* const lengths = data_of<int64_t>(length);
    double *const all_values = mutable_data_of<double>(values), *const all_vectors = mutable_data_of<double>(vectors);
    run_tasks(ceil_div(filters, per_task), [&](int64_t task) {
        std::vector<double> work(tridiagonal::work_size(steps));
        for (int64_t j = task * per_task; j < std::min(filters, (task + 1) * per_task); ++j) {
            double* vector = all_vectors + 2 * j * steps;
            double* const ends[2] = {vector, vector + steps};
            std::fill(vector, vector + 2 * steps, 0.);
            tridiagonal::extremes(diagonals + j * alpha_stride, couplings + j * beta_stride, lengths[j], work.data(),
                                  all_values + 2 * j, ends);
        }
    });
}

std::tuple<Tensor, Tensor> tridiagonal_extremes(const Tensor& alpha, const Tensor& beta, const Tensor& length) {
    check_compute_dtype("alpha", alpha);
    check_dtype("beta", beta, alpha.scalar_type());
    check_dtype("length", length, ScalarType::Long);
    CHECK_VALUE(alpha.dim() == 2 && alpha.size(1) > 0, "alpha must have shape (M, k) with k > 0, got ", alpha.sizes());
    CHECK_VALUE(beta.sizes() == alpha.sizes(), "beta must have shape ", alpha.sizes(), ", got ", beta.sizes());
    CHECK_VALUE(length.dim() == 1 && length.size(0) == alpha.size(0), "length must have shape (", alpha.size(0),
                "), got ", length.sizes());
    check_device("beta", beta);
    check_device("length", length);
    const int64_t filters = alpha.size(0), steps = alpha.size(1);
    const Tensor lengths = as_contiguous(length);
    const int64_t* const numbers = data_of<int64_t>(lengths);
    for (int64_t j = 0; j < filters; ++j) {
        CHECK_INDEX(1 <= numbers[j] && numbers[j] <= steps, "length must lie in [1, ", steps, "], got ", numbers[j]);
    }
    const Tensor values = new_tensor({filters, 2}, alpha, ScalarType::Double);
    const Tensor vectors = new_tensor({filters, 2, steps}, alpha, ScalarType::Double);
    const Tensor a = alpha.stride(1) == 1 ? alpha : as_contiguous(alpha);
    const Tensor b = beta.stride(1) == 1 ? beta : as_contiguous(beta);
    with_dtype(a.scalar_type(), [&]<typename T>() { extremes<T>(a, b, lengths, values, vectors); });
    return {values, vectors};
}

STABLE_TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    m.def("tridiagonal_extremes(Tensor alpha, Tensor beta, Tensor length) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("tridiagonal_extremes", TORCH_BOX(&tridiagonal_extremes)); }

}  // namespace
}  // namespace s3d
