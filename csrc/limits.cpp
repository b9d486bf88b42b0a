// Measures what one thread of this processor can do at most: multiply-adds in registers, and reads of memory.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "timing.h"

namespace s3d {
namespace {

// What is stored here has to be computed.
volatile float result;

}  // namespace

double fma_peak(const std::string& isa) {
    const Kernels<float>& kernel = find_isa(isa).f32;
    constexpr int64_t count = 1 << 15;
    const double seconds = median_time<25>([&] { result = kernel.wide().multiply_adds(count, 0.5f, 1.f); });
    return 2. * count * fma_chains * kernel.lanes / seconds;
}

double read_bandwidth(int64_t bytes) {
    const std::vector<float> memory(std::max<int64_t>(bytes / sizeof(float), 1), 1.f);
    const int64_t count = memory.size();
    const double seconds = median_time<7>([&] { result = isa().f32.dot(memory.data(), memory.data(), count); });
    return static_cast<double>(count * sizeof(float)) / seconds;
}

}  // namespace s3d
