// Raises Python's TypeError, ValueError and IndexError from operators.
#pragma once

#include <sstream>
#include <string>

#include "tensor.h"

namespace s3d {

enum class Error { type, value, index };

// Throws the exception that PyTorch turns into Python's error of this kind: see module.cpp.
[[noreturn]] void raise(Error kind, const std::string& message);

template <typename... Parts>
[[noreturn]] void raise_message(Error kind, const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    raise(kind, message.str());
}

}  // namespace s3d

// The parts of a message are evaluated only if the condition is false.
#define S3D_CHECK(kind, condition, ...) \
    if (!(condition)) [[unlikely]]      \
    ::s3d::raise_message(::s3d::Error::kind, __VA_ARGS__)
#define CHECK_TYPE(condition, ...) S3D_CHECK(type, condition, __VA_ARGS__)
#define CHECK_VALUE(condition, ...) S3D_CHECK(value, condition, __VA_ARGS__)
#define CHECK_INDEX(condition, ...) S3D_CHECK(index, condition, __VA_ARGS__)
