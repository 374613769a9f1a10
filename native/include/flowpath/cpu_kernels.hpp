// The CPU engine's inner loops, compiled once per instruction set and chosen at run time.
//
// A kernel works on a range of rows or on one work item and starts no threads; cpu_decoder.hpp
// splits work over threads. Numbers are float32 or bfloat16 in memory and float32 in registers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowpath::cpu {

enum class Element : std::uint8_t { float32, bfloat16 };

[[nodiscard]] constexpr std::size_t element_bytes(Element element) noexcept {
    return element == Element::float32 ? 4 : 2;
}

// Positions of one part of attention: parts start at multiples of it, whatever the batch and the
// number of threads, so that a sequence's result does not depend on its company.
inline constexpr std::int32_t part_positions = 128;

// The paged pool: block b, layer l, plane p (0 is K, 1 is V), position t of the block and head h
// start at base + b * block_stride + l * layer_stride + p * plane_stride +
// (t * num_kv_heads + h) * head_dim * element_bytes. Strides are in bytes.
struct PoolView {
    std::byte* base;
    std::int64_t num_blocks;
    std::int64_t block_stride;
    std::int64_t layer_stride;
    std::int64_t plane_stride;
    std::int32_t block_size;
    std::int32_t num_kv_heads;
    std::int32_t head_dim;

    [[nodiscard]] std::byte* plane(std::int64_t block, std::int32_t layer,
                                   std::int32_t index) const noexcept {
        return base + block * block_stride + layer * layer_stride + index * plane_stride;
    }
};

struct NormArgs {
    void* residual;        // (rows, size), updated in place where delta is given
    const void* delta;     // (rows, size) added to the residual first, or null
    const void* weight;    // (size)
    void* out;             // (rows, size)
    std::int64_t size;
    float epsilon;
};

struct StoreArgs {
    PoolView pool;
    std::int32_t layer;
    std::int32_t num_heads;
    void* qkv;                      // (tokens, num_heads + 2 * num_kv_heads, head_dim)
    const void* q_weight;           // (head_dim) RMSNorm weights before the rotation, or null
    const void* k_weight;
    float epsilon;
    const std::int32_t* positions;  // (tokens)
    const std::int64_t* slots;      // (tokens) block * block_size + offset in the block
    const float* cosine;            // (max positions, head_dim / 2)
    const float* sine;
};

struct AttendArgs {
    PoolView pool;
    std::int32_t layer;
    std::int32_t num_heads;
    const void* queries;  // of one token: (num_heads, head_dim)
    const std::int32_t* table;
    std::int32_t first;   // positions first .. last - 1 are attended, at most part_positions
    std::int32_t last;
    float scale;
};

// Result of one part: for each head the maximum score, the sum of exponentials relative to it, and
// the weighted sum of values, (num_heads) + (num_heads) + (num_heads, head_dim) floats.
[[nodiscard]] constexpr std::size_t part_floats(std::int32_t num_heads,
                                                std::int32_t head_dim) noexcept {
    return static_cast<std::size_t>(num_heads) * (2 + static_cast<std::size_t>(head_dim));
}

// Floats of scratch that attend_part needs: scaled queries and scores.
[[nodiscard]] constexpr std::size_t attend_scratch_floats(std::int32_t num_heads,
                                                          std::int32_t head_dim) noexcept {
    return static_cast<std::size_t>(num_heads) *
           (static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(part_positions));
}

// Keys of one tile of chunk attention. Tiles start at multiples of it, so that a token's result does
// not depend on how its prompt was cut into chunks.
inline constexpr std::int32_t tile_keys = 64;

// Queries of one tile: as many tokens as make about 192 rows, all heads of a KV head together.
[[nodiscard]] constexpr std::int32_t tile_tokens(std::int32_t group) noexcept {
    return group >= 24 ? 8 : 192 / group;
}

struct ChunkArgs {
    PoolView pool;
    std::int32_t layer;
    std::int32_t num_heads;
    const void* qkv;          // of the chunk: (tokens, num_heads + 2 * num_kv_heads, head_dim)
    void* out;                // of the chunk: (tokens, num_heads, head_dim)
    const std::int32_t* table;
    std::int32_t start;       // position of the chunk's first token
    std::int32_t first_token;  // the tile: tokens first_token .. last_token - 1 of the chunk
    std::int32_t last_token;
    std::int32_t kv_head;
    std::int32_t window;      // positions that a token sees, itself included; 0 is all
    float scale;
};

// Floats of scratch that attend_tile needs: queries, sums, scores, maxima, totals (rows padded to
// whole register blocks), and one tile of keys and values.
[[nodiscard]] constexpr std::size_t chunk_scratch_floats(std::int32_t group,
                                                         std::int32_t head_dim) noexcept {
    const auto rows = static_cast<std::size_t>(tile_tokens(group)) *
                          static_cast<std::size_t>(group) + 6;
    const auto dim = static_cast<std::size_t>(head_dim);
    const auto keys = static_cast<std::size_t>(tile_keys);
    return rows * (2 * dim + keys + 2) + 2 * keys * dim;
}

// One instruction set's kernels for one element type.
struct Kernels {
    const char* name;
    std::int32_t lanes;  // head_dim must be a multiple of twice as many
    void (*rms_norm)(const NormArgs& args, std::int64_t first_row, std::int64_t last_row);
    void (*silu_mul)(const void* gate_up, void* out, std::int64_t size, std::int64_t first_row,
                     std::int64_t last_row);
    void (*rotate_store)(const StoreArgs& args, std::int64_t first_token,
                         std::int64_t last_token);
    void (*attend_part)(const AttendArgs& args, float* part, float* scratch);
    // Joins num_parts parts that lie behind each other into (num_heads, head_dim) elements at out.
    void (*join_parts)(const float* parts, std::int64_t num_parts, std::int32_t num_heads,
                       std::int32_t head_dim, void* out);
    // Attention of one tile of a chunk for one KV head's queries.
    void (*attend_tile)(const ChunkArgs& args, float* scratch);
};

enum class InstructionSet : std::uint8_t { portable, avx2, avx512 };

// Whether this processor (and this build) can run the set.
[[nodiscard]] bool is_supported(InstructionSet set) noexcept;

// The widest supported set that can work on head_dim, which must be a multiple of 8.
[[nodiscard]] InstructionSet widest_set(std::int32_t head_dim) noexcept;

// Only of a supported set.
[[nodiscard]] const Kernels& kernels_of(InstructionSet set, Element element) noexcept;

namespace portable {
extern const Kernels float32_kernels;
extern const Kernels bfloat16_kernels;
}  // namespace portable
namespace avx2 {
extern const Kernels float32_kernels;
extern const Kernels bfloat16_kernels;
}  // namespace avx2
namespace avx512 {
extern const Kernels float32_kernels;
extern const Kernels bfloat16_kernels;
}  // namespace avx512

}  // namespace flowpath::cpu
