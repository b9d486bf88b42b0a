// The weights of layers after splits, in one pass over the new weights, all of them in one call:
//     out[r, i, :] = (row_scale[r] * weight[rows[r], columns[i], :] + shift[shift_rows[r], columns[i], :]) *
//     column_scale[i]
#include <ATen/core/List.h>
#include <ATen/ops/arange.h>

#include <algorithm>

#include "dtype.h"
#include "kernels.h"
#include "operator.h"
#include "parallel.h"

namespace s3d {
namespace {

constexpr int64_t entries_per_task = 1 << 15;

void check_vector(const char* name, const at::Tensor& tensor, at::ScalarType type, const at::Tensor& weight,
                  int64_t size) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == type, name, " must be ", type, ", got ", tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.dim() == 1 && (size < 0 || tensor.size(0) == size), name, " must have shape (",
                      size < 0 ? tensor.numel() : size, "), got ", tensor.sizes());
    TORCH_CHECK_VALUE(tensor.device() == weight.device(), name, " must be on ", weight.device(), ", got ",
                      tensor.device());
}

void check_range(const char* name, const at::Tensor& index, int64_t low, int64_t high) {
    const int64_t* data = index.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < index.numel(); ++i) {
        TORCH_CHECK_INDEX(low <= data[i] && data[i] < high, name, " must lie in [", low, ", ", high, "), got ",
                          data[i]);
    }
}

at::Tensor dense(const std::optional<at::Tensor>& tensor) { return tensor ? tensor->contiguous() : at::Tensor(); }

template <typename T>
const T* data_or_null(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// The columns as the kernel wants them, every index standing for `inner` neighbouring entries.
template <typename T>
class ColumnPlan {
 public:
    ColumnPlan(const at::Tensor& columns, const at::Tensor& column_scale, int64_t inner, int64_t row_size,
               int64_t lanes)
        : index_(columns.numel() * inner), place_(index_.size()), first_(index_.size() / lanes) {
        const int64_t* from = columns.const_data_ptr<int64_t>();
        for (size_t i = 0; i < index_.size(); ++i) index_[i] = from[i / inner] * inner + i % inner;
        for (size_t block = 0; block < first_.size(); ++block) {
            const int64_t* entries = index_.data() + block * lanes;
            const int64_t first = std::min(*std::min_element(entries, entries + lanes), row_size - lanes);
            const int64_t last = *std::max_element(entries, entries + lanes);
            first_[block] = first >= 0 && last - first < lanes ? first : -1;
            for (int64_t i = 0; first_[block] >= 0 && i < lanes; ++i) {
                place_[block * lanes + i] = static_cast<Integer<T>>(entries[i] - first);
            }
        }
        if (!column_scale.defined()) return;
        const T* scale = column_scale.const_data_ptr<T>();
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

using Optional = std::optional<at::Tensor>;
using OptionalTensors = c10::List<Optional>;

// One tensor that grows, all of its inputs dense.
template <typename T>
class Growth {
 public:
    Growth(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& row_scale, const at::Tensor& shift,
           const at::Tensor& shift_rows, const at::Tensor& columns, const at::Tensor& column_scale, double shift_scale,
           const at::Tensor& out)
        : kernel_(kernels<T>()),
          inputs_{weight, rows, row_scale, shift, shift_rows},
          old_(weight.const_data_ptr<T>()),
          row_scale_(data_or_null<T>(row_scale)),
          shift_(data_or_null<T>(shift)),
          shift_scale_(static_cast<T>(shift_scale)),
          rows_(rows.const_data_ptr<int64_t>()),
          shift_rows_(data_or_null<int64_t>(shift_rows)),
          out_(out.mutable_data_ptr<T>()),
          old_size_(weight.numel() / weight.size(0)),
          new_rows_(rows.numel()),
          new_size_(out.numel() / new_rows_),
          rows_per_task_(std::max<int64_t>(1, entries_per_task / new_size_)) {
        if (!columns.defined()) return;
        plan_.emplace(columns, column_scale, old_size_ / weight.size(1), old_size_, kernel_.lanes);
        columns_ = plan_->view();
    }

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
    const std::vector<at::Tensor> inputs_;  // kept alive: what the pointers point to
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

// Checks everything but the ranges of indices, and returns an empty tensor of the new shape.
at::Tensor grown_like(const at::Tensor& weight, const at::Tensor& rows, const Optional& row_scale,
                      const Optional& shift, const Optional& shift_rows, const Optional& columns,
                      const Optional& column_scale) {
    const at::ScalarType type = weight.scalar_type();
    TORCH_CHECK_TYPE(is_compute_dtype(type), "weight must be float32 or float64, got ", type);
    TORCH_CHECK_VALUE(weight.dim() >= 1, "weight must have at least one dimension");
    check_vector("rows", rows, at::kLong, weight, -1);
    if (row_scale) check_vector("row_scale", *row_scale, type, weight, rows.size(0));
    if (shift) {
        TORCH_CHECK_TYPE(shift->scalar_type() == type, "shift must be ", type, ", got ", shift->scalar_type());
        TORCH_CHECK_VALUE(shift->dim() == weight.dim() && shift->sizes().slice(1) == weight.sizes().slice(1),
                          "shift must have rows of shape ", weight.sizes().slice(1), ", got ", shift->sizes());
        TORCH_CHECK_VALUE(shift_rows || shift->size(0) == rows.size(0), "shift must have ", rows.size(0), " rows, got ",
                          shift->size(0));
        TORCH_CHECK_VALUE(shift->device() == weight.device(), "shift must be on ", weight.device(), ", got ",
                          shift->device());
    }
    TORCH_CHECK_VALUE(shift || !shift_rows, "shift_rows goes with shift only");
    if (shift_rows) check_vector("shift_rows", *shift_rows, at::kLong, weight, rows.size(0));
    std::vector<int64_t> sizes = weight.sizes().vec();
    sizes[0] = rows.size(0);
    if (columns || column_scale) {
        TORCH_CHECK_VALUE(weight.dim() >= 2, "weight must have columns, got shape ", weight.sizes());
        if (columns) {
            check_vector("columns", *columns, at::kLong, weight, -1);
            sizes[1] = columns->size(0);
        }
        if (column_scale) check_vector("column_scale", *column_scale, type, weight, sizes[1]);
    }
    return at::empty(sizes, weight.options().memory_format(at::MemoryFormat::Contiguous));
}

std::vector<at::Tensor> grow_weights_meta(at::TensorList weight, at::TensorList rows, const OptionalTensors& row_scale,
                                          const OptionalTensors& shift, const OptionalTensors& shift_rows,
                                          const OptionalTensors& columns, const OptionalTensors& column_scale,
                                          at::ArrayRef<double> shift_scale) {
    const size_t count = weight.size();
    TORCH_CHECK_VALUE(rows.size() == count && row_scale.size() == count && shift.size() == count &&
                          shift_rows.size() == count && columns.size() == count && column_scale.size() == count &&
                          shift_scale.size() == count,
                      "all lists must have one entry per weight, ", count);
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < count; ++i) {
        results.push_back(grown_like(weight[i], rows[i], row_scale.get(i), shift.get(i), shift_rows.get(i),
                                     columns.get(i), column_scale.get(i)));
    }
    return results;
}

std::vector<at::Tensor> grow_weights(at::TensorList weight, at::TensorList rows, const OptionalTensors& row_scale,
                                     const OptionalTensors& shift, const OptionalTensors& shift_rows,
                                     const OptionalTensors& columns, const OptionalTensors& column_scale,
                                     at::ArrayRef<double> shift_scale) {
    const auto results =
        grow_weights_meta(weight, rows, row_scale, shift, shift_rows, columns, column_scale, shift_scale);
    ItemsByDtype<Growth> growths;
    for (size_t i = 0; i < results.size(); ++i) {
        const at::Tensor row_index = rows[i].contiguous(), shift_index = dense(shift_rows.get(i));
        at::Tensor column_index = dense(columns.get(i));
        check_range("rows", row_index, 0, weight[i].size(0));
        if (shift_index.defined()) check_range("shift_rows", shift_index, -1, shift.get(i)->size(0));
        if (column_index.defined()) check_range("columns", column_index, 0, weight[i].size(1));
        if (results[i].numel() == 0) continue;
        const Optional scale = column_scale.get(i);
        if (scale && !column_index.defined()) column_index = at::arange(weight[i].size(1), row_index.options());
        with_dtype(weight[i].scalar_type(), [&]<typename T>() {
            growths.of<T>().emplace_back(weight[i].contiguous(), row_index, dense(row_scale.get(i)),
                                         dense(shift.get(i)), shift_index, column_index, dense(scale), shift_scale[i],
                                         results[i]);
        });
    }
    growths.for_each_dtype([](const auto& of_dtype) { run_all(of_dtype); });
    return results;
}

TORCH_LIBRARY_FRAGMENT(s3d_fast, m) {
    register_operator(
        m,
        "grow_weights(Tensor[] weight, Tensor[] rows, Tensor?[] row_scale, Tensor?[] shift, Tensor?[] shift_rows, "
        "Tensor?[] columns, Tensor?[] column_scale, float[] shift_scale) -> Tensor[]",
        grow_weights, grow_weights_meta);
}

}  // namespace
}  // namespace s3d
