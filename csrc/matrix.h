// Reads tiles of a strided matrix of any storage type in the type of the computation.
#pragma once

#include <cstring>

#include "kernels.h"
#include "tensor.h"

namespace s3d {

enum class Storage { same, bfloat16, float16 };

inline Storage storage_of(const Tensor& tensor) {
    const ScalarType type = tensor.scalar_type();
    if (type == ScalarType::BFloat16) return Storage::bfloat16;
    if (type == ScalarType::Half) return Storage::float16;
    return Storage::same;
}

template <typename T>
struct Matrix {
    const void* data;
    Storage storage;
    int64_t rows, columns, row_stride, column_stride;

    Matrix() = default;
    // The matrix is the last two dimensions of the tensor.
    explicit Matrix(const Tensor& tensor)
        : data(tensor.const_data_ptr()),
          storage(storage_of(tensor)),
          rows(tensor.size(-2)),
          columns(tensor.size(-1)),
          row_stride(tensor.stride(-2)),
          column_stride(tensor.stride(-1)) {}

    // Returns the matrix that begins `entries` entries later in memory.
    Matrix shifted(int64_t entries) const {
        Matrix result = *this;
        const int64_t size = storage == Storage::same ? sizeof(T) : 2;
        result.data = static_cast<const char*>(data) + entries * size;
        return result;
    }

    // Returns whether loops can read the rows without a copy.
    bool is_direct() const { return storage == Storage::same && column_stride == 1; }

    const T* at(int64_t row, int64_t column) const {
        return static_cast<const T*>(data) + row * row_stride + column * column_stride;
    }

    // to[i * to_stride + j] = entry (row + i, column + j), for `height` rows and `count` columns.
    void copy(int64_t row, int64_t height, int64_t column, int64_t count, T* to, int64_t to_stride) const {
        if (count == 0) return;
        for (int64_t i = 0; i < height; ++i) copy_row(row + i, column, count, to + i * to_stride);
    }

 private:
    void copy_row(int64_t row, int64_t column, int64_t count, T* to) const {
        const int64_t start = row * row_stride + column * column_stride;
        if (storage == Storage::same) {
            const T* from = static_cast<const T*>(data) + start;
            if (column_stride == 1) {
                std::memcpy(to, from, count * sizeof(T));
            } else {
                for (int64_t j = 0; j < count; ++j) to[j] = from[j * column_stride];
            }
            return;
        }
        if constexpr (sizeof(T) == 4) {
            const auto widen = storage == Storage::bfloat16 ? isa().widen.bfloat16 : isa().widen.float16;
            const uint16_t* from = static_cast<const uint16_t*>(data) + start;
            if (column_stride == 1) {
                widen(from, count, to);
            } else {
                for (int64_t j = 0; j < count; ++j) widen(from + j * column_stride, 1, to + j);
            }
        }
    }
};

}  // namespace s3d
