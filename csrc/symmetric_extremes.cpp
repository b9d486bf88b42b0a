// Finds the extreme eigenpairs of many small symmetric matrices, each matrix on one thread.
//
// Householder reflections reduce a matrix to tridiagonal form in float64. LAPACK's drivers spend most of their time on
// the full spectrum, and only its ends are needed here.
#include "checks.h"
#include "dtype.h"
#include "kernels.h"
#include "parallel.h"
#include "tridiagonal.h"

namespace s3d {
namespace {

// Reduces A (n, n), symmetric and stored in full, to the tridiagonal matrix Q^T A Q. Reflection k is
// 1 - scale[k] v v^T. Its vector v overwrites row k of A, right of the diagonal. `v` and `p` are scratch memory for n
// numbers each.
void reduce(double* A, int64_t n, double* diagonal, double* off_diagonal, double* scale, double* v, double* p) {
    const Kernels<double>& kernel = kernels<double>();
    for (int64_t k = 0; k + 1 < n; ++k) {
        const int64_t m = n - k - 1;
        double* below = A + (k + 1) * n + k + 1;  // the remaining rows and columns, m x m
        // A is symmetric, so row k right of the diagonal equals column k below it, and a row is contiguous.
        double* x = A + k * n + k + 1;
        diagonal[k] = A[k * n + k];
        const double tail = kernel.dot(x + 1, x + 1, m - 1);
        // The entries of A are at most 1. A tail this small is rounding error, and its squares may be subnormal.
        if (tail < 1e-280) {
            off_diagonal[k] = x[0];
            scale[k] = 0;
            continue;
        }
        const double norm = std::sqrt(x[0] * x[0] + tail), target = x[0] > 0 ? -norm : norm;
        off_diagonal[k] = target;
        scale[k] = (target - x[0]) / target;
        const double divisor = 1 / (x[0] - target);
        v[0] = 1;
        for (int64_t i = 1; i < m; ++i) v[i] = x[i] * divisor;
        // The reflection turns A into A - v w^T - w v^T with p = scale A v and w = p - scale/2 (p.v) v.
        for (int64_t i = 0; i < m; ++i) p[i] = scale[k] * kernel.dot(below + i * n, v, m);
        kernel.add(-scale[k] / 2 * kernel.dot(p, v, m), v, m, p);
        for (int64_t i = 0; i < m; ++i) {
            kernel.add(-v[i], p, m, below + i * n);
            kernel.add(-p[i], v, m, below + i * n);
        }
        std::copy(v, v + m, x);
    }
    diagonal[n - 1] = A[n * n - 1];
}

template <typename T>
void compute(const Tensor& S, const Tensor& values, const Tensor& vectors) {
    const int64_t matrices = S.size(0), n = S.size(1);
    const Kernels<double>& kernel = kernels<double>();
    const T* const all = data_of<T>(S);
    double* const all_values = mutable_data_of<double>(values);
    double* const all_vectors = mutable_data_of<double>(vectors);
    run_tasks(matrices, [&](int64_t j) {
        Scratch& scratch = Scratch::of_thread();
        scratch.reset(Scratch::bytes_for<double>(n * n) + 5 * Scratch::bytes_for<double>(n) +
                      Scratch::bytes_for<double>(tridiagonal::work_size(n)));
        double* A = scratch.take<double>(n * n);
        double* diagonal = scratch.take<double>(n);
        double* off_diagonal = scratch.take<double>(n);
        double* scale = scratch.take<double>(n);
        double* v = scratch.take<double>(n);
        double* p = scratch.take<double>(n);
        double* work = scratch.take<double>(tridiagonal::work_size(n));
        const T* from = all + j * n * n;
        // Divide by the largest entry, so that no square overflows or underflows.
        double largest = 0;
        for (int64_t i = 0; i < n * n; ++i) largest = std::max(largest, std::abs(static_cast<double>(from[i])));
        const double unit = largest > 0 && std::isfinite(largest) ? largest : 1;
        for (int64_t a = 0; a < n; ++a) {
            for (int64_t b = 0; b < n; ++b) {
                A[a * n + b] = (from[a * n + b] / unit + from[b * n + a] / unit) / 2;
            }
        }
        reduce(A, n, diagonal, off_diagonal, scale, v, p);
        double* value = all_values + 2 * j;
        double* vector = all_vectors + 2 * j * n;
        double* const ends[2] = {vector, vector + n};
        const double *const diagonals[] = {diagonal}, *const couplings[] = {off_diagonal};
        tridiagonal::extremes(diagonals, couplings, &n, 1, work, value, ends);
        value[0] *= unit, value[1] *= unit;
        for (double* end : ends) {
            for (int64_t k = n - 2; k >= 0; --k) {
                const double* reflection = A + k * n + k + 1;
                const int64_t m = n - k - 1;
                if (scale[k] != 0)
                    kernel.add(-scale[k] * kernel.dot(reflection, end + k + 1, m), reflection, m, end + k + 1);
            }
            const double norm = std::sqrt(kernel.dot(end, end, n));
            for (int64_t i = 0; i < n; ++i) end[i] /= norm;
        }
    });
}

// Returns the extreme eigenvalues (M, 2) and unit eigenvectors (M, 2, D) of S (M, D, D), in float64. The vector of a
// repeated eigenvalue is any unit vector of its eigenspace. If both eigenvalues are equal, the vectors may be too.
std::tuple<Tensor, Tensor> symmetric_extremes(const Tensor& S) {
    check_compute_dtype("S", S);
    CHECK_VALUE(S.dim() == 3 && S.size(1) == S.size(2) && S.size(1) > 0, "S must have shape (M, D, D) with D > 0, got ",
                S.sizes());
    const Tensor values = new_tensor({S.size(0), 2}, S, ScalarType::Double);
    const Tensor vectors = new_tensor({S.size(0), 2, S.size(1)}, S, ScalarType::Double);
    const Tensor dense = as_contiguous(S);
    with_dtype(S.scalar_type(), [&]<typename T>() { compute<T>(dense, values, vectors); });
    return {values, vectors};
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("symmetric_extremes", TORCH_BOX(&symmetric_extremes)); }

}  // namespace
}  // namespace s3d
