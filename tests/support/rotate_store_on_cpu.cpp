// Runs the kernel of native/cuda/engine_rotate_store.cu on the CPU: a thread of the host for each
// thread of a CTA, one CTA after another. Warps meet in their shuffles.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define HOST_PRIMITIVES

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};

struct Index {
    unsigned x;
};

struct Warp {
    std::barrier<> meeting{32};
    float values[32];
};

static thread_local Index threadIdx;
static thread_local Warp* warp;
static Index blockIdx, blockDim;

inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    const unsigned lane = threadIdx.x % 32;
    warp->values[lane] = value;
    warp->meeting.arrive_and_wait();
    const float other = warp->values[lane ^ distance];
    warp->meeting.arrive_and_wait();
    return other;
}

// bfloat16 alone; to the nearest, of two equally near ones the even one.
inline float to_float(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
}

inline std::uint16_t from_float(float value) {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof(wide));
    return static_cast<std::uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
}

inline unsigned e4m3(float value) {
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) {
        return 0x7F;
    }
    if (size >= 448.0f) {
        return sign | 0x7E;
    }
    // The distance of neighbours: 2^-9 below 2^-6, then an eighth of the power of two.
    const int power = size < 0x1p-6f ? -6 : std::ilogb(size);
    const unsigned steps = static_cast<unsigned>(std::nearbyint(std::ldexp(size, 3 - power)));
    // Steps beyond the eighth carry into the exponent by themselves.
    return sign | (static_cast<unsigned>(power + 6) * 8 + steps);
}

inline std::uint16_t to_e4m3(float low, float high) {
    return static_cast<std::uint16_t>(e4m3(low) | e4m3(high) << 8);
}

template <typename Whole>
inline void store(std::uint16_t* to, const Whole& vector) {
    std::memcpy(to, &vector, sizeof(vector));
}

#include CUDA_SOURCE

extern "C" void launch_rotate_store(unsigned num_threads, u16* heads, int num_tokens, int num_heads,
                                    int num_kv_heads, const int* positions, const int* slots,
                                    const float* cosine, const float* sine, const u16* q_norm,
                                    const u16* k_norm, float epsilon, Stored* keys, Stored* values,
                                    long long block_stride, int block_size
#ifdef KV_E4M3
                                    ,
                                    float key_scale, float value_scale, float key_inverse,
                                    float value_inverse, float* trailer
#endif
) {
    const int num_all = num_heads + 2 * num_kv_heads;
    const unsigned total = static_cast<unsigned>(num_tokens * num_all * LANES);
    blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x * num_threads < total; ++blockIdx.x) {
        std::vector<std::unique_ptr<Warp>> warps;
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < num_threads; ++i) {
            if (i % 32 == 0) {
                warps.push_back(std::make_unique<Warp>());
            }
            threads.emplace_back([&, i, mine = warps.back().get()] {
                threadIdx.x = i;
                warp = mine;
                rotate_store(heads, static_cast<long long>(num_all) * HEAD_DIM, num_tokens,
                             num_heads, num_kv_heads, positions, slots, cosine, sine, q_norm,
                             k_norm, epsilon, keys, values, block_stride, block_size
#ifdef KV_E4M3
                             ,
                             key_scale, value_scale, key_inverse, value_inverse, trailer
#endif
                );
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
}
