// Divides the products of layers into tasks, and runs the tasks of all layers together.
//
// A task takes a block of panels of one layer and a slice of its data. Each slice has its own partial sums. A second
// pass adds them in a fixed order, so that results do not depend on timing.
#pragma once

#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "panels.h"

namespace s3d {

// The most memory for the vectors of one task. Its sums take as much again.
constexpr int64_t block_bytes = 1 << 20;
// The most memory for the partial sums of all layers, per thread.
constexpr int64_t partial_bytes = 2 << 20;
// Several tasks per thread even out the lengths of tasks.
constexpr int64_t tasks_per_thread = 8;
constexpr double least_flops_per_task = 1e6;

// The slice and the panels [first, first + count) of one task.
struct TaskPlace {
    int64_t slice, first, count;
};

// The sums of one layer, and their division into tasks.
template <typename T>
class LayerSums {
 public:
    // `result` is contiguous and like V.
    LayerSums(const Tensor& V, const Tensor& result, const PanelGrid& panels)
        : panels(panels), depth(V.size(-1)), out_(mutable_data_of<T>(result)) {}

    const PanelGrid panels;
    const int64_t depth;  // entries of a vector

    // Every panel has room for the widest.
    int64_t panel_size() const { return depth * panels.width; }
    int64_t tasks() const { return slices_ * ceil_div(panels.size(), panels_per_task_); }
    int64_t slices() const { return slices_; }
    bool has_partials() const { return partials_ != nullptr; }

    // Divides the layer into about `wanted` tasks. It divides the data first, into at most `most_slices` slices,
    // because partial sums are cheap. It divides the panels if there are too few slices or if the sums are too large.
    // The partial sums may take about `budget` bytes. Returns the bytes that they take.
    int64_t divide(int64_t wanted, int64_t most_slices, int64_t budget) {
        // Slices must not depend on the widths of panels, which depend on measured times.
        constexpr int64_t padded = 16;
        const int64_t filters = panels.K * ceil_div(panels.M, padded) * padded;
        const int64_t bytes = filters * depth * static_cast<int64_t>(sizeof(T));
        int64_t blocks = ceil_div(bytes, block_bytes);
        slices_ = std::min(ceil_div(wanted, blocks), most_slices);
        slices_ = std::max<int64_t>(1, std::min(slices_, budget / bytes));
        blocks = std::min(panels.size(), std::max(blocks, ceil_div(wanted, slices_)));
        panels_per_task_ = ceil_div(panels.size(), blocks);
        if (slices_ == 1) return 0;
        partials_.reset(new T[slices_ * size()]);
        return slices_ * bytes;
    }

    TaskPlace operator[](int64_t task) const {
        const int64_t first = task / slices_ * panels_per_task_;
        return {task % slices_, first, std::min(panels_per_task_, panels.size() - first)};
    }

    // Returns the first of `count` items that belong to a slice; the slice after it begins where it ends.
    int64_t begin(int64_t slice, int64_t count) const { return count * slice / slices_; }

    // Returns where the task's sums begin, (panels, depth, width): in `own` if there are no partial sums. They are
    // zero.
    T* start(const TaskPlace& task, T* own) const {
        T* sums = partials_ ? partials_.get() + task.slice * size() + task.first * panel_size() : own;
        std::memset(sums, 0, task.count * panel_size() * sizeof(T));
        return sums;
    }

    // Ends a task: its sums are the result if there are no partial sums.
    void finish(const TaskPlace& task, const T* sums) const {
        for (int64_t p = 0; !partials_ && p < task.count; ++p) write(task.first + p, sums + p * panel_size());
    }

    void add_slices(int64_t panel) const { write(panel, partials_.get() + panel * panel_size()); }

 private:
    int64_t size() const { return panels.size() * panel_size(); }

    void write(int64_t panel, const T* sums) const {
        const PanelPlace place = panels[panel];
        T* to = out_ + (place.k * panels.M + place.first) * depth;
        unpack_panels(sums, slices_, size(), place.count, depth, place.width, to, depth);
    }

    T* const out_;  // (K, M, D)
    int64_t slices_ = 1, panels_per_task_ = 1;
    std::unique_ptr<T[]> partials_;  // (slices, panels, depth, width), or null if there is one slice
};

// Runs the tasks of all layers. A layer has `sums`, a LayerSums; `flops()`, its work; `most_slices()`, the most slices
// that its data can have; and `run(task)`.
template <typename Layer>
void run_layers(std::list<Layer>& layers) {
    const int64_t threads = thread_count();
    double total = 0;
    for (const Layer& layer : layers) total += layer.flops();
    const double per_task = std::max(least_flops_per_task, total / static_cast<double>(threads * tasks_per_thread));

    std::vector<std::pair<const Layer*, int64_t>> tasks, sums;
    int64_t budget = threads * partial_bytes;
    for (Layer& layer : layers) {
        const int64_t wanted = std::max<int64_t>(1, static_cast<int64_t>(layer.flops() / per_task));
        budget -= layer.sums.divide(wanted, layer.most_slices(), budget);
        for (int64_t i = 0; i < layer.sums.tasks(); ++i) tasks.emplace_back(&layer, i);
        for (int64_t p = 0; layer.sums.has_partials() && p < layer.sums.panels.size(); ++p)
            sums.emplace_back(&layer, p);
    }
    run_tasks(tasks.size(), [&](int64_t i) { tasks[i].first->run(tasks[i].second); });
    run_tasks(sums.size(), [&](int64_t i) { sums[i].first->sums.add_slices(sums[i].second); });
}

// With D up to about a thousand, a tile of X stays in the second-level cache and its product in the first. Every tile
// reads and writes all sums of a panel: with fewer rows than `least_rows`, that would take as long as the products.
template <typename T>
int64_t rows_of_tile(int64_t depth) {
    constexpr int64_t least_rows = 48, most_rows = 96, bytes = 192 << 10;
    const int64_t fitting = bytes / (std::max<int64_t>(1, depth) * static_cast<int64_t>(sizeof(T)));
    return std::clamp(fitting, least_rows, most_rows);
}

}  // namespace s3d
