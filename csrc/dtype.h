// Chooses between float and double, the types that operators compute in.
#pragma once

#include <list>
#include <stdexcept>
#include <tuple>

#include "tensor.h"

namespace s3d {

inline bool is_compute_dtype(ScalarType type) { return type == ScalarType::Float || type == ScalarType::Double; }

// Returns the type that operators compute in if rows are stored as `stored`; of a type that they refuse, float32.
inline ScalarType compute_dtype(ScalarType stored) {
    return stored == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls function.operator()<T>() with T = float or T = double. The caller has checked the dtype.
template <typename Function>
void with_dtype(ScalarType type, const Function& function) {
    if (type == ScalarType::Float) return function.template operator()<float>();
    if (type != ScalarType::Double) throw std::logic_error("no kernel computes in this dtype");
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
