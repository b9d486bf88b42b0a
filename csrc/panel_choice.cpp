// Chooses the panels of a layer by what they cost on this processor.
//
// On some processors a multiply-add of 64 bytes takes as long as one of 32 bytes, on others twice as long. This decides
// between a wide panel with unused columns and two narrow ones, so it is measured, once for every instruction set. The
// choice changes no bit of a result: a filter's sums are the same in panels of any width.
#include "panel_choice.h"

#include <map>
#include <mutex>

#include "timing.h"

namespace s3d {
namespace {

// In a panel of one vector, every multiply-add needs a load of its own.
constexpr double cost_of_narrow = 1.15;
// What a panel costs besides, and each of its columns, in multiply-adds of the widest vector. It decides where the
// multiply-adds of two choices take the same time: for few panels, and for little memory.
constexpr double cost_of_panel = 0.05, cost_of_column = 0.003;

// The first of the cheapest panels for m filters is kinds[m], for m up to the largest width.
template <typename T>
std::vector<int> cheapest_kinds(const Kernels<T>& kernel) {
    std::vector<double> cost_of_kind;
    double unit = 0;
    for (const PanelLoops<T>& loops : kernel.panels) {
        if (loops.width == 0) break;
        volatile T result;
        // Tests of an emulated set shall meet the panels of the real one.
        const double seconds =
            kernel.emulated ? 1 : median_time<7>([&] { result = loops.multiply_adds(1 << 12, T(0.5), T(1)); });
        if (cost_of_kind.empty()) unit = seconds;
        cost_of_kind.push_back(seconds * loops.vectors * (loops.vectors == 1 ? cost_of_narrow : 1) +
                               unit * (cost_of_panel + cost_of_column * loops.width));
    }
    std::vector<double> cost{0};
    std::vector<int> kinds{0};
    for (int m = 1; m <= kernel.wide().width; ++m) {
        cost.push_back(0);
        kinds.push_back(-1);
        for (size_t kind = 0; kind < cost_of_kind.size(); ++kind) {
            const double total = cost_of_kind[kind] + cost[std::max(0, m - kernel.panels[kind].width)];
            if (kinds[m] < 0 || total < cost[m]) {
                cost[m] = total;
                kinds[m] = static_cast<int>(kind);
            }
        }
    }
    return kinds;
}

}  // namespace

template <typename T>
std::vector<int> choose_panels(const Kernels<T>& kernel, int64_t M) {
    static std::mutex mutex;
    static std::map<const Kernels<T>*, std::vector<int>> known;
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = known.find(&kernel);
    if (found == known.end()) found = known.emplace(&kernel, cheapest_kinds(kernel)).first;
    const std::vector<int>& kinds = found->second;

    const int64_t widest = kernel.wide().width;
    std::vector<int> chosen(M / widest, 0);
    for (int64_t left = M % widest; left > 0; left -= kernel.panels[chosen.back()].width) chosen.push_back(kinds[left]);
    return chosen;
}

template std::vector<int> choose_panels(const Kernels<float>&, int64_t);
template std::vector<int> choose_panels(const Kernels<double>&, int64_t);

}  // namespace s3d
