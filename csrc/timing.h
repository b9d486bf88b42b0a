// Measures short times, and the limits of one thread of this processor, which benchmarks compare with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <limits>
#include <string>

namespace s3d {

// Returns the processor time of this thread: what other programs take does not count.
inline double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Returns the shortest time of several calls.
template <typename Call>
double shortest_time(int calls, const Call& call) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < calls; ++i) {
        const double start = thread_seconds();
        call();
        best = std::min(best, thread_seconds() - start);
    }
    return best;
}

// Returns the float32 operations per second that multiply-adds of an instruction set reach in registers. Throws
// std::invalid_argument if this processor cannot run the set.
double fma_peak(const std::string& isa);

// Returns the bytes per second at which this number of bytes is read again and again.
double read_bandwidth(int64_t bytes);

}  // namespace s3d
