#if defined(__x86_64__)

#include <cstddef>
#include <cstdint>
#include <utility>

#include "flowpath/cpu_kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// Vectors never cross a call that is not inlined, so that their calling convention is no matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
#endif

#define FLOWPATH_ISA avx512
#define FLOWPATH_LANES 16
#include "flowpath/cpu_kernels_body.hpp"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
