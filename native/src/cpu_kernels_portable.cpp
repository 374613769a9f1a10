#include <cstddef>
#include <cstdint>
#include <utility>

#include "flowpath/cpu_kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// Vectors never cross a call that is not inlined, so that their calling convention is no matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define FLOWPATH_ISA portable
#define FLOWPATH_LANES 4
#include "flowpath/cpu_kernels_body.hpp"
