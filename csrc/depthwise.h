// Describes a depthwise convolution: its sizes, and which taps reach which places.
#pragma once

#include <vector>

#include "errors.h"
#include "kernels.h"
#include "parallel.h"

namespace s3d {

// The taps of one axis. Place o of the result is a sum over entries e in [start[o], start[o + 1]), each of which takes
// tap[e] of the weight and place[e] of the input.
struct AxisTaps {
    std::vector<int64_t> start{0}, tap, place;

    void end_place() { start.push_back(static_cast<int64_t>(tap.size())); }
    void add(int64_t t, int64_t p) {
        tap.push_back(t);
        place.push_back(p);
    }
    int64_t count() const { return static_cast<int64_t>(start.size()) - 1; }
    int64_t taps(int64_t o) const { return start[o + 1] - start[o]; }

    // Divides the places into runs. Places that follow one another in steps of `step` share a run if they take the same
    // taps and if their places in the input advance alike.
    std::vector<TapRun> runs(int64_t step) const {
        std::vector<TapRun> found;
        for (int64_t residue = 0; residue < step; ++residue) {
            for (int64_t o = residue; o < count();) {
                TapRun run{o, step, 1, tap.data() + start[o], place.data() + start[o], taps(o), 0};
                for (int64_t next = o + step; next < count() && continues(run, o, next); next += step) ++run.count;
                o += step * run.count;
                found.push_back(run);
            }
        }
        return found;
    }

 private:
    bool continues(TapRun& run, int64_t first, int64_t next) const {
        if (taps(next) != run.taps) return false;
        for (int64_t i = 0; i < run.taps; ++i) {
            const int64_t moved = place[start[next] + i] - place[start[first] + i];
            if (i == 0 && run.count == 1) run.advance = moved;
            if (tap[start[next] + i] != tap[start[first] + i] || moved != run.advance * run.count) return false;
        }
        return true;
    }
};

// One axis of a convolution: forward, o = sum over k of weight[k] * in[o * stride - padding + k * dilation]; and
// backward.
struct ConvAxis {
    int64_t in, kernel, stride, padding, dilation;

    int64_t out() const {
        const int64_t reach = in + 2 * padding - dilation * (kernel - 1) - 1;
        return reach < 0 ? 0 : reach / stride + 1;
    }

    AxisTaps forward() const {
        AxisTaps taps;
        for (int64_t o = 0; o < out(); ++o) {
            for (int64_t k = 0; k < kernel; ++k) {
                const int64_t i = o * stride - padding + k * dilation;
                if (0 <= i && i < in) taps.add(k, i);
            }
            taps.end_place();
        }
        return taps;
    }

    AxisTaps backward() const {
        AxisTaps taps;
        for (int64_t i = 0; i < in; ++i) {
            for (int64_t k = 0; k < kernel; ++k) {
                const int64_t reached = i + padding - k * dilation;
                if (reached >= 0 && reached % stride == 0 && reached / stride < out()) taps.add(k, reached / stride);
            }
            taps.end_place();
        }
        return taps;
    }
};

// The axes of stage number `stage`. `geometry` has six numbers for each stage: stride, padding and dilation, each
// vertical and horizontal. The weight is (M, kh, kw) and the input has the size (height, width).
struct StageAxes {
    ConvAxis vertical, horizontal;

    StageAxes(const Tensor& weight, Integers geometry, int64_t height, int64_t width)
        : vertical{height, weight.size(1), geometry[0], geometry[2], geometry[4]},
          horizontal{width, weight.size(2), geometry[1], geometry[3], geometry[5]} {}
};

// Raises unless the six numbers are a geometry.
inline void check_geometry(Integers geometry) {
    CHECK_VALUE(geometry.size() == 6, "geometry must have 6 numbers for each stage, got ", geometry.size());
    for (size_t i = 0; i < 6; ++i) {
        const int64_t least = i == 2 || i == 3 ? 0 : 1;
        // Sizes beyond this would overflow where they are multiplied.
        CHECK_VALUE(least <= geometry[i] && geometry[i] < (1 << 20),
                    "geometry must hold strides and dilations >= 1 and paddings >= 0, got ", geometry);
    }
}

}  // namespace s3d
