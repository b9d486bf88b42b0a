// Finds the extreme eigenpairs of symmetric tridiagonal matrices T, and bounds the eigenvalues that they have missed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace s3d::tridiagonal {

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

// The matrices whose eigenvalues bisection finds together: the processor works on independent divisions at once.
constexpr int64_t LANES = 8;

// Finds the smallest eigenvalue of LANES matrices by bisection, to a few units in the last place of their spectral
// radii. Entry (i, lane) of `diagonal` and `squares` is at [i * LANES + lane]. Row i of `squares` holds the squares of
// the couplings between entries i - 1 and i; its first row is zero. A matrix smaller than n has infinite entries at its
// end.
inline void smallest(const double* diagonal, const double* squares, int64_t n, double* low, double* high,
                     const double* tiny) {
    while (true) {
        double middle[LANES], pivot[LANES], lowest[LANES];
        bool done = true;
        for (int64_t lane = 0; lane < LANES; ++lane) {
            middle[lane] = low[lane] + (high[lane] - low[lane]) / 2;
            done &= middle[lane] <= low[lane] || middle[lane] >= high[lane] || high[lane] - low[lane] <= 4 * tiny[lane];
            pivot[lane] = lowest[lane] = 1;
        }
        if (done) {
            std::copy(middle, middle + LANES, low);
            return;
        }
        for (int64_t i = 0; i < n; ++i) {
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const double next = diagonal[i * LANES + lane] - middle[lane] - squares[i * LANES + lane] / pivot[lane];
                pivot[lane] = std::abs(next) < tiny[lane] ? -tiny[lane] : next;
                lowest[lane] = std::min(lowest[lane], pivot[lane]);
            }
        }
        // A negative pivot: an eigenvalue lies below.
        for (int64_t lane = 0; lane < LANES; ++lane) (lowest[lane] < 0 ? high : low)[lane] = middle[lane];
    }
}

// Returns the scratch memory that `extremes` needs, in numbers.
inline int64_t work_size(int64_t n) { return (2 * LANES + 7) * n; }

// Finds the smallest and the largest eigenvalue, and their unit eigenvectors, of up to LANES / 2 matrices; matrix j has
// the diagonal diagonals[j] (sizes[j]) and the off-diagonal off_diagonals[j] (sizes[j] - 1). values[2 * j + end] and
// vectors[2 * j + end] get the results. If an entry is not finite, both eigenvalues are NaN.
template <typename T>
void extremes(const T* const* diagonals, const T* const* off_diagonals, const int64_t* sizes, int64_t count,
              double* work, double* values, double* const* vectors) {
    const int64_t n = *std::max_element(sizes, sizes + count);
    double *entries = work, *squares = entries + LANES * n, *rest = squares + LANES * n;
    double low[LANES] = {}, high[LANES] = {}, tiny[LANES], largest[LANES / 2] = {};
    bool regular[LANES / 2] = {};
    std::fill(entries, entries + LANES * n, std::numeric_limits<double>::infinity());
    std::fill(squares, squares + LANES * n, 0.);
    std::fill(tiny, tiny + LANES, 1.);
    for (int64_t j = 0; j < count; ++j) {
        const T *diagonal = diagonals[j], *off = off_diagonals[j];
        bool finite = true;
        const auto see = [&](double entry) {
            largest[j] = std::max(largest[j], std::abs(entry));
            finite &= std::isfinite(entry);
        };
        for (int64_t i = 0; i < sizes[j]; ++i) see(diagonal[i]);
        for (int64_t i = 0; i + 1 < sizes[j]; ++i) see(off[i]);
        regular[j] = finite && largest[j] > 0;
        if (!regular[j]) {
            for (int64_t end = 2 * j; end < 2 * j + 2; ++end) {
                values[end] = finite ? 0 : std::numeric_limits<double>::quiet_NaN();
                std::fill(vectors[end], vectors[end] + sizes[j], 0.);
                vectors[end][0] = 1;
            }
            continue;
        }
        // Divide the matrix by its largest entry, so that no square overflows or underflows. Gershgorin's circles bound
        // the spectrum. The largest eigenvalue is minus the smallest one of -T.
        double bottom = 0, top = 0, before = 0;
        for (int64_t i = 0; i < sizes[j]; ++i) {
            const double d = diagonal[i] / largest[j];
            const double coupling = i + 1 < sizes[j] ? std::abs(static_cast<double>(off[i])) / largest[j] : 0;
            bottom = std::min(bottom, d - before - coupling);
            top = std::max(top, d + before + coupling);
            for (int64_t end = 0; end < 2; ++end) {
                entries[i * LANES + 2 * j + end] = end ? -d : d;
                squares[i * LANES + 2 * j + end] = before * before;
            }
            before = coupling;
        }
        const double last = std::numeric_limits<double>::epsilon() * std::max(-bottom, top) / 4;
        for (int64_t end = 0; end < 2; ++end) {
            tiny[2 * j + end] = last;
            low[2 * j + end] = (end ? -top : bottom) - 8 * last;
            high[2 * j + end] = (end ? -bottom : top) + 8 * last;
        }
    }
    smallest(entries, squares, n, low, high, tiny);
    for (int64_t j = 0; j < count; ++j) {
        if (!regular[j]) continue;
        double *d = rest, *off = d + sizes[j];
        for (int64_t i = 0; i < sizes[j]; ++i) {
            d[i] = diagonals[j][i] / largest[j];
            off[i] = i + 1 < sizes[j] ? off_diagonals[j][i] / largest[j] : 0;
        }
        for (int64_t end = 0; end < 2; ++end) {
            const double found = end ? -low[2 * j + end] : low[2 * j + end];
            values[2 * j + end] = found * largest[j];
            eigenvector(d, off, sizes[j], found, tiny[2 * j], off + sizes[j], vectors[2 * j + end]);
        }
    }
}

// Returns whether sum_i phi_i(mu)^2 >= growth for i = 0 ... n, where phi_i are the Lanczos polynomials of T. mu lies
// `width` beyond the extreme eigenvalue at an end of T's spectrum (sign = 1: the largest). The pivots of
// sign (mu - T) are positive there, up to rounding: phi_i(mu) / phi_(i - 1)(mu) = pivot_i / off_diagonal_i.
inline bool has_grown(const double* diagonal, const double* off, int64_t n, double mu, double sign, double growth) {
    double pivot = 1, square = 0, term = 1, total = 1;
    for (int64_t i = 0; i < n; ++i) {
        pivot = sign * (mu - diagonal[i]) - square / pivot;
        if (!(pivot > 0)) return false;
        const double ratio = pivot / off[i];
        term *= ratio * ratio;
        total += term;
        if (total >= growth) return true;
        square = off[i] * off[i];
    }
    return false;
}

// Returns the least width with growth at an end, up to a factor of 2^(1/16), rounded up: see
// reference.certified_widths. `work` has room for 2 n numbers.
template <typename T>
double certified_width(const T* diagonal, const T* off_diagonal, int64_t n, double value, double sign, double growth,
                       double* work) {
    double *d = work, *off = d + n, largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        largest = std::max(
            {largest, std::abs(static_cast<double>(diagonal[i])), std::abs(static_cast<double>(off_diagonal[i]))});
    }
    if (off_diagonal[n - 1] == 0) return 0;
    if (!std::isfinite(largest) || !std::isfinite(value)) return std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < n; ++i) {
        d[i] = diagonal[i] / largest;
        off[i] = off_diagonal[i] / largest;
    }
    // The first pivot over the first coupling exceeds the root of `growth` at the upper end.
    double low = -52, high = std::log2(growth) / 2 + 1;
    while (high - low > 1. / 16) {
        const double middle = low + (high - low) / 2;
        const double mu = value / largest + sign * std::exp2(middle);
        (has_grown(d, off, n, mu, sign, growth) ? high : low) = middle;
    }
    return std::exp2(high) * largest;
}

}  // namespace s3d::tridiagonal
