#include "flowpath/cpu_team.hpp"

#include <dlfcn.h>

#include <algorithm>

namespace flowpath::cpu {

Team::Team(int num_threads)
    : num_threads_(std::max(num_threads, 1)),
      // The entry point that compilers call for a parallel region; libgomp and libomp both have it.
      parallel_(reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))) {
    if (parallel_ == nullptr) {
        num_threads_ = 1;
    }
}

}  // namespace flowpath::cpu
