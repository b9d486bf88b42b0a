// Divides a tensor whose channels have one scale each into runs that a kernel takes in one call.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.h"

namespace s3d {

constexpr int64_t entries_per_task = 1 << 14;

// Calls work(begin, size, scales, factor) for runs of entries, in parallel. A tensor has `count` entries, with `inner`
// entries per channel. Entry begin + i of a run has the scale `factor` times scales[i], or `factor` if scales is null.
// scale is null or has one entry per channel.
template <typename T, typename Work>
void for_scaled_runs(const T* scale, int64_t count, int64_t channels, int64_t inner, const Work& work) {
    // A short run does not repay the call of the kernel. If all channels together are short, the scales repeat over
    // several periods and a run covers them. If they are long, a run is one channel and has one scale.
    constexpr int64_t longest_period = 1 << 12, least_run = 512;
    const int64_t period = channels * inner;
    const bool by_entry = scale && period <= longest_period;
    std::vector<T> scales(by_entry ? ceil_div(least_run, period) * period : 0);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = scale[i / inner % channels];
    const int64_t run = !scale ? entries_per_task : by_entry ? static_cast<int64_t>(scales.size()) : inner;
    const int64_t runs = ceil_div(count, run), runs_per_task = std::max<int64_t>(1, entries_per_task / run);
    run_tasks(ceil_div(runs, runs_per_task), [&](int64_t task) {
        const int64_t last = std::min(runs, (task + 1) * runs_per_task);
        for (int64_t i = task * runs_per_task; i < last; ++i) {
            const int64_t begin = i * run, size = std::min(run, count - begin);
            work(begin, size, by_entry ? scales.data() : nullptr, scale && !by_entry ? scale[i % channels] : T(1));
        }
    });
}

}  // namespace s3d
