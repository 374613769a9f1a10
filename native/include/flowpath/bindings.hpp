// The entry points of the binding layer: one function per area, each fills the same Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace flowpath {

// Memory of KV blocks: segment allocator, alignment, run copies, checksums.
void bind_memory(nanobind::module_& m);

// Compute kernels of the CPU engine.
void bind_cpu_kernels(nanobind::module_& m);

// Files of stored blocks, read and written many at a time.
void bind_storage(nanobind::module_& m);

}  // namespace flowpath
