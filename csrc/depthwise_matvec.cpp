// Computes S_j v_j for pointwise filters that are followed by stages of a depthwise convolution and an activation.
//
// With r_0 = X v and n stages,
//     r_(i+1) = dw_i(d_i r_i),  y_n = C_n r_n,  y_i = C_i r_i + d_i dw_i^T(y_(i+1)),  S v = X^T y_0.
// A task takes a block of panels and a slice of the images. For a few images at a time and one panel, it computes all
// maps r in cache, turns them into y from the last to the first, and adds X^T y_0 to the sums. No map reaches memory.
#include <algorithm>

#include "checks.h"
#include "depthwise.h"
#include "dtype.h"
#include "layers.h"

namespace s3d {
namespace {

// The maps of one layer: X (B H W, D); C_0 ... C_n and d_0 ... d_(n-1), each (B, H_i, W_i, M); the weights (M, kh, kw).
struct LayerTensors {
    Tensor X;
    Tensors C, d, weight;
    std::vector<std::vector<int64_t>> geometry;
    Tensor V;
    bool bias;
};

// The taps of a stage in both directions, with the runs of the horizontal axis.
struct StageTaps {
    AxisTaps rows, columns, back_rows, back_columns;
    std::vector<TapRun> runs, back_runs;

    explicit StageTaps(const StageAxes& axes)
        : rows(axes.vertical.forward()),
          columns(axes.horizontal.forward()),
          back_rows(axes.vertical.backward()),
          back_columns(axes.horizontal.backward()),
          runs(columns.runs(1)),
          back_runs(back_columns.runs(axes.horizontal.stride)) {}
    // The runs point into the taps.
    StageTaps(const StageTaps&) = delete;
};

template <typename T>
class DepthwiseLayer {
 public:
    LayerSums<T> sums;

    DepthwiseLayer(const LayerTensors& layer, const Tensor& result)
        : sums(layer.V, result, PanelGrid::wide(sets_of(layer.V), layer.V.size(-2), kernels<T>())),
          kernel_(kernels<T>()),
          X_(Matrix<T>(layer.X), layer.bias),
          V_(layer.V),
          images_(layer.C[0].size(0)),
          depth_(X_.depth()),
          rows_per_tile_(rows_of_tile<T>(depth_)) {
        const int64_t M = sums.panels.M;
        for (size_t i = 0; i < layer.C.size(); ++i) {
            const Tensor& C = layer.C[i];
            heights_.push_back(C.size(1));
            widths_.push_back(C.size(2));
            // Maps that are not rows in memory are copied.
            C_tensors_.push_back(torch::stable::reshape(C, {-1, M}));
            C_.emplace_back(C_tensors_.back());
            if (i + 1 == layer.C.size()) break;
            d_tensors_.push_back(torch::stable::reshape(layer.d[i], {-1, M}));
            d_.emplace_back(d_tensors_.back());
            stages_.emplace_back(StageAxes(layer.weight[i], layer.geometry[i], heights_[i], widths_[i]));
            kernel_columns_.push_back(layer.weight[i].size(2));
            weights_.push_back(as_contiguous(to_dtype(layer.weight[i], layer.V.scalar_type())));
            taps_.push_back(layer.weight[i].size(1) * layer.weight[i].size(2));
        }
        // Small images share a tile of rows.
        images_at_once_ = std::max<int64_t>(1, rows_per_tile_ / std::max<int64_t>(1, map_size(0)));
    }

    double flops() const {
        double per_image = 4. * map_size(0) * depth_;
        for (size_t i = 0; i < stages_.size(); ++i) per_image += 4. * map_size(i + 1) * taps_[i];
        return per_image * images_ * sums.panels.size() * sums.panels.width;
    }
    int64_t most_slices() const { return ceil_div(images_, images_at_once_); }

    void run(int64_t task) const {
        const TaskPlace place = sums[task];
        const int64_t width = sums.panels.width, size = sums.panel_size(), block = place.count * size;
        const int64_t own = sums.has_partials() ? 0 : block;
        Workspace work(*this, block, own);

        for (int64_t p = 0; p < place.count; ++p) {
            V_.pack(sums.panels[place.first + p], 0, depth_, work.vectors + p * size);
        }
        T* total = sums.start(place, work.own_sums);
        const int64_t groups = most_slices();
        const int64_t begin = sums.begin(place.slice, groups), end = sums.begin(place.slice + 1, groups);
        for (int64_t group = begin; group < end; ++group) {
            const int64_t first = group * images_at_once_, count = std::min(images_at_once_, images_ - first);
            for (int64_t p = 0; p < place.count; ++p) {
                const PanelPlace panel = sums.panels[place.first + p];
                project(first, count, work.vectors + p * size, work);
                for (size_t i = 0; i < stages_.size(); ++i)
                    work.pack_weight(data_of<T>(weights_[i]), taps_[i], panel, i);
                for (int64_t image = 0; image < count; ++image) turn(first + image, image, panel, work);
                accumulate(first, count, total + p * size, work);
            }
        }
        sums.finish(place, total);
    }

 private:
    int64_t map_size(size_t i) const { return heights_[i] * widths_[i]; }
    int64_t widest() const { return *std::max_element(widths_.begin(), widths_.end()); }

    // The scratch memory of a task.
    struct Workspace {
        T *vectors, *own_sums, *scaled, *line, *copies[2], *x_copy;
        std::vector<T*> maps, weights;  // maps[i]: r_i, later y_i, of all images at once
        int64_t width;

        Workspace(const DepthwiseLayer& layer, int64_t block, int64_t own) : width(layer.sums.panels.width) {
            const int64_t images = layer.images_at_once_;
            int64_t largest = 0;
            std::size_t bytes = 0;
            for (size_t i = 0; i < layer.heights_.size(); ++i) {
                bytes += Scratch::bytes_for<T>(images * layer.map_size(i) * width);
                largest = std::max(largest, layer.map_size(i));
            }
            for (const int64_t taps : layer.taps_) bytes += Scratch::bytes_for<T>(taps * width);
            const int64_t line_size = layer.widest() * width;
            const int64_t x_size = layer.X_.scratch(layer.rows_per_tile_);
            bytes += Scratch::bytes_for<T>(block) + Scratch::bytes_for<T>(own) +
                     Scratch::bytes_for<T>(largest * width) + 3 * Scratch::bytes_for<T>(line_size) +
                     Scratch::bytes_for<T>(x_size);
            Scratch& scratch = Scratch::of_thread();
            scratch.reset(bytes);
            vectors = scratch.take<T>(block);
            own_sums = scratch.take<T>(own);
            scaled = scratch.take<T>(largest * width);
            line = scratch.take<T>(line_size);
            for (T*& copy : copies) copy = scratch.take<T>(line_size);
            x_copy = scratch.take<T>(x_size);
            for (size_t i = 0; i < layer.heights_.size(); ++i) {
                maps.push_back(scratch.take<T>(images * layer.map_size(i) * width));
            }
            for (const int64_t taps : layer.taps_) weights.push_back(scratch.take<T>(taps * width));
        }

        // weights[stage] = the panel's part of a weight (M, taps), as a panel of `taps` rows.
        void pack_weight(const T* weight, int64_t taps, const PanelPlace& place, size_t stage) {
            const T* from = weight + place.first * taps;
            T* to = weights[stage];
            if (place.count < width) std::memset(to, 0, taps * width * sizeof(T));
            for (int64_t j = 0; j < place.count; ++j) {
                for (int64_t t = 0; t < taps; ++t) to[t * width + j] = from[j * taps + t];
            }
        }
    };

    // maps[0] = X v for the images [first, first + count).
    void project(int64_t first, int64_t count, const T* vectors, Workspace& work) const {
        const int64_t begin = first * map_size(0), rows = count * map_size(0);
        for (int64_t row = 0; row < rows; row += rows_per_tile_) {
            const int64_t some = std::min(rows_per_tile_, rows - row);
            const T* x = X_.get(begin + row, some, work.x_copy);
            kernel_.wide().project(x, X_.stride(), some, depth_, vectors, nullptr, {}, work.maps[0] + row * work.width);
        }
    }

    // total += X^T maps[0].
    void accumulate(int64_t first, int64_t count, T* total, Workspace& work) const {
        const int64_t begin = first * map_size(0), rows = count * map_size(0);
        for (int64_t row = 0; row < rows; row += rows_per_tile_) {
            const int64_t some = std::min(rows_per_tile_, rows - row);
            const T* x = X_.get(begin + row, some, work.x_copy);
            kernel_.wide().accumulate(x, X_.stride(), some, depth_, work.maps[0] + row * work.width, nullptr, total);
        }
    }

    // Turns r_0 of one image, which is number `local` of the images at once, into y_0.
    void turn(int64_t image, int64_t local, const PanelPlace& panel, Workspace& work) const {
        const int64_t width = work.width;
        const size_t n = stages_.size();
        const auto map = [&](size_t i) { return work.maps[i] + local * map_size(i) * width; };
        size_t stage = 0;
        for (const StageTaps& taps : stages_) {
            // scaled = d r, then r of the next map, and at the last one y = C r.
            lines(stage, [&](int64_t line) {
                const int64_t row = image * map_size(stage) + line * widths_[stage], at = line * widths_[stage] * width;
                const CoefficientTile<T> d(d_[stage], row, widths_[stage], panel, work.copies[0]);
                kernel_.wide().combine(widths_[stage], d.data, d.stride, map(stage) + at, nullptr, 0, nullptr,
                                       work.scaled + at);
            });
            lines(stage + 1, [&](int64_t line) {
                T* to = map(stage + 1) + line * widths_[stage + 1] * width;
                stencil(taps.rows, taps.runs, line, work.scaled, stage, widths_[stage], work, to, widths_[stage + 1]);
                if (stage + 1 < n) return;
                const int64_t row = image * map_size(n) + line * widths_[n];
                const CoefficientTile<T> c(C_[n], row, widths_[n], panel, work.copies[0]);
                kernel_.wide().combine(widths_[n], c.data, c.stride, to, nullptr, 0, nullptr, to);
            });
            ++stage;
        }
        // y = C r + d dw^T(y of the next map), from the last stage to the first.
        for (auto taps = stages_.rbegin(); taps != stages_.rend(); ++taps) {
            --stage;
            lines(stage, [&](int64_t line) {
                stencil(taps->back_rows, taps->back_runs, line, map(stage + 1), stage, widths_[stage + 1], work,
                        work.line, widths_[stage]);
                const int64_t row = image * map_size(stage) + line * widths_[stage];
                T* own = map(stage) + line * widths_[stage] * width;
                const CoefficientTile<T> c(C_[stage], row, widths_[stage], panel, work.copies[0]);
                const CoefficientTile<T> d(d_[stage], row, widths_[stage], panel, work.copies[1]);
                kernel_.wide().combine(widths_[stage], c.data, c.stride, own, d.data, d.stride, work.line, own);
            });
        }
    }

    template <typename Task>
    void lines(size_t i, const Task& task) const {
        for (int64_t line = 0; line < heights_[i]; ++line) task(line);
    }

    // Computes one line of a convolution: line `line` of the result, which has `columns` columns.
    void stencil(const AxisTaps& rows, const std::vector<TapRun>& runs, int64_t line, const T* in, size_t stage,
                 int64_t in_columns, const Workspace& work, T* out, int64_t columns) const {
        const int64_t first = rows.start[line], count = rows.taps(line);
        if (count == 0) {
            std::memset(out, 0, columns * work.width * sizeof(T));
            return;
        }
        for (const TapRun& run : runs) {
            kernel_.stencil(run, rows.tap.data() + first, rows.place.data() + first, count, in, in_columns,
                            work.weights[stage], kernel_columns_[stage], out);
        }
    }

    const Kernels<T>& kernel_;
    RowTiles<T> X_;
    Vectors<T> V_;
    Tensors C_tensors_, d_tensors_, weights_;  // weights: (M, kh, kw)
    std::vector<Matrix<T>> C_, d_;
    std::vector<int64_t> heights_, widths_, kernel_columns_, taps_;  // taps: kh kw
    std::list<StageTaps> stages_;
    int64_t images_, depth_, rows_per_tile_, images_at_once_;
};

void check(const LayerTensors& layer) {
    const Tensor &X = layer.X, &V = layer.V;
    check_compute_dtype("V", V);
    const ScalarType type = V.scalar_type();
    check_storage("X", X, type);
    CHECK_VALUE(X.dim() == 2, "X must have shape (B H W, D), got ", X.sizes());
    const Tensor& first = layer.C[0];
    CHECK_VALUE(first.dim() == 4 && first.size(0) * first.size(1) * first.size(2) == X.size(0),
                "C must have shape (B, H, W, M) with B H W = ", X.size(0), ", got ", first.sizes());
    const int64_t images = first.size(0), filters = first.size(3);
    int64_t height = first.size(1), width = first.size(2);
    for (size_t i = 0; i < layer.C.size(); ++i) {
        const std::vector<int64_t> wanted{images, height, width, filters};
        check_storage("C", layer.C[i], type);
        CHECK_VALUE(layer.C[i].sizes() == Integers(wanted), "C must have shape ", Integers(wanted), ", got ",
                    layer.C[i].sizes());
        if (i == layer.d.size()) break;
        check_storage("d", layer.d[i], type);
        CHECK_VALUE(layer.d[i].sizes() == Integers(wanted), "d must have shape ", Integers(wanted), ", got ",
                    layer.d[i].sizes());
        const Tensor& weight = layer.weight[i];
        check_storage("weight", weight, type);
        CHECK_VALUE(weight.dim() == 3 && weight.size(0) == filters && weight.size(1) > 0 && weight.size(2) > 0,
                    "weight must have shape (", filters, ", kh, kw), got ", weight.sizes());
        const StageAxes axes(weight, layer.geometry[i], height, width);
        height = axes.vertical.out();
        width = axes.horizontal.out();
    }
    check_vectors(V, filters, X.size(1) + layer.bias);
}

// Divides the lists of all layers into layers, and checks them. `stages` has the number of stages of each layer.
std::vector<LayerTensors> layers_of(const Tensors& X, const Tensors& C, const Tensors& d, const Tensors& weight,
                                    Integers stages, Integers geometry, const Tensors& V,
                                    const std::vector<bool>& bias) {
    CHECK_VALUE(X.size() == stages.size() && X.size() == V.size() && X.size() == bias.size(),
                "X, stages, V and bias must have one entry per layer, got ", X.size(), ", ", stages.size(), ", ",
                V.size(), " and ", bias.size());
    size_t total = 0;
    for (const int64_t count : stages) {
        CHECK_VALUE(0 < count && count < (1 << 20), "stages must be positive, got ", stages);
        total += static_cast<size_t>(count);
    }
    CHECK_VALUE(
        C.size() == total + X.size() && d.size() == total && weight.size() == total && geometry.size() == 6 * total,
        "C must have ", total + X.size(), " entries, d and weight ", total, " and geometry ", 6 * total, ", got ",
        C.size(), ", ", d.size(), ", ", weight.size(), " and ", geometry.size());
    std::vector<LayerTensors> layers;
    size_t at = 0;
    for (size_t i = 0; i < X.size(); ++i) {
        LayerTensors layer{X[i], {}, {}, {}, {}, V[i], bias[i]};
        for (int64_t stage = 0; stage <= stages[i]; ++stage) {
            layer.C.push_back(C[at + i]);
            if (stage == stages[i]) break;
            const Integers own = geometry.slice(6 * at, 6);
            check_geometry(own);
            layer.geometry.push_back(own.vec());
            layer.d.push_back(d[at]);
            layer.weight.push_back(weight[at++]);
        }
        check(layer);
        layers.push_back(std::move(layer));
    }
    return layers;
}

Tensors depthwise_matvec_grouped(const Tensors& X, const Tensors& C, const Tensors& d, const Tensors& weight,
                                 const std::vector<int64_t>& stages, const std::vector<int64_t>& geometry,
                                 const Tensors& V, const std::vector<bool>& bias) {
    Tensors results;
    ItemsByDtype<DepthwiseLayer> items;
    for (const LayerTensors& layer : layers_of(X, C, d, weight, stages, geometry, V, bias)) {
        results.push_back(new_like(layer.V));
        if (results.back().numel() == 0) continue;
        with_dtype(layer.V.scalar_type(), [&]<typename T>() { items.of<T>().emplace_back(layer, results.back()); });
    }
    items.for_each_dtype([](auto& of_dtype) { run_layers(of_dtype); });
    return results;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) {
    m.impl("depthwise_matvec_grouped", TORCH_BOX(&depthwise_matvec_grouped));
}

}  // namespace
}  // namespace s3d
