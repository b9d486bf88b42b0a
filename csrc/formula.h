// Makes the formula of an activation from the arguments of an operator.
#pragma once

#include <algorithm>

#include "errors.h"
#include "kernels.h"

namespace s3d {

// Raises unless the arguments describe an activation; returns its formula.
inline CurvatureFormula checked_formula(int64_t curvature, double a, double b, Numbers kink_at, Numbers kink_jump,
                                        double sharpness) {
    constexpr int64_t last_curvature = static_cast<int64_t>(Curvature::gaussian);
    CHECK_VALUE(0 <= curvature && curvature <= last_curvature, "curvature must lie in [0, ", last_curvature, "], got ",
                curvature);
    CHECK_VALUE(kink_at.size() == kink_jump.size() && kink_at.size() <= CurvatureFormula::max_kinks,
                "kink_at and kink_jump must have the same length, at most ", CurvatureFormula::max_kinks, ", got ",
                kink_at.size(), " and ", kink_jump.size());
    CurvatureFormula formula;
    formula.curvature = static_cast<Curvature>(curvature);
    formula.a = a, formula.b = b, formula.sharpness = sharpness;
    formula.kinks = static_cast<int>(kink_at.size());
    std::copy(kink_at.begin(), kink_at.end(), formula.kink_at);
    std::copy(kink_jump.begin(), kink_jump.end(), formula.kink_jump);
    return formula;
}

}  // namespace s3d
