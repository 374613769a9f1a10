#include "flowpath/bindings.hpp"

NB_MODULE(flowpath_native, m) {
    m.doc() = "FlowPath's native core: KV block memory, CPU kernels, storage.";
    flowpath::bind_memory(m);
    flowpath::bind_cpu_kernels(m);
    flowpath::bind_storage(m);
}
