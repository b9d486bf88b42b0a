// Computes |J|^2 of the activation behind a depthwise convolution of a pointwise layer, for every place and channel.
//
// J = sum over taps t of w_t d[n + t] x[n + t], so
//     |J|^2 = sum over taps t, t' of w_t w_t' d[n + t] d[n + t'] <x[n + t], x[n + t']>.
// All channels share the products of neighbouring rows. For one image at a time, a task computes them for each offset
// between two taps, with rows transposed so that vectors run along a line of the image.
#include "checks.h"
#include "depthwise.h"
#include "dtype.h"
#include "panels.h"

namespace s3d {
namespace {

template <typename T>
class RowNorms {
 public:
    // All tensors are contiguous and have the dtype T. weight is (taps, M).
    RowNorms(const Tensor& X, const Tensor& d, const Tensor& weight, const StageAxes& axes, bool bias,
             const Tensor& out)
        : kernel_(kernels<T>()),
          X_(data_of<T>(X)),
          d_(data_of<T>(d)),
          weight_(data_of<T>(weight)),
          out_(mutable_data_of<T>(out)),
          bias_(bias),
          vertical_(axes.vertical),
          horizontal_(axes.horizontal),
          rows_(vertical_.forward()),
          columns_(horizontal_.forward()),
          runs_(columns_.runs(1)),
          images_(d.size(0)),
          depth_(X.size(1)),
          channels_(d.size(3)),
          reach_((horizontal_.kernel - 1) * horizontal_.dilation),
          line_(reach_ + ceil_div(horizontal_.in, kernel_.lanes) * kernel_.lanes + reach_),
          gram_line_(ceil_div(horizontal_.in, kernel_.lanes) * kernel_.lanes),
          shifts_(2 * horizontal_.kernel - 1) {}

    void run() const {
        run_tasks(images_, [&](int64_t image) { run_image(image); });
    }

 private:
    void run_image(int64_t image) const {
        const int64_t height = vertical_.in, width = horizontal_.in, taps = vertical_.kernel * horizontal_.kernel;
        const int64_t pairs = taps * (taps + 1) / 2, plane = height * gram_line_;
        const int64_t rows_size = height * depth_ * line_, gram_size = vertical_.kernel * shifts_ * plane;
        Scratch& scratch = Scratch::of_thread();
        scratch.reset(Scratch::bytes_for<T>(rows_size) + Scratch::bytes_for<T>(gram_size) +
                      Scratch::bytes_for<T>(2 * kernel_.lanes * taps) + Scratch::bytes_for<const T*>(taps) +
                      Scratch::bytes_for<int64_t>(taps) + Scratch::bytes_for<int64_t>(pairs));
        T* transposed = scratch.take<T>(rows_size);  // (height, depth, line), with `reach_` zeros before each line
        T* gram = scratch.take<T>(gram_size);        // (kernel rows, shifts, height, gram_line)
        T* work = scratch.take<T>(2 * kernel_.lanes * taps);
        const T** weight = scratch.take<const T*>(taps);
        int64_t* d_place = scratch.take<int64_t>(taps);
        int64_t* gram_place = scratch.take<int64_t>(pairs);

        std::memset(transposed, 0, rows_size * sizeof(T));
        for (int64_t n = 0; n < height * width; ++n) {
            const T* x = X_ + (image * height * width + n) * depth_;
            T* to = transposed + n / width * depth_ * line_ + reach_ + n % width;
            for (int64_t k = 0; k < depth_; ++k) to[k * line_] = x[k];
        }
        for (int64_t down = 0; down < vertical_.kernel; ++down) {
            for (int64_t y = 0; y + down * vertical_.dilation < height; ++y) {
                const T* a = transposed + y * depth_ * line_ + reach_;
                T* products = gram + down * shifts_ * plane + y * gram_line_;
                kernel_.shifted_dots(a, a + down * vertical_.dilation * depth_ * line_, line_, depth_, width, -reach_,
                                     horizontal_.dilation, shifts_, products, plane);
                for (int64_t shift = 0; shift < shifts_; ++shift) {
                    // A product of different rows counts twice. The ones of a bias add 1 to each product.
                    const T factor = down == 0 && shift == horizontal_.kernel - 1 ? T(1) : T(2);
                    T* line = products + shift * plane;
                    for (int64_t x = 0; x < width; ++x) line[x] = factor * (line[x] + T(bias_));
                }
            }
        }
        const T* own_d = d_ + image * height * width * channels_;
        T* out = out_ + image * rows_.count() * columns_.count() * channels_;
        for (int64_t oy = 0; oy < rows_.count(); ++oy, out += columns_.count() * channels_) {
            for (const TapRun& run : runs_) {
                int64_t t = 0, pair = 0;
                for (int64_t r = rows_.start[oy]; r < rows_.start[oy + 1]; ++r) {
                    for (int64_t c = 0; c < run.taps; ++c, ++t) {
                        weight[t] = weight_ + (rows_.tap[r] * horizontal_.kernel + run.tap[c]) * channels_;
                        d_place[t] = (rows_.place[r] * width + run.place[c]) * channels_;
                        for (int64_t s = 0; s <= t; ++s, ++pair) {
                            const int64_t upper = rows_.start[oy] + s / run.taps, left = s % run.taps;
                            const int64_t down = rows_.tap[r] - rows_.tap[upper];
                            const int64_t shift = run.tap[c] - run.tap[left] + horizontal_.kernel - 1;
                            gram_place[pair] =
                                (down * shifts_ + shift) * plane + rows_.place[upper] * gram_line_ + run.place[left];
                        }
                    }
                }
                const Windows<T> windows{t, run.count, run.advance, weight, own_d, d_place, gram, gram_place};
                kernel_.window_norms(windows, channels_, work, out + run.first * channels_);
            }
        }
    }

    const Kernels<T>& kernel_;
    const T *const X_, *const d_, *const weight_;
    T* const out_;
    const bool bias_;
    const ConvAxis vertical_, horizontal_;
    const AxisTaps rows_, columns_;
    const std::vector<TapRun> runs_;  // of the columns
    const int64_t images_, depth_, channels_;
    const int64_t reach_, line_, gram_line_, shifts_;
};

void check(const Tensor& X, const Tensor& d, const Tensor& weight, Integers geometry, ScalarType type) {
    check_storage("X", X, type);
    check_storage("d", d, type);
    check_storage("weight", weight, type);
    CHECK_VALUE(X.dim() == 2, "X must have shape (B H W, D), got ", X.sizes());
    CHECK_VALUE(d.dim() == 4 && d.size(0) * d.size(1) * d.size(2) == X.size(0),
                "d must have shape (B, H, W, M) with B H W = ", X.size(0), ", got ", d.sizes());
    CHECK_VALUE(weight.dim() == 3 && weight.size(0) == d.size(3) && weight.size(1) > 0 && weight.size(2) > 0,
                "weight must have shape (", d.size(3), ", kh, kw), got ", weight.sizes());
    check_geometry(geometry);
}

Tensor depthwise_row_norms(const Tensor& X, const Tensor& d, const Tensor& weight, const std::vector<int64_t>& geometry,
                           bool bias) {
    const ScalarType type = compute_dtype(dtype_of(X));
    check(X, d, weight, geometry, type);
    const StageAxes axes(weight, geometry, d.size(1), d.size(2));
    const Tensor out = new_tensor({d.size(0), axes.vertical.out(), axes.horizontal.out(), d.size(3)}, X, type);
    if (out.numel() == 0) return out;
    with_dtype(type, [&]<typename T>() {
        const Tensor rows = as_contiguous(to_dtype(X, type)), slopes = as_contiguous(to_dtype(d, type));
        const Tensor taps =
            as_contiguous(torch::stable::transpose(torch::stable::flatten(to_dtype(weight, type), 1), 0, 1));
        RowNorms<T>(rows, slopes, taps, axes, bias, out).run();
    });
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("depthwise_row_norms", TORCH_BOX(&depthwise_row_norms)); }

}  // namespace
}  // namespace s3d
