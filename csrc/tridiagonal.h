// Finds the extreme eigenpairs of one symmetric tridiagonal matrix T.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace s3d::tridiagonal {

// Returns how many eigenvalues of T lie below x. `squares` holds the squares of the off-diagonal.
inline int64_t count_below(const double* diagonal, const double* squares, int64_t n, double x, double tiny) {
    int64_t below = 0;
    double pivot = 1;
    for (int64_t i = 0; i < n; ++i) {
        pivot = diagonal[i] - x - (i ? squares[i - 1] / pivot : 0);
        if (std::abs(pivot) < tiny) pivot = -tiny;
        below += pivot < 0;
    }
    return below;
}

// Returns eigenvalue number `which` by bisection, to a few units in the last place of the spectral radius.
inline double bisect(const double* diagonal, const double* squares, int64_t n, int64_t which, double low, double high,
                     double tiny) {
    while (true) {
        const double middle = low + (high - low) / 2;
        if (middle <= low || middle >= high || high - low <= 4 * tiny) return middle;
        (count_below(diagonal, squares, n, middle, tiny) > which ? high : low) = middle;
    }
}

// Finds the unit eigenvector of an eigenvalue by inverse iteration. T - value is singular except for rounding, so its
// factorization exchanges rows. `work` has room for 5 n numbers.
inline void eigenvector(const double* diagonal, const double* off, int64_t n, double value, double tiny, double* work,
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
    // The start vector is pseudo-random. A regular one may be orthogonal to the eigenvector by symmetry.
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (int64_t i = 0; i < n; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = 0.5 + static_cast<double>(state >> 40) / static_cast<double>(1 << 24);
    }
    for (int round = 0; round < 3; ++round) {
        // The first round skips the elimination: the start is arbitrary, and so is the result of elimination.
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

// Returns the scratch memory that `extremes` needs, in numbers.
inline int64_t work_size(int64_t n) { return 8 * n; }

// Finds the smallest and the largest eigenvalue, and their unit eigenvectors, of the matrix with this diagonal (n) and
// off-diagonal (n - 1). If an entry is not finite, both eigenvalues are NaN.
template <typename T>
void extremes(const T* diagonal, const T* off_diagonal, int64_t n, double* work, double values[2],
              double* const vectors[2]) {
    double *d = work, *off = d + n, *squares = off + n, *rest = squares + n;
    // Divide the matrix by its largest entry, so that no square overflows or underflows.
    double largest = 0;
    bool finite = true;
    const auto see = [&](double entry) {
        largest = std::max(largest, std::abs(entry));
        finite &= std::isfinite(entry);
    };
    for (int64_t i = 0; i < n; ++i) see(diagonal[i]);
    for (int64_t i = 0; i + 1 < n; ++i) see(off_diagonal[i]);
    if (largest == 0 || !finite) {
        values[0] = values[1] = finite ? 0 : std::numeric_limits<double>::quiet_NaN();
        for (int end = 0; end < 2; ++end) {
            std::fill(vectors[end], vectors[end] + n, 0.);
            vectors[end][0] = 1;
        }
        return;
    }
    // Gershgorin's circles bound the spectrum.
    double low = 0, high = 0;
    for (int64_t i = 0; i < n; ++i) {
        d[i] = diagonal[i] / largest;
        off[i] = i + 1 < n ? off_diagonal[i] / largest : 0;
        squares[i] = off[i] * off[i];
        const double reach = std::abs(off[i]) + (i ? std::abs(off[i - 1]) : 0);
        low = std::min(low, d[i] - reach);
        high = std::max(high, d[i] + reach);
    }
    const double tiny = std::numeric_limits<double>::epsilon() * std::max(-low, high) / 4;
    for (int end = 0; end < 2; ++end) {
        const double found = bisect(d, squares, n, end ? n - 1 : 0, low - 8 * tiny, high + 8 * tiny, tiny);
        values[end] = found * largest;
        eigenvector(d, off, n, found, tiny, rest, vectors[end]);
    }
}

}  // namespace s3d::tridiagonal
