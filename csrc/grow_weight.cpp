// The weight of a layer after splits, in one pass over the new weight:
//     out[r, i, :] = (row_scale[r] * weight[rows[r], columns[i], :] + shift[shift_rows[r], columns[i], :]) *
//     column_scale[i]
#include <ATen/ops/arange.h>

#include <algorithm>

#include "kernels.h"
#include "operators.h"
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

template <typename T>
void compute(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& row_scale, const at::Tensor& shift,
             const at::Tensor& shift_rows, const at::Tensor& columns, const at::Tensor& column_scale, T shift_scale,
             const at::Tensor& out) {
    const int64_t row_size = weight.numel() / weight.size(0), new_rows = rows.numel();
    const int64_t new_size = out.numel() / new_rows;
    const int64_t inner = weight.dim() > 1 ? row_size / weight.size(1) : 1;
    const Kernels<T>& kernel = kernels<T>();
    std::optional<ColumnPlan<T>> plan;
    Columns<T> view{};
    if (columns.defined()) {
        plan.emplace(columns, column_scale, inner, row_size, kernel.lanes);
        view = plan->view();
    }
    const T* old = weight.const_data_ptr<T>();
    const T* scale = data_or_null<T>(row_scale);
    const T* moved = data_or_null<T>(shift);
    const int64_t* index = rows.const_data_ptr<int64_t>();
    const int64_t* moved_index = data_or_null<int64_t>(shift_rows);
    T* to = out.mutable_data_ptr<T>();
    const int64_t rows_per_task = std::max<int64_t>(1, entries_per_task / new_size);
    run_tasks(ceil_div(new_rows, rows_per_task), [&](int64_t task) {
        const int64_t end = std::min(new_rows, (task + 1) * rows_per_task);
        for (int64_t r = task * rows_per_task; r < end; ++r) {
            const int64_t s = moved_index ? moved_index[r] : r;
            kernel.grow_row(old + index[r] * row_size, scale ? scale[r] : T(1),
                            moved && s >= 0 ? moved + s * row_size : nullptr, shift_scale, plan ? &view : nullptr,
                            plan ? plan->scale() : nullptr, new_size, to + r * new_size);
        }
    });
}

}  // namespace

at::Tensor grow_weight_meta(const at::Tensor& weight, const at::Tensor& rows,
                            const std::optional<at::Tensor>& row_scale, const std::optional<at::Tensor>& shift,
                            const std::optional<at::Tensor>& shift_rows, const std::optional<at::Tensor>& columns,
                            const std::optional<at::Tensor>& column_scale, double shift_scale) {
    (void)shift_scale;
    const at::ScalarType type = weight.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, "weight must be float32 or float64, got ", type);
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

at::Tensor grow_weight(const at::Tensor& weight, const at::Tensor& rows, const std::optional<at::Tensor>& row_scale,
                       const std::optional<at::Tensor>& shift, const std::optional<at::Tensor>& shift_rows,
                       const std::optional<at::Tensor>& columns, const std::optional<at::Tensor>& column_scale,
                       double shift_scale) {
    const at::Tensor out =
        grow_weight_meta(weight, rows, row_scale, shift, shift_rows, columns, column_scale, shift_scale);
    const at::Tensor row_index = rows.contiguous(), shift_index = dense(shift_rows);
    const at::Tensor column_index =
        column_scale && !columns ? at::arange(weight.size(1), rows.options()) : dense(columns);
    check_range("rows", row_index, 0, weight.size(0));
    if (shift_rows) check_range("shift_rows", shift_index, -1, shift->size(0));
    if (columns) check_range("columns", column_index, 0, weight.size(1));
    if (out.numel() == 0) return out;
    if (weight.scalar_type() == at::kFloat) {
        compute<float>(weight.contiguous(), row_index, dense(row_scale), dense(shift), shift_index, column_index,
                       dense(column_scale), static_cast<float>(shift_scale), out);
    } else {
        compute<double>(weight.contiguous(), row_index, dense(row_scale), dense(shift), shift_index, column_index,
                        dense(column_scale), shift_scale, out);
    }
    return out;
}

}  // namespace s3d
