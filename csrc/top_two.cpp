// Finds the largest and the second largest of k values, for every column: see reference.top_two.
#include "checks.h"
#include "dtype.h"
#include "kernels.h"
#include "parallel.h"

namespace s3d {
namespace {

// Columns at a time: their best values and places stay in registers or the first-level cache.
constexpr int64_t BLOCK = 64;

// values is (k, columns) with row stride `stride`; `count` of the columns are handled, at most BLOCK.
template <typename T>
void top_two_columns(const T* values, int64_t k, int64_t stride, int64_t count, int64_t* first, int64_t* second) {
    T best[BLOCK], next[BLOCK];
    Integer<T> best_at[BLOCK], next_at[BLOCK];
    for (int64_t j = 0; j < count; ++j) {
        const bool ahead = values[stride + j] > values[j];
        best[j] = ahead ? values[stride + j] : values[j], next[j] = ahead ? values[j] : values[stride + j];
        best_at[j] = ahead, next_at[j] = !ahead;
    }
    for (int64_t i = 2; i < k; ++i) {
        const T* row = values + i * stride;
        const Integer<T> at = static_cast<Integer<T>>(i);
        for (int64_t j = 0; j < count; ++j) {
            const T value = row[j];
            const bool wins = value > best[j], follows = value > next[j];
            next[j] = wins ? best[j] : follows ? value : next[j];
            next_at[j] = wins ? best_at[j] : follows ? at : next_at[j];
            best[j] = wins ? value : best[j];
            best_at[j] = wins ? at : best_at[j];
        }
    }
    for (int64_t j = 0; j < count; ++j) first[j] = best_at[j], second[j] = next_at[j];
}

std::tuple<Tensor, Tensor> top_two(const Tensor& values) {
    check_compute_dtype("values", values);
    CHECK_VALUE(values.dim() == 3 && values.size(1) >= 2, "values must have shape (R, k, M) with k >= 2, got ",
                values.sizes());
    const int64_t rows = values.size(0), k = values.size(1), columns = values.size(2), per_task = 64;
    CHECK_VALUE(k < (int64_t{1} << 31), "values: k must be below 2^31, got ", k);
    const Tensor first = new_tensor({rows, columns}, values, ScalarType::Long);
    const Tensor second = new_tensor({rows, columns}, values, ScalarType::Long);
    if (rows * columns == 0) return {first, second};
    const Tensor dense = as_contiguous(values);
    with_dtype(values.scalar_type(), [&]<typename T>() {
        const T* from = data_of<T>(dense);
        int64_t *const winners = mutable_data_of<int64_t>(first), *const runners = mutable_data_of<int64_t>(second);
        run_tasks(ceil_div(rows, per_task), [&](int64_t task) {
            for (int64_t row = task * per_task; row < std::min(rows, (task + 1) * per_task); ++row) {
                for (int64_t column = 0; column < columns; column += BLOCK) {
                    top_two_columns(from + row * k * columns + column, k, columns, std::min(BLOCK, columns - column),
                                    winners + row * columns + column, runners + row * columns + column);
                }
            }
        });
    });
    return {first, second};
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("top_two", TORCH_BOX(&top_two)); }

}  // namespace
}  // namespace s3d
