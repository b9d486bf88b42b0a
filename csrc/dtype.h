// Chooses between float and double, the types that operators compute in.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <list>
#include <tuple>

namespace s3d {

inline bool is_compute_dtype(at::ScalarType type) { return type == at::kFloat || type == at::kDouble; }

// Calls function.operator()<T>() with T = float or T = double. The caller has checked the dtype.
template <typename Function>
void with_dtype(at::ScalarType type, const Function& function) {
    if (type == at::kFloat) return function.template operator()<float>();
    TORCH_INTERNAL_ASSERT(type == at::kDouble, "no kernel computes in ", type);
    function.template operator()<double>();
}

// Items of both types, for operators that take a list of tensors. The list never moves an item.
template <template <typename> class Item>
class ItemsByDtype {
 public:
    template <typename T>
    std::list<Item<T>>& of() {
        return std::get<std::list<Item<T>>>(items_);
    }

    // Calls function(list) for the items of each type.
    template <typename Function>
    void for_each_dtype(const Function& function) {
        function(of<float>());
        function(of<double>());
    }

 private:
    std::tuple<std::list<Item<float>>, std::list<Item<double>>> items_;
};

}  // namespace s3d
