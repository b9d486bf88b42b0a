// Runs tasks on PyTorch's threads and gives each thread scratch memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>

#include "tensor.h"

namespace s3d {

inline int64_t thread_count() { return torch::stable::get_num_threads(); }

// Calls task(i) for all i in [0, count). A thread takes the next task when it is free. Each task writes to its own
// memory only, so that results do not depend on the order of tasks. If a task throws, so does this function.
template <typename Task>
void run_tasks(int64_t count, const Task& task) {
    const int64_t threads = std::min(count, thread_count());
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) task(i);
        return;
    }
    std::atomic<int64_t> next{0};
    std::exception_ptr error;
    std::once_flag failed;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
        // No exception may pass through the C functions between the threads.
        try {
            for (int64_t i = next++; i < count; i = next++) task(i);
        } catch (...) {
            std::call_once(failed, [&] { error = std::current_exception(); });
        }
    });
    if (error) std::rethrow_exception(error);
}

// The scratch memory of one thread. It stays for the next call, because a new allocation costs a page fault per 4 KiB.
class Scratch {
 public:
    // A copy would free the same memory twice.
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    static Scratch& of_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }

    // Ends the use of everything taken before, and makes room for `bytes` bytes. A large block that is no longer needed
    // goes back to the system.
    void reset(std::size_t bytes) {
        used_ = 0;
        if (bytes <= size_ && (size_ <= kept || bytes > size_ / 2)) return;
        std::free(memory_);
        size_ = 0;
        memory_ = static_cast<char*>(std::aligned_alloc(alignment, round_up(bytes)));
        if (!memory_) throw std::bad_alloc();
        size_ = round_up(bytes);
    }

    template <typename T>
    T* take(int64_t count) {
        char* result = memory_ + used_;
        used_ += bytes_for<T>(count);
        if (used_ > size_) throw std::bad_alloc();
        return reinterpret_cast<T*>(result);
    }

    template <typename T>
    static std::size_t bytes_for(int64_t count) {
        return round_up(static_cast<std::size_t>(count) * sizeof(T));
    }

 private:
    static constexpr std::size_t alignment = 64, kept = 4 << 20;
    static std::size_t round_up(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

    Scratch() = default;
    ~Scratch() { std::free(memory_); }

    char* memory_ = nullptr;
    std::size_t size_ = 0, used_ = 0;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace s3d
