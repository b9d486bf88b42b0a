// Symmetric tridiagonal matrices, one per filter: reference.tridiagonal_extremes and reference.certified_widths.
#include "checks.h"
#include "dtype.h"
#include "parallel.h"
#include "tridiagonal.h"

namespace s3d {
namespace {

template <typename T>
void extremes(const Tensor& alpha, const Tensor& beta, const Tensor& length, const Tensor& values,
              const Tensor& vectors) {
    const int64_t filters = alpha.size(0), steps = alpha.size(1), per_task = tridiagonal::LANES / 2;
    const int64_t alpha_stride = alpha.stride(0), beta_stride = beta.stride(0);
    const T *const diagonals = data_of<T>(alpha), *const couplings = data_of<T>(beta);
    const int64_t* const lengths = data_of<int64_t>(length);
    double *const all_values = mutable_data_of<double>(values), *const all_vectors = mutable_data_of<double>(vectors);
    run_tasks(ceil_div(filters, per_task), [&](int64_t task) {
        std::vector<double> work(tridiagonal::work_size(steps));
        const int64_t first = task * per_task, count = std::min(per_task, filters - first);
        const T *diagonal[tridiagonal::LANES / 2], *off_diagonal[tridiagonal::LANES / 2];
        double* ends[tridiagonal::LANES];
        for (int64_t j = 0; j < count; ++j) {
            diagonal[j] = diagonals + (first + j) * alpha_stride;
            off_diagonal[j] = couplings + (first + j) * beta_stride;
        }
        for (int64_t end = 0; end < 2 * count; ++end) {
            ends[end] = all_vectors + (2 * first + end) * steps;
            std::fill(ends[end], ends[end] + steps, 0.);
        }
        tridiagonal::extremes(diagonal, off_diagonal, lengths + first, count, work.data(), all_values + 2 * first,
                              ends);
    });
}

template <typename T>
void widths(const Tensor& alpha, const Tensor& beta, const Tensor& length, const Tensor& values, const Tensor& growth,
            const Tensor& result) {
    const int64_t filters = alpha.size(0), steps = alpha.size(1), per_task = 16;
    const int64_t alpha_stride = alpha.stride(0), beta_stride = beta.stride(0);
    const T *const diagonals = data_of<T>(alpha), *const couplings = data_of<T>(beta);
    const int64_t* const lengths = data_of<int64_t>(length);
    const double *const all_values = data_of<double>(values), *const growths = data_of<double>(growth);
    double* const all_widths = mutable_data_of<double>(result);
    run_tasks(ceil_div(filters, per_task), [&](int64_t task) {
        std::vector<double> work(2 * steps);
        for (int64_t j = task * per_task; j < std::min(filters, (task + 1) * per_task); ++j) {
            for (int64_t end = 0; end < 2; ++end) {
                all_widths[2 * j + end] =
                    tridiagonal::certified_width(diagonals + j * alpha_stride, couplings + j * beta_stride, lengths[j],
                                                 all_values[2 * j + end], end ? 1. : -1., growths[j], work.data());
            }
        }
    });
}

// Checks the matrices; returns their lengths, contiguous.
Tensor checked_lengths(const Tensor& alpha, const Tensor& beta, const Tensor& length) {
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
    Tensor lengths = as_contiguous(length);
    const int64_t* const numbers = data_of<int64_t>(lengths);
    for (int64_t j = 0; j < filters; ++j) {
        CHECK_INDEX(1 <= numbers[j] && numbers[j] <= steps, "length must lie in [1, ", steps, "], got ", numbers[j]);
    }
    return lengths;
}

Tensor with_dense_rows(const Tensor& matrix) { return matrix.stride(1) == 1 ? matrix : as_contiguous(matrix); }

std::tuple<Tensor, Tensor> tridiagonal_extremes(const Tensor& alpha, const Tensor& beta, const Tensor& length) {
    const Tensor lengths = checked_lengths(alpha, beta, length);
    const Tensor values = new_tensor({alpha.size(0), 2}, alpha, ScalarType::Double);
    const Tensor vectors = new_tensor({alpha.size(0), 2, alpha.size(1)}, alpha, ScalarType::Double);
    const Tensor a = with_dense_rows(alpha), b = with_dense_rows(beta);
    with_dtype(a.scalar_type(), [&]<typename T>() { extremes<T>(a, b, lengths, values, vectors); });
    return {values, vectors};
}

Tensor certified_widths(const Tensor& alpha, const Tensor& beta, const Tensor& length, const Tensor& values,
                        const Tensor& growth) {
    const Tensor lengths = checked_lengths(alpha, beta, length);
    const int64_t filters = alpha.size(0);
    check_dtype("values", values, ScalarType::Double);
    check_dtype("growth", growth, ScalarType::Double);
    CHECK_VALUE(values.dim() == 2 && values.size(0) == filters && values.size(1) == 2, "values must have shape (",
                filters, ", 2), got ", values.sizes());
    CHECK_VALUE(growth.dim() == 1 && growth.size(0) == filters, "growth must have shape (", filters, "), got ",
                growth.sizes());
    check_device("values", values);
    check_device("growth", growth);
    const Tensor result = new_tensor({filters, 2}, alpha, ScalarType::Double);
    const Tensor a = with_dense_rows(alpha), b = with_dense_rows(beta);
    const Tensor found = as_contiguous(values), wanted = as_contiguous(growth);
    with_dtype(a.scalar_type(), [&]<typename T>() { widths<T>(a, b, lengths, found, wanted, result); });
    return result;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("tridiagonal_extremes", TORCH_BOX(&tridiagonal_extremes));
    m.impl("certified_widths", TORCH_BOX(&certified_widths));
}

}  // namespace
}  // namespace s3d
