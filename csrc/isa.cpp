// Lists the compiled instruction sets and chooses the one in use.
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernels.h"

namespace s3d {

namespace portable {
extern const InstructionSet instruction_set;
}
#if defined(__x86_64__)
namespace avx2 {
extern const InstructionSet instruction_set;
}
namespace avx512 {
extern const InstructionSet instruction_set;
}
namespace avx512_emulated {
extern const InstructionSet instruction_set;
}
namespace avx512_bf16 {
extern const PairKernels kernels;
}
#endif

namespace {

struct Candidate {
    const InstructionSet* set;
    bool available;
};

// Returns all compiled sets, best first. The emulated set is slow, so it is last.
std::vector<Candidate> candidates() {
    std::vector<Candidate> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    found.push_back({&avx512::instruction_set, has_avx512});
    found.push_back({&avx2::instruction_set, has_avx2});
#endif
    found.push_back({&portable::instruction_set, true});
#if defined(__x86_64__)
    found.push_back({&avx512_emulated::instruction_set, has_avx2});
#endif
    return found;
}

const InstructionSet* best() {
    for (const Candidate& candidate : candidates()) {
        if (candidate.available) return candidate.set;
    }
    return &portable::instruction_set;
}

std::atomic<const InstructionSet*>& in_use() {
    static std::atomic<const InstructionSet*> set{best()};
    return set;
}

}  // namespace

const InstructionSet& isa() { return *in_use().load(std::memory_order_relaxed); }

const PairKernels* pair_kernels() {
#if defined(__x86_64__)
    static const bool available = __builtin_cpu_supports("avx512bf16");
    if (available && &isa() == &avx512::instruction_set) return &avx512_bf16::kernels;
#endif
    return nullptr;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates()) {
        if (candidate.available) names.emplace_back(candidate.set->name);
    }
    return names;
}

std::vector<std::string> compiled_isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates()) names.emplace_back(candidate.set->name);
    return names;
}

const InstructionSet& find_isa(const std::string& name) {
    for (const Candidate& candidate : candidates()) {
        if (candidate.available && name == candidate.set->name) return *candidate.set;
    }
    std::string message = "isa must be one that this processor has:";
    for (const std::string& available : available_isas()) message += " " + available;
    throw std::invalid_argument(message + "; got " + name);
}

void use_isa(const std::string& name) { in_use().store(name == "auto" ? best() : &find_isa(name)); }

}  // namespace s3d
