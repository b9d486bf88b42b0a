// Lays out patches of maps as rows, zero beyond the borders: see reference.gather_patches.
#include "checks.h"
#include "dtype.h"
#include "parallel.h"

namespace s3d {
namespace {

struct Patch {
    int64_t height, width, down, right;  // taps, and the steps between them
};

// Maps (B, C, H, W) with any strides.
template <typename T>
struct Maps {
    const T* data;
    int64_t samples, channels, height, width;
    int64_t sample_stride, channel_stride, row_stride, column_stride;

    explicit Maps(const Tensor& maps)
        : data(data_of<T>(maps)),
          samples(maps.size(0)),
          channels(maps.size(1)),
          height(maps.size(2)),
          width(maps.size(3)),
          sample_stride(maps.stride(0)),
          channel_stride(maps.stride(1)),
          row_stride(maps.stride(2)),
          column_stride(maps.stride(3)) {}

    // to[c * taps + t] = channel c at tap t, of the patch whose first tap is at (y, x).
    void copy(int64_t sample, int64_t y, int64_t x, const Patch& patch, T* to) const {
        const int64_t taps = patch.height * patch.width;
        for (int64_t i = 0; i < patch.height; ++i) {
            for (int64_t j = 0; j < patch.width; ++j) {
                const int64_t row = y + i * patch.down, column = x + j * patch.right, tap = i * patch.width + j;
                if (row < 0 || row >= height || column < 0 || column >= width) {
                    for (int64_t c = 0; c < channels; ++c) to[c * taps + tap] = 0;
                    continue;
                }
                const T* from = data + sample * sample_stride + row * row_stride + column * column_stride;
                for (int64_t c = 0; c < channels; ++c) to[c * taps + tap] = from[c * channel_stride];
            }
        }
    }
};

// `places` is (N, 3): sample, row and column of the first tap; rows and columns may lie outside the maps.
Tensor gather_patches(const Tensor& maps, const Tensor& places, Integers kernel, Integers dilation) {
    check_compute_dtype("maps", maps);
    check_device("maps", maps);
    check_device("places", places);
    check_dtype("places", places, ScalarType::Long);
    CHECK_VALUE(maps.dim() == 4, "maps must have shape (B, C, H, W), got ", maps.sizes());
    CHECK_VALUE(places.dim() == 2 && places.size(1) == 3, "places must have shape (N, 3), got ", places.sizes());
    CHECK_VALUE(kernel.size() == 2 && dilation.size() == 2, "kernel and dilation must have two entries");
    constexpr int64_t most = int64_t{1} << 31;
    for (const int64_t number : {kernel[0], kernel[1], dilation[0], dilation[1]}) {
        CHECK_VALUE(number > 0 && number < most, "kernel and dilation must be in [1, 2^31), got ", number);
    }
    const Patch patch{kernel[0], kernel[1], dilation[0], dilation[1]};
    const int64_t count = places.size(0), taps = patch.height * patch.width;
    CHECK_VALUE(taps < most && maps.size(1) < most, "patches must have fewer than 2^31 taps and channels");
    const Tensor result = new_tensor({count, maps.size(1) * taps}, maps, maps.scalar_type());
    if (result.numel() == 0) return result;
    const Tensor dense = as_contiguous(places);
    const int64_t* at = data_of<int64_t>(dense);
    for (int64_t n = 0; n < count; ++n) {
        CHECK_INDEX(at[3 * n] >= 0 && at[3 * n] < maps.size(0), "places: sample ", at[3 * n],
                    " is out of range for maps of ", maps.size(0), " samples");
        for (const int64_t place : {at[3 * n + 1], at[3 * n + 2]}) {
            CHECK_INDEX(place > -most && place < most, "places must be in (-2^31, 2^31), got ", place);
        }
    }
    with_dtype(maps.scalar_type(), [&]<typename T>() {
        const Maps<T> from(maps);
        T* const to = mutable_data_of<T>(result);
        const int64_t entries = result.size(1), per_task = std::max<int64_t>(1, (1 << 16) / entries);
        run_tasks(ceil_div(count, per_task), [&](int64_t task) {
            for (int64_t n = task * per_task; n < std::min(count, (task + 1) * per_task); ++n) {
                from.copy(at[3 * n], at[3 * n + 1], at[3 * n + 2], patch, to + n * entries);
            }
        });
    });
    return result;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("gather_patches", TORCH_BOX(&gather_patches)); }

}  // namespace
}  // namespace s3d
