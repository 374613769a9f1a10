#include "flowpath/bindings.hpp"

NB_MODULE(flowpath_native, m) {
    m.doc() = "FlowPath's native core: KV block memory and CPU kernels.";
    flowpath::bind_memory(m);
    flowpath::bind_cpu_kernels(m);
}
