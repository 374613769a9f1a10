#include "flowpath/bindings.hpp"

namespace flowpath {

void bind_cpu_kernels(nanobind::module_&) {}

}  // namespace flowpath
