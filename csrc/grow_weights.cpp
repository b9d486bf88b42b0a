// Computes the weights of layers after splits, for all layers in one call and in one pass over the new weights:
//     out[r, i, :] = (row_scale[r] * weight[rows[r], columns[i], :]
//                     + shift_scale * shift[shift_rows[r], columns[i], :]) * column_scale[i]
#include <algorithm>

#include "checks.h"
#include "dtype.h"
#include "kernels.h"
#include "parallel.h"

namespace s3d {
namespace {

constexpr int64_t entries_per_task = 1 << 15;

// The arguments of one weight: see reference.grow_weight.
struct Arguments {
    Tensor weight, rows;
    OptionalTensor row_scale, shift, shift_rows, columns, column_scale;
    double shift_scale;
};

// Raises unless the tensor is a vector of this size. Any size is good if `size` is negative.
void check_vector(const char* name, const Tensor& tensor, ScalarType type, int64_t size) {
    check_dtype(name, tensor, type);
    CHECK_VALUE(tensor.dim() == 1 && (size < 0 || tensor.size(0) == size), name, " must have shape (",
                size < 0 ? tensor.numel() : size, "), got ", tensor.sizes());
    check_device(name, tensor);
}

// The index is contiguous.
void check_range(const char* name, const Tensor& index, int64_t low, int64_t high) {
    const int64_t* data = data_of<int64_t>(index);
    for (int64_t i = 0, count = index.numel(); i < count; ++i) {
        CHECK_INDEX(low <= data[i] && data[i] < high, name, " must lie in [", low, ", ", high, "), got ", data[i]);
    }
}

// Checks everything except the ranges of indices, and returns an empty tensor of the new shape.
Tensor grown_like(const Arguments& given) {
    const Tensor &weight = given.weight, &rows = given.rows;
    check_compute_dtype("weight", weight);
    const ScalarType type = weight.scalar_type();
    CHECK_VALUE(weight.dim() >= 1, "weight must have at least one dimension");
    check_vector("rows", rows, ScalarType::Long, -1);
    if (given.row_scale) check_vector("row_scale", *given.row_scale, type, rows.size(0));
    if (given.shift) {
        const Tensor& shift = *given.shift;
        check_dtype("shift", shift, type);
        CHECK_VALUE(shift.dim() == weight.dim() && shift.sizes().slice(1) == weight.sizes().slice(1),
                    "shift must have rows of shape ", weight.sizes().slice(1), ", got ", shift.sizes());
        CHECK_VALUE(given.shift_rows || shift.size(0) == rows.size(0), "shift must have ", rows.size(0), " rows, got ",
                    shift.size(0));
        check_device("shift", shift);
    }
    CHECK_VALUE(given.shift || !given.shift_rows, "shift_rows needs shift, got shift_rows alone");
    if (given.shift_rows) check_vector("shift_rows", *given.shift_rows, ScalarType::Long, rows.size(0));
    std::vector<int64_t> sizes = weight.sizes().vec();
    sizes[0] = rows.size(0);
    if (given.columns || given.column_scale) {
        CHECK_VALUE(weight.dim() >= 2, "weight must have columns, got shape ", weight.sizes());
        if (given.columns) {
            check_vector("columns", *given.columns, ScalarType::Long, -1);
            sizes[1] = given.columns->size(0);
        }
        if (given.column_scale) check_vector("column_scale", *given.column_scale, type, sizes[1]);
    }
    return new_tensor(sizes, weight, type);
}

// Returns the arguments with all tensors contiguous, after a check of all indices.
Arguments prepared(const Arguments& given) {
    Arguments result{as_contiguous(given.weight),       as_contiguous(given.rows),
                     as_contiguous(given.row_scale),    as_contiguous(given.shift),
                     as_contiguous(given.shift_rows),   as_contiguous(given.columns),
                     as_contiguous(given.column_scale), given.shift_scale};
    check_range("rows", result.rows, 0, result.weight.size(0));
    if (result.shift_rows) check_range("shift_rows", *result.shift_rows, -1, result.shift->size(0));
    if (result.columns) check_range("columns", *result.columns, 0, result.weight.size(1));
    return result;
}

template <typename T>
const T* data_or_null(const OptionalTensor& tensor) {
    return tensor ? data_of<T>(*tensor) : nullptr;
}

// The columns in the form that the kernel reads. Each of `count` columns stands for `inner` neighbouring entries.
template <typename T>
class ColumnPlan {
 public:
    // If columns is null, column i copies column i. If scale is null, it is 1.
    ColumnPlan(const int64_t* columns, const T* scale, int64_t count, int64_t inner, int64_t row_size, int64_t lanes)
        : index_(count * inner), place_(index_.size()), first_(index_.size() / lanes) {
        for (size_t i = 0; i < index_.size(); ++i) {
            index_[i] = columns ? columns[i / inner] * inner + i % inner : static_cast<int64_t>(i);
        }
        for (size_t block = 0; block < first_.size(); ++block) {
            const int64_t* entries = index_.data() + block * lanes;
            const int64_t first = std::min(*std::min_element(entries, entries + lanes), row_size - lanes);
            const int64_t last = *std::max_element(entries, entries + lanes);
            first_[block] = first >= 0 && last - first < lanes ? first : -1;
            for (int64_t i = 0; first_[block] >= 0 && i < lanes; ++i) {
                place_[block * lanes + i] = static_cast<Integer<T>>(entries[i] - first);
            }
        }
        if (!scale) return;
        scale_.resize(index_.size());
        for (size_t i = 0; i < index_.size(); ++i) scale_[i] = scale[i / inner];
    }

    Columns<T> view() const { return {index_.data(), first_.data(), place_.data()}; }
    const T* scale() const { return scale_.empty() ? nullptr : scale_.data(); }

 private:
    std::vector<int64_t> index_;
    std::vector<Integer<T>> place_;
    std::vector<int64_t> first_;
    std::vector<T> scale_;
};

// One weight that grows.
template <typename T>
class Growth {
 public:
    Growth(const Arguments& prepared, const Tensor& out)
        : kernel_(kernels<T>()),
          arguments_(prepared),
          old_(data_of<T>(arguments_.weight)),
          row_scale_(data_or_null<T>(arguments_.row_scale)),
          shift_(data_or_null<T>(arguments_.shift)),
          shift_scale_(static_cast<T>(arguments_.shift_scale)),
          rows_(data_of<int64_t>(arguments_.rows)),
          shift_rows_(data_or_null<int64_t>(arguments_.shift_rows)),
          out_(mutable_data_of<T>(out)),
          old_size_(arguments_.weight.numel() / arguments_.weight.size(0)),
          new_rows_(arguments_.rows.numel()),
          new_size_(out.numel() / new_rows_),
          rows_per_task_(std::max<int64_t>(1, entries_per_task / new_size_)) {
        // The kernel takes a scale of columns only together with columns.
        if (!arguments_.columns && !arguments_.column_scale) return;
        plan_.emplace(data_or_null<int64_t>(arguments_.columns), data_or_null<T>(arguments_.column_scale), out.size(1),
                      old_size_ / arguments_.weight.size(1), old_size_, kernel_.lanes);
        columns_ = plan_->view();
    }

    // columns_ points into plan_.
    Growth(const Growth&) = delete;
    Growth& operator=(const Growth&) = delete;

    int64_t tasks() const { return ceil_div(new_rows_, rows_per_task_); }

    void run(int64_t task) const {
        const int64_t end = std::min(new_rows_, (task + 1) * rows_per_task_);
        for (int64_t r = task * rows_per_task_; r < end; ++r) {
            const int64_t s = shift_rows_ ? shift_rows_[r] : r;
            kernel_.grow_row(old_ + rows_[r] * old_size_, row_scale_ ? row_scale_[r] : T(1),
                             shift_ && s >= 0 ? shift_ + s * old_size_ : nullptr, shift_scale_,
                             plan_ ? &columns_ : nullptr, plan_ ? plan_->scale() : nullptr, new_size_,
                             out_ + r * new_size_);
        }
    }

 private:
    const Kernels<T>& kernel_;
    const Arguments arguments_;  // owns the memory that the pointers point to
    const T* const old_;
    const T* const row_scale_;
    const T* const shift_;
    const T shift_scale_;
    const int64_t* const rows_;
    const int64_t* const shift_rows_;
    T* const out_;
    const int64_t old_size_, new_rows_, new_size_, rows_per_task_;
    std::optional<ColumnPlan<T>> plan_;
    Columns<T> columns_{};
};

template <typename T>
void run_all(const std::list<Growth<T>>& growths) {
    std::vector<std::pair<const Growth<T>*, int64_t>> tasks;
    for (const Growth<T>& growth : growths) {
        for (int64_t task = 0; task < growth.tasks(); ++task) tasks.emplace_back(&growth, task);
    }
    run_tasks(tasks.size(), [&](int64_t i) { tasks[i].first->run(tasks[i].second); });
}

Tensors grow(const std::vector<Arguments>& arguments) {
    Tensors results;
    for (const Arguments& given : arguments) results.push_back(grown_like(given));
    ItemsByDtype<Growth> growths;
    for (size_t i = 0; i < results.size(); ++i) {
        const Arguments ready = prepared(arguments[i]);
        if (results[i].numel() == 0) continue;
        with_dtype(ready.weight.scalar_type(), [&]<typename T>() { growths.of<T>().emplace_back(ready, results[i]); });
    }
    growths.for_each_dtype([](const auto& of_dtype) { run_all(of_dtype); });
    return results;
}

using OptionalTensors = std::vector<OptionalTensor>;

// Each list has one entry per weight.
Tensors grow_weights(const Tensors& weight, const Tensors& rows, const OptionalTensors& row_scale,
                     const OptionalTensors& shift, const OptionalTensors& shift_rows, const OptionalTensors& columns,
                     const OptionalTensors& column_scale, const std::vector<double>& shift_scale) {
    const size_t count = weight.size();
    CHECK_VALUE(rows.size() == count && row_scale.size() == count && shift.size() == count &&
                    shift_rows.size() == count && columns.size() == count && column_scale.size() == count &&
                    shift_scale.size() == count,
                "each list must have one entry per weight, of which there are ", count);
    std::vector<Arguments> arguments;
    for (size_t i = 0; i < count; ++i) {
        arguments.push_back(
            {weight[i], rows[i], row_scale[i], shift[i], shift_rows[i], columns[i], column_scale[i], shift_scale[i]});
    }
    return grow(arguments);
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("grow_weights", TORCH_BOX(&grow_weights)); }

}  // namespace
}  // namespace s3d
