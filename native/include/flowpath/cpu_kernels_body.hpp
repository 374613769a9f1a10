// The kernels' code. Included once per instruction set by cpu_kernels_*.cpp, which set
// FLOWPATH_ISA (the namespace and name) and FLOWPATH_LANES (floats in a vector) and switch the
// instructions on by pragma. Includes nothing but its parts: inline functions of the standard library
// must not be compiled with wide instructions, since the linker keeps one copy for all sets.

#include "flowpath/cpu_vectors_body.hpp"

#include "flowpath/cpu_layer_body.hpp"

#include "flowpath/cpu_attention_body.hpp"

#include "flowpath/cpu_chunk_body.hpp"

namespace flowpath::cpu::FLOWPATH_ISA {

#define FLOWPATH_STRING_OF(name) #name
#define FLOWPATH_STRING(name) FLOWPATH_STRING_OF(name)

const Kernels float32_kernels{FLOWPATH_STRING(FLOWPATH_ISA), lanes,
                              rms_norm<float>,               silu_mul<float>,
                              rotate_store<float>,           attend_part<float>,
                              join_parts<float>,             attend_tile<float>};
const Kernels bfloat16_kernels{FLOWPATH_STRING(FLOWPATH_ISA), lanes,
                               rms_norm<std::uint16_t>,       silu_mul<std::uint16_t>,
                               rotate_store<std::uint16_t>,   attend_part<std::uint16_t>,
                               join_parts<std::uint16_t>,     attend_tile<std::uint16_t>};

}  // namespace flowpath::cpu::FLOWPATH_ISA
