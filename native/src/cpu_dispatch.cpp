#include <initializer_list>

#include "flowpath/cpu_kernels.hpp"

namespace flowpath::cpu {

namespace {

constexpr std::int32_t lanes_of(InstructionSet set) noexcept {
    switch (set) {
        case InstructionSet::avx512: return 16;
        case InstructionSet::avx2: return 8;
        case InstructionSet::portable: break;
    }
    return 4;
}

}  // namespace

bool is_supported(InstructionSet set) noexcept {
#if defined(__x86_64__)
    switch (set) {
        case InstructionSet::avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("bmi2");
        case InstructionSet::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("bmi2");
        case InstructionSet::portable: break;
    }
    return true;
#else
    return set == InstructionSet::portable;
#endif
}

InstructionSet widest_set(std::int32_t head_dim) noexcept {
    for (const InstructionSet set : {InstructionSet::avx512, InstructionSet::avx2}) {
        if (is_supported(set) && head_dim % (2 * lanes_of(set)) == 0) {
            return set;
        }
    }
    return InstructionSet::portable;
}

const Kernels& kernels_of(InstructionSet set, Element element) noexcept {
    const bool is_float = element == Element::float32;
#if defined(__x86_64__)
    switch (set) {
        case InstructionSet::avx512:
            return is_float ? avx512::float32_kernels : avx512::bfloat16_kernels;
        case InstructionSet::avx2: return is_float ? avx2::float32_kernels : avx2::bfloat16_kernels;
        case InstructionSet::portable: break;
    }
#else
    (void)set;
#endif
    return is_float ? portable::float32_kernels : portable::bfloat16_kernels;
}

}  // namespace flowpath::cpu
