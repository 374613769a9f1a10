#include "flowpath/bindings.hpp"

namespace flowpath {

void bind_memory(nanobind::module_&) {}

}  // namespace flowpath
