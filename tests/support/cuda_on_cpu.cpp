// Runs the kernels of native/cuda/transfer.cu on the CPU, slowly: a thread of the host for each
// thread of a CTA, one CTA after another. Warps meet in their shuffles.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct uint4 {
    unsigned x, y, z, w;
};

struct Index {
    unsigned x;
};

struct Warp {
    std::barrier<> meeting{32};
    unsigned long long values[32];
};

static thread_local Index threadIdx;
static thread_local Warp* warp;
static Index blockIdx, blockDim, gridDim;

using std::min;

inline uint4 __ldcs(const uint4* address) { return *address; }
inline void __stcs(uint4* address, uint4 value) { *address = value; }
inline void atomicAdd(unsigned long long* address, unsigned long long value) {
    __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long __shfl_down_sync(unsigned, unsigned long long value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32;
    warp->values[lane] = value;
    warp->meeting.arrive_and_wait();
    const unsigned long long other = lane + distance < 32 ? warp->values[lane + distance] : value;
    warp->meeting.arrive_and_wait();
    return other;
}

#include CUDA_SOURCE

template <typename Kernel>
static void launch(unsigned num_ctas, unsigned num_threads, const Kernel& kernel) {
    gridDim.x = num_ctas;
    blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x < num_ctas; ++blockIdx.x) {
        std::vector<std::unique_ptr<Warp>> warps;
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < num_threads; ++i) {
            if (i % 32 == 0) {
                warps.push_back(std::make_unique<Warp>());
            }
            threads.emplace_back([&kernel, i, mine = warps.back().get()] {
                threadIdx.x = i;
                warp = mine;
                kernel();
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
}

extern "C" void launch_copy_blocks(unsigned num_ctas, unsigned num_threads, const void* source,
                                   void* target, const int* source_ids, const int* target_ids,
                                   unsigned long long* sums, unsigned num_blocks,
                                   unsigned block_vectors) {
    launch(num_ctas, num_threads, [&] {
        copy_blocks(static_cast<const uint4*>(source), static_cast<uint4*>(target), source_ids,
                    target_ids, sums, num_blocks, block_vectors);
    });
}

extern "C" void launch_sum_blocks(unsigned num_ctas, unsigned num_threads, const void* source,
                                  const int* source_ids, unsigned long long* sums,
                                  unsigned num_blocks, unsigned block_vectors) {
    launch(num_ctas, num_threads, [&] {
        sum_blocks(static_cast<const uint4*>(source), source_ids, sums, num_blocks, block_vectors);
    });
}

extern "C" void launch_copy_pieces(unsigned num_ctas, unsigned num_threads, const void* source,
                                   void* target, const int* source_ids, const int* target_ids,
                                   unsigned long long* sums, unsigned num_blocks,
                                   const unsigned* shape) {
    launch(num_ctas, num_threads, [&] {
        copy_pieces(static_cast<const uint4*>(source), static_cast<uint4*>(target), source_ids,
                    target_ids, sums, num_blocks, shape[0], shape[1], shape[2], shape[3], shape[4],
                    shape[5], shape[6], shape[7], shape[8], shape[9], shape[10], shape[11]);
    });
}
