// Measures short times, and the limits of one thread of this processor, which benchmarks compare with.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <ctime>
#include <string>

namespace s3d {

// Returns the processor time of this thread: what other programs take does not count.
inline double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Returns the median time of an odd number of calls. The clocks of virtual machines err in both directions.
template <int calls, typename Call>
double median_time(const Call& call) {
    std::array<double, calls> times;
    for (double& time : times) {
        const double start = thread_seconds();
        call();
        time = thread_seconds() - start;
    }
    std::sort(times.begin(), times.end());
    return times[calls / 2];
}

// Returns the float32 operations per second that multiply-adds of an instruction set reach in registers. Throws
// std::invalid_argument if this processor cannot run the set.
double fma_peak(const std::string& isa);

// Returns the bytes per second at which this number of bytes is read again and again.
double read_bandwidth(int64_t bytes);

}  // namespace s3d
