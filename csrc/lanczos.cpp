// The parts of Lanczos that are small per filter and would be many small calls otherwise.
#include <cmath>
#include <limits>

#include "operators.h"
#include "parallel.h"

namespace s3d {
namespace {

template <typename T>
T dot(const T* a, const T* b, int64_t count) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

// Squares of entries divided by the largest neither overflow nor underflow.
template <typename T>
T safe_norm(const T* a, int64_t count) {
    T largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(a[i]));
    T sum = 0;
    if (!(largest > 0) || std::isinf(largest)) {
        // Zero, infinity, or NaN: the sum says which.
        for (int64_t i = 0; i < count; ++i) sum += std::abs(a[i]);
        return sum;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += (a[i] / largest) * (a[i] / largest);
    return std::sqrt(sum) * largest;
}

template <typename T>
void extend(const at::Tensor& basis, const at::Tensor& product, const at::Tensor& alpha, const at::Tensor& beta,
            const at::Tensor& length, const at::Tensor& scale, int64_t step) {
    const int64_t filters = basis.size(0), width = basis.size(2);
    const T noise = std::numeric_limits<T>::epsilon() * (T(10) + std::sqrt(static_cast<T>(width)));
    const int64_t per_task = std::max<int64_t>(1, 20000 / ((step + 1) * width));
    run_tasks(ceil_div(filters, per_task), [&](int64_t task) {
        for (int64_t j = task * per_task; j < std::min(filters, (task + 1) * per_task); ++j) {
            T* vectors = basis.mutable_data_ptr<T>() + j * basis.stride(0);
            T* next = vectors + (step + 1) * width;
            T& a = alpha.mutable_data_ptr<T>()[j * alpha.stride(0) + step];
            T& b = beta.mutable_data_ptr<T>()[j * beta.stride(0) + step];
            T& largest = scale.mutable_data_ptr<T>()[j];
            int64_t& dimension = length.mutable_data_ptr<int64_t>()[j];
            if (step > 0 && (&b)[-1] == 0) {
                // Exhausted before: nothing is added.
                a = b = 0;
                std::fill(next, next + width, T(0));
                continue;
            }
            dimension = step + 1;
            const T* from = product.const_data_ptr<T>() + j * product.stride(0);
            std::copy(from, from + width, next);
            a = dot(vectors + step * width, next, width);
            // Once removes the component along the space; twice removes what rounding left of it. The order is that of
            // classical Gram-Schmidt: all components first, so that the result does not depend on theirs.
            T components[1 << 7];
            for (int pass = 0; pass < 2; ++pass) {
                for (int64_t start = 0; start <= step; start += 1 << 7) {
                    const int64_t count = std::min<int64_t>(1 << 7, step + 1 - start);
                    for (int64_t i = 0; i < count; ++i) components[i] = dot(vectors + (start + i) * width, next, width);
                    for (int64_t i = 0; i < count; ++i) {
                        const T* q = vectors + (start + i) * width;
                        for (int64_t d = 0; d < width; ++d) next[d] -= components[i] * q[d];
                    }
                }
            }
            b = safe_norm(next, width);
            largest = std::max(largest, std::abs(a) + b);
            if (b <= noise * largest || step + 1 == width) b = 0;
            for (int64_t d = 0; d < width; ++d) next[d] = b == 0 ? T(0) : next[d] / b;
        }
    });
}

// How many eigenvalues of T lie below x; squares are those of the off-diagonal.
int64_t count_below(const double* diagonal, const double* squares, int64_t n, double x, double tiny) {
    int64_t below = 0;
    double pivot = 1;
    for (int64_t i = 0; i < n; ++i) {
        pivot = diagonal[i] - x - (i ? squares[i - 1] / pivot : 0);
        if (std::abs(pivot) < tiny) pivot = -tiny;
        below += pivot < 0;
    }
    return below;
}

// The eigenvalue number `which` by bisection, to the last bits of the spectral radius.
double bisect(const double* diagonal, const double* squares, int64_t n, int64_t which, double low, double high,
              double tiny) {
    while (true) {
        const double middle = low + (high - low) / 2;
        if (middle <= low || middle >= high || high - low <= 4 * tiny) return middle;
        (count_below(diagonal, squares, n, middle, tiny) > which ? high : low) = middle;
    }
}

// The eigenvector to an eigenvalue, by inverse iteration: (T - value) is factored with row exchanges, as it is singular
// but for rounding. `work` holds 5 n numbers.
void eigenvector(const double* diagonal, const double* off, int64_t n, double value, double tiny, double* work,
                 double* x) {
    double *d = work, *u = d + n, *uu = u + n, *l = uu + n, *swapped = l + n;
    for (int64_t i = 0; i < n; ++i) {
        d[i] = diagonal[i] - value;
        u[i] = i + 1 < n ? off[i] : 0;
        uu[i] = 0;
    }
    for (int64_t i = 0; i + 1 < n; ++i) {
        double below = off[i];
        swapped[i] = std::abs(below) > std::abs(d[i]);
        if (swapped[i] != 0) {
            std::swap(d[i], below);
            std::swap(u[i], d[i + 1]);
            std::swap(uu[i], u[i + 1]);
        }
        if (std::abs(d[i]) < tiny) d[i] = tiny;
        l[i] = below / d[i];
        d[i + 1] -= l[i] * u[i];
        u[i + 1] -= l[i] * uu[i];
    }
    if (std::abs(d[n - 1]) < tiny) d[n - 1] = tiny;
    // A start without any structure: by symmetry, a regular one may be orthogonal to what is sought.
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (int64_t i = 0; i < n; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = 0.5 + static_cast<double>(state >> 40) / static_cast<double>(1 << 24);
    }
    for (int round = 0; round < 3; ++round) {
        // The first factor's multipliers have no part in the first round: its start is arbitrary anyway.
        for (int64_t i = 0; round && i + 1 < n; ++i) {
            if (swapped[i] != 0) std::swap(x[i], x[i + 1]);
            x[i + 1] -= l[i] * x[i];
        }
        for (int64_t i = n - 1; i >= 0; --i) {
            double sum = x[i];
            if (i + 1 < n) sum -= u[i] * x[i + 1];
            if (i + 2 < n) sum -= uu[i] * x[i + 2];
            x[i] = sum / d[i];
        }
        double largest = 0, squares = 0;
        for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
        for (int64_t i = 0; i < n; ++i) squares += (x[i] / largest) * (x[i] / largest);
        const double norm = largest * std::sqrt(squares);
        for (int64_t i = 0; i < n; ++i) x[i] /= norm;
    }
}

template <typename T>
void extremes(const at::Tensor& alpha, const at::Tensor& beta, const at::Tensor& length, const at::Tensor& values,
              const at::Tensor& vectors) {
    const int64_t filters = alpha.size(0), steps = alpha.size(1);
    run_tasks(ceil_div(filters, 4), [&](int64_t task) {
        std::vector<double> memory(8 * steps);
        double *diagonal = memory.data(), *off = diagonal + steps, *squares = off + steps, *work = squares + steps;
        for (int64_t j = 4 * task; j < std::min(filters, 4 * task + 4); ++j) {
            const T* a = alpha.const_data_ptr<T>() + j * alpha.stride(0);
            const T* b = beta.const_data_ptr<T>() + j * beta.stride(0);
            const int64_t n = length.const_data_ptr<int64_t>()[j];
            double* value = values.mutable_data_ptr<double>() + 2 * j;
            double* vector = vectors.mutable_data_ptr<double>() + 2 * j * steps;
            std::fill(vector, vector + 2 * steps, 0.);
            // By Gershgorin, with the matrix divided by its largest entry so that no square leaves the range.
            double largest = 0;
            for (int64_t i = 0; i < n; ++i) {
                largest = std::max(largest, std::abs(static_cast<double>(a[i])));
                if (i + 1 < n) largest = std::max(largest, std::abs(static_cast<double>(b[i])));
            }
            if (!(largest > 0) || !std::isfinite(largest)) {
                const double same = largest > 0 ? std::numeric_limits<double>::quiet_NaN() : 0;
                value[0] = value[1] = same;
                vector[0] = vector[steps] = 1;
                continue;
            }
            double low = 0, high = 0;
            for (int64_t i = 0; i < n; ++i) {
                diagonal[i] = a[i] / largest;
                off[i] = i + 1 < n ? b[i] / largest : 0;
                squares[i] = off[i] * off[i];
                const double reach = std::abs(off[i]) + (i ? std::abs(off[i - 1]) : 0);
                low = std::min(low, diagonal[i] - reach);
                high = std::max(high, diagonal[i] + reach);
            }
            const double tiny = std::numeric_limits<double>::epsilon() * std::max(-low, high) / 4;
            for (int end = 0; end < 2; ++end) {
                const double found =
                    bisect(diagonal, squares, n, end ? n - 1 : 0, low - 8 * tiny, high + 8 * tiny, tiny);
                value[end] = found * largest;
                eigenvector(diagonal, off, n, found, tiny, work, vector + end * steps);
            }
        }
    });
}

}  // namespace

void krylov_extend_meta(at::Tensor& basis, const at::Tensor& product, at::Tensor& alpha, at::Tensor& beta,
                        at::Tensor& length, at::Tensor& scale, int64_t step) {
    const auto type = basis.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, "basis must be float32 or float64, got ", type);
    TORCH_CHECK_VALUE(basis.dim() == 3 && basis.is_contiguous(), "basis must be contiguous, (M, capacity, D), got ",
                      basis.sizes());
    const int64_t filters = basis.size(0);
    TORCH_CHECK_VALUE(0 <= step && step + 1 < basis.size(1), "step must lie in [0, ", basis.size(1) - 1, "), got ", step);
    TORCH_CHECK_VALUE(product.dim() == 2 && product.size(0) == filters && product.size(1) == basis.size(2),
                      "product must have shape (", filters, ", ", basis.size(2), "), got ", product.sizes());
    for (const at::Tensor* numbers : {&alpha, &beta}) {
        TORCH_CHECK_VALUE(numbers->dim() == 2 && numbers->size(0) == filters && numbers->size(1) > step &&
                              numbers->is_contiguous(),
                          "alpha and beta must be contiguous, (", filters, ", more than ", step, "), got ",
                          numbers->sizes());
    }
    TORCH_CHECK_VALUE(length.dim() == 1 && length.size(0) == filters && length.is_contiguous(),
                      "length must have shape (", filters, "), got ", length.sizes());
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.size(0) == filters && scale.is_contiguous(), "scale must have shape (",
                      filters, "), got ", scale.sizes());
    TORCH_CHECK_TYPE(length.scalar_type() == at::kLong, "length must be int64, got ", length.scalar_type());
    TORCH_CHECK_TYPE(product.scalar_type() == type && alpha.scalar_type() == type && beta.scalar_type() == type &&
                         scale.scalar_type() == type,
                     "product, alpha, beta and scale must be ", type);
}

void krylov_extend(at::Tensor& basis, const at::Tensor& product, at::Tensor& alpha, at::Tensor& beta, at::Tensor& length,
                   at::Tensor& scale, int64_t step) {
    krylov_extend_meta(basis, product, alpha, beta, length, scale, step);
    const at::Tensor dense = product.contiguous();
    if (basis.scalar_type() == at::kFloat) {
        extend<float>(basis, dense, alpha, beta, length, scale, step);
    } else {
        extend<double>(basis, dense, alpha, beta, length, scale, step);
    }
}

std::tuple<at::Tensor, at::Tensor> tridiagonal_extremes_meta(const at::Tensor& alpha, const at::Tensor& beta,
                                                             const at::Tensor& length) {
    const auto type = alpha.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, "alpha must be float32 or float64, got ", type);
    TORCH_CHECK_TYPE(beta.scalar_type() == type, "beta must be ", type, ", got ", beta.scalar_type());
    TORCH_CHECK_TYPE(length.scalar_type() == at::kLong, "length must be int64, got ", length.scalar_type());
    TORCH_CHECK_VALUE(alpha.dim() == 2 && alpha.size(1) > 0, "alpha must have shape (M, k), k > 0, got ", alpha.sizes());
    TORCH_CHECK_VALUE(beta.sizes() == alpha.sizes(), "beta must have shape ", alpha.sizes(), ", got ", beta.sizes());
    TORCH_CHECK_VALUE(length.dim() == 1 && length.size(0) == alpha.size(0), "length must have shape (", alpha.size(0),
                      "), got ", length.sizes());
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
    if (a.scalar_type() == at::kFloat) {
        extremes<float>(a, b, lengths, std::get<0>(result), std::get<1>(result));
    } else {
        extremes<double>(a, b, lengths, std::get<0>(result), std::get<1>(result));
    }
    return result;
}

}  // namespace s3d
