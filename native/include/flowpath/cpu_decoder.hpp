// What a decoder layer does beside its matrix products, over one paged pool and one ragged batch.
#pragma once

#include <cstdint>
#include <vector>

#include "flowpath/cpu_kernels.hpp"
#include "flowpath/cpu_team.hpp"

namespace flowpath::cpu {

struct DecoderShape {
    PoolView pool;
    std::int32_t num_layers;
    std::int32_t num_heads;
    std::int64_t max_positions;  // rows of the rotary tables
    Element element;
};

// A row of several tokens: first_token .. last_token - 1 of the batch, from position start.
struct Chunk {
    std::int32_t first_token;
    std::int32_t last_token;
    std::int32_t start;
};

// One step's tokens: those of all rows, flattened. The first num_paged tokens are single; all
// others belong to chunks. Each single token and then each chunk has a row of block numbers.
struct Batch {
    std::vector<std::int32_t> positions;
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> tables;
    std::vector<Chunk> chunks;
    std::int64_t num_paged = 0;
    std::int64_t table_width = 0;
};

enum class BatchFault : std::uint8_t { none, lengths, position, slot, table, chunk };

class DecoderKernels {
public:
    // cosine and sine are (max_positions, head_dim / 2) and must outlive this object, like the
    // pool. The instruction set must be supported.
    DecoderKernels(const DecoderShape& shape, const float* cosine, const float* sine,
                   int num_threads, InstructionSet set);

    [[nodiscard]] const char* instruction_set() const noexcept { return kernels_.name; }
    [[nodiscard]] const DecoderShape& shape() const noexcept { return shape_; }

    // Takes the batch that the following calls work on, once every index in it is known to lie in
    // the pool and the rotary tables; otherwise the old batch stays.
    [[nodiscard]] BatchFault set_batch(Batch&& batch);

    // Rotates queries and keys in place and stores K and V of all tokens; qkv is (tokens,
    // num_heads + 2 * num_kv_heads, head_dim). Weights of the q and k norm may be null.
    void rotate_store(std::int32_t layer, void* qkv, const void* q_weight, const void* k_weight,
                      float epsilon) const;

    // Attention of all tokens of qkv into out, (tokens, num_heads, head_dim). window is the number of
    // positions a token sees, itself included; 0 means all.
    void attend(std::int32_t layer, const void* qkv, void* out, std::int32_t window, float scale);

    void rms_norm(const NormArgs& args, std::int64_t rows) const;
    void silu_mul(const void* gate_up, void* out, std::int64_t rows, std::int64_t size) const;

    // Whether a call over this many numbers takes long enough to let other threads run meanwhile.
    [[nodiscard]] bool is_long(std::int64_t num_elements) const noexcept {
        return num_elements >= long_call_elements;
    }

private:
    static constexpr std::int64_t long_call_elements = 1 << 17;

    struct Part {
        std::int64_t token;
        std::int32_t first;
        std::int32_t last;
        std::int64_t index;  // among all parts; those of one token are neighbours
        std::int64_t num_parts;  // of its token, at the token's first part; 0 at the others
    };

    struct Tile {
        std::int64_t chunk;
        std::int32_t first_token;  // of the chunk
        std::int32_t last_token;
    };

    void list_tiles();
    void attend_singles(std::int32_t layer, const void* qkv, void* out, std::int32_t window,
                        float scale);
    void attend_chunks(std::int32_t layer, const void* qkv, void* out, std::int32_t window,
                       float scale);

    template <typename Run>
    void split_rows(std::int64_t rows, std::int64_t row_elements, const Run& run) const;
    void list_parts(std::int32_t window);

    DecoderShape shape_;
    const float* cosine_;
    const float* sine_;
    const Kernels& kernels_;
    Team team_;
    Batch batch_;
    std::vector<Part> parts_;
    std::int32_t parts_window_ = -1;
    std::vector<Tile> tiles_;  // of the batch's chunks, the longest first
    std::vector<float> results_;
    std::vector<float> scratch_;  // scratch_floats_ of them for each thread
    std::size_t scratch_floats_ = 0;
};

}  // namespace flowpath::cpu
