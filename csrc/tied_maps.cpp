// Multiplies maps by their curvature coefficients and adds the ties of the maxima behind them.
//
// T = C * P, and for every tie with t = K (d1 P[first] - d2 P[second]),
//     T[first] += d1 t,  T[second] -= d2 t.
// It stands between the two products of a convolution's S v. A task takes some channels of one image.
#include "checks.h"
#include "dtype.h"
#include "matrix.h"
#include "parallel.h"

namespace s3d {
namespace {

constexpr int64_t entries_per_task = 1 << 14;

// Maps (B, channels, places) with any strides.
template <typename T>
struct Maps {
    T* data;
    int64_t image, channel, place;

    explicit Maps(const Tensor& maps)
        : data(const_cast<T*>(data_of<T>(maps))),
          image(maps.stride(0)),
          channel(maps.stride(1)),
          place(maps.stride(2)) {}
    T* at(int64_t b, int64_t c) const { return data + b * image + c * channel; }
};

template <typename T>
class TiedMaps {
 public:
    // All tensors are (B, channels, places) or (B, M, ties), in the dtype T; K, d1 and d2 may be absent.
    TiedMaps(const Tensor& P, const Tensor& C, const Tensor& first, const Tensor& second, const Tensor& K,
             const OptionalTensor& d1, const OptionalTensor& d2, const Tensor& out)
        : P_(P),
          C_(C),
          K_(K),
          d1_(d1 ? *d1 : K),
          d2_(d2 ? *d2 : K),
          first_(first),
          second_(second),
          out_(out),
          sloped_(d1.has_value()),
          images_(P.size(0)),
          channels_(P.size(1)),
          filters_(C.size(1)),
          places_(P.size(2)),
          ties_(K.size(2)) {}

    void run() const {
        const int64_t per_task = std::max<int64_t>(1, entries_per_task / std::max<int64_t>(1, places_ + ties_));
        const int64_t blocks = ceil_div(channels_, per_task);
        std::atomic<bool> in_range{true};
        run_tasks(images_ * blocks, [&](int64_t task) {
            const int64_t b = task / blocks, begin = task % blocks * per_task;
            if (!run_channels(b, begin, std::min(channels_, begin + per_task))) in_range = false;
        });
        CHECK_INDEX(in_range, "first and second must lie in [0, ", places_, ")");
    }

 private:
    bool run_channels(int64_t b, int64_t begin, int64_t end) const {
        multiply(b, begin, end);
        for (int64_t c = begin; c < end; ++c) {
            const int64_t filter = c % filters_;
            const T *p = P_.at(b, c), *k = K_.at(b, filter), *d1 = d1_.at(b, filter), *d2 = d2_.at(b, filter);
            const int64_t *first = first_.at(b, filter), *second = second_.at(b, filter);
            T* to = out_.at(b, c);
            for (int64_t q = 0; q < ties_; ++q) {
                const int64_t w = first[q * first_.place], r = second[q * second_.place];
                // Each index is checked right before it is used.
                if (w < 0 || w >= places_ || r < 0 || r >= places_) return false;
                const T winner = p[w * P_.place], runner = p[r * P_.place], factor = k[q * K_.place];
                if (sloped_) {
                    const T up = d1[q * d1_.place], down = d2[q * d2_.place];
                    const T t = factor * (up * winner - down * runner);
                    to[w * out_.place] += up * t;
                    to[r * out_.place] -= down * t;
                } else {
                    const T t = factor * (winner - runner);
                    to[w * out_.place] += t;
                    to[r * out_.place] -= t;
                }
            }
        }
        return true;
    }

    // out = C * P, along the dimension that is contiguous in memory.
    void multiply(int64_t b, int64_t begin, int64_t end) const {
        if (P_.place == 1 && C_.place == 1 && out_.place == 1) {
            for (int64_t c = begin; c < end; ++c) {
                const T *p = P_.at(b, c), *own = C_.at(b, c % filters_);
                T* to = out_.at(b, c);
                for (int64_t n = 0; n < places_; ++n) to[n] = p[n] * own[n];
            }
            return;
        }
        for (int64_t n = 0; n < places_; ++n) {
            for (int64_t c = begin; c < end; ++c) {
                out_.at(b, c)[n * out_.place] = P_.at(b, c)[n * P_.place] * C_.at(b, c % filters_)[n * C_.place];
            }
        }
    }

    const Maps<T> P_, C_, K_, d1_, d2_;
    const Maps<int64_t> first_, second_;
    const Maps<T> out_;
    const bool sloped_;
    const int64_t images_, channels_, filters_, places_, ties_;
};

void check(const Tensor& P, const Tensor& C, const Tensor& first, const Tensor& second, const Tensor& K,
           const OptionalTensor& d1, const OptionalTensor& d2) {
    check_compute_dtype("P", P);
    const ScalarType type = P.scalar_type();
    check_storage("C", C, type);
    CHECK_VALUE(P.dim() == 4, "P must have shape (B, K M, H, W), got ", P.sizes());
    CHECK_VALUE(C.dim() == 4 && C.size(0) == P.size(0) && C.size(2) == P.size(2) && C.size(3) == P.size(3) &&
                    (C.size(1) > 0 ? P.size(1) % C.size(1) == 0 : P.size(1) == 0),
                "C must have the shape (B, M, H, W) of P ", P.sizes(), ", got ", C.sizes());
    CHECK_VALUE(K.dim() == 3 && K.size(0) == C.size(0) && K.size(1) == C.size(1), "K must have shape (", C.size(0),
                ", ", C.size(1), ", Q), got ", K.sizes());
    CHECK_VALUE(d1.has_value() == d2.has_value(), "d1 and d2 must be given together");
    const std::pair<const char*, const Tensor*> indices[] = {{"first", &first}, {"second", &second}};
    for (const auto& [name, index] : indices) {
        check_dtype(name, *index, ScalarType::Long);
        CHECK_VALUE(index->sizes() == K.sizes(), name, " must have shape ", K.sizes(), ", got ", index->sizes());
        check_device(name, *index);
    }
    check_storage("K", K, type);
    const std::pair<const char*, const OptionalTensor*> slopes[] = {{"d1", &d1}, {"d2", &d2}};
    for (const auto& [name, slope] : slopes) {
        if (!*slope) continue;
        check_storage(name, **slope, type);
        CHECK_VALUE((*slope)->sizes() == K.sizes(), name, " must have shape ", K.sizes(), ", got ", (*slope)->sizes());
    }
}

// Returns maps without values, whose channels lie as those of P do: innermost, or before the places.
Tensor maps_like(const Tensor& P) {
    if (P.is_contiguous() || P.stride(1) != 1) return new_like(P);
    return torch::stable::empty(P.sizes(), P.scalar_type(), std::nullopt, std::nullopt, std::nullopt,
                                torch::headeronly::MemoryFormat::ChannelsLast);
}

Tensor tied_maps(const Tensor& P, const Tensor& C, const Tensor& first, const Tensor& second, const Tensor& K,
                 const OptionalTensor& d1, const OptionalTensor& d2) {
    check(P, C, first, second, K, d1, d2);
    const Tensor out = maps_like(P);
    if (out.numel() == 0) return out;
    const ScalarType type = P.scalar_type();
    // Both memory formats of maps have a view with one dimension of places.
    with_dtype(type, [&]<typename T>() {
        TiedMaps<T>(torch::stable::flatten(P, 2), torch::stable::flatten(to_dtype(C, type), 2), first, second,
                    to_dtype(K, type), to_dtype(d1, type), to_dtype(d2, type),
                    torch::stable::view(out, {out.size(0), out.size(1), -1}))
            .run();
    });
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(s3d_fast, CPU, m) { m.impl("tied_maps", TORCH_BOX(&tied_maps)); }

}  // namespace
}  // namespace s3d
