#include "flowpath/cpu_decoder.hpp"

#include <algorithm>
#include <utility>

namespace flowpath::cpu {

namespace {

// Below this many numbers, waking a second thread costs more than it saves.
constexpr std::int64_t min_parallel_elements = 1 << 15;

}  // namespace

DecoderKernels::DecoderKernels(const DecoderShape& shape, const float* cosine, const float* sine,
                               int num_threads, InstructionSet set)
    : shape_(shape),
      cosine_(cosine),
      sine_(sine),
      kernels_(kernels_of(set, shape.element)),
      team_(num_threads) {
    const std::int32_t group = shape_.num_heads / shape_.pool.num_kv_heads;
    scratch_floats_ = std::max(attend_scratch_floats(shape_.num_heads, shape_.pool.head_dim),
                               chunk_scratch_floats(group, shape_.pool.head_dim));
    scratch_.resize(static_cast<std::size_t>(team_.num_threads()) * scratch_floats_);
}

namespace {

// Whether the table reaches the position with blocks of the pool.
bool reaches(const Batch& batch, std::int64_t row, std::int32_t position, const PoolView& pool) {
    const std::int64_t needed = position / pool.block_size + 1;
    if (needed > batch.table_width) {
        return false;
    }
    const std::int32_t* table = batch.tables.data() + row * batch.table_width;
    return std::all_of(table, table + needed, [&](std::int32_t block) {
        return block >= 0 && block < pool.num_blocks;
    });
}

// Whether the chunks follow each other over all tokens after the single ones.
bool are_chunks_in_order(const Batch& batch, std::int64_t num_tokens) {
    std::int64_t next = batch.num_paged;
    for (const Chunk& chunk : batch.chunks) {
        if (chunk.first_token != next || chunk.last_token <= chunk.first_token ||
            chunk.last_token > num_tokens || chunk.start < 0) {
            return false;
        }
        next = chunk.last_token;
    }
    return next == num_tokens;
}

}  // namespace

BatchFault DecoderKernels::set_batch(Batch&& batch) {
    const auto num_tokens = static_cast<std::int64_t>(batch.positions.size());
    const auto num_chunks = static_cast<std::int64_t>(batch.chunks.size());
    if (static_cast<std::int64_t>(batch.slots.size()) != num_tokens ||
        batch.num_paged < 0 || batch.num_paged > num_tokens ||
        static_cast<std::int64_t>(batch.tables.size()) !=
            (batch.num_paged + num_chunks) * batch.table_width) {
        return BatchFault::lengths;
    }
    if (!are_chunks_in_order(batch, num_tokens)) {
        return BatchFault::chunk;
    }
    const PoolView& pool = shape_.pool;
    for (const std::int32_t position : batch.positions) {
        if (position < 0 || position >= shape_.max_positions) {
            return BatchFault::position;
        }
    }
    for (const std::int64_t slot : batch.slots) {
        if (slot < 0 || slot >= pool.num_blocks * pool.block_size) {
            return BatchFault::slot;
        }
    }
    for (std::int64_t token = 0; token < batch.num_paged; ++token) {
        if (!reaches(batch, token, batch.positions[static_cast<std::size_t>(token)], pool)) {
            return BatchFault::table;
        }
    }
    for (std::int64_t i = 0; i < num_chunks; ++i) {
        const Chunk& chunk = batch.chunks[static_cast<std::size_t>(i)];
        const std::int64_t end =
            std::int64_t{chunk.start} + chunk.last_token - chunk.first_token;
        if (end > shape_.max_positions) {
            return BatchFault::position;
        }
        if (!reaches(batch, batch.num_paged + i, static_cast<std::int32_t>(end - 1), pool)) {
            return BatchFault::table;
        }
    }
    batch_ = std::move(batch);
    parts_window_ = -1;
    list_tiles();
    return BatchFault::none;
}

void DecoderKernels::list_tiles() {
    tiles_.clear();
    const std::int32_t step = tile_tokens(shape_.num_heads / shape_.pool.num_kv_heads);
    for (std::size_t chunk = 0; chunk < batch_.chunks.size(); ++chunk) {
        const std::int32_t tokens =
            batch_.chunks[chunk].last_token - batch_.chunks[chunk].first_token;
        for (std::int32_t first = 0; first < tokens; first += step) {
            tiles_.push_back(
                {static_cast<std::int64_t>(chunk), first, std::min(tokens, first + step)});
        }
    }
    const auto reach = [&](const Tile& tile) {
        return batch_.chunks[static_cast<std::size_t>(tile.chunk)].start + tile.last_token;
    };
    std::stable_sort(tiles_.begin(), tiles_.end(),
                     [&](const Tile& a, const Tile& b) { return reach(a) > reach(b); });
}

template <typename Run>
void DecoderKernels::split_rows(std::int64_t rows, std::int64_t row_elements,
                                const Run& run) const {
    if (rows * row_elements < min_parallel_elements || rows < 2) {
        run(0, rows);
        return;
    }
    const std::int64_t step =
        std::max<std::int64_t>(1, std::min(rows / team_.num_threads(),
                                           min_parallel_elements / row_elements));
    const std::int64_t pieces = (rows + step - 1) / step;
    team_.run(pieces, [&](std::int64_t piece, int) {
        run(piece * step, std::min(rows, (piece + 1) * step));
    });
}

void DecoderKernels::rms_norm(const NormArgs& args, std::int64_t rows) const {
    split_rows(rows, args.size, [&](std::int64_t first, std::int64_t last) {
        kernels_.rms_norm(args, first, last);
    });
}

void DecoderKernels::silu_mul(const void* gate_up, void* out, std::int64_t rows,
                              std::int64_t size) const {
    split_rows(rows, 4 * size, [&](std::int64_t first, std::int64_t last) {
        kernels_.silu_mul(gate_up, out, size, first, last);
    });
}

void DecoderKernels::rotate_store(std::int32_t layer, void* qkv, const void* q_weight,
                                  const void* k_weight, float epsilon) const {
    const StoreArgs args{shape_.pool, layer,   shape_.num_heads,        qkv,
                         q_weight,    k_weight, epsilon,                batch_.positions.data(),
                         batch_.slots.data(),   cosine_,                sine_};
    const auto tokens = static_cast<std::int64_t>(batch_.positions.size());
    const std::int64_t heads = shape_.num_heads + 2 * shape_.pool.num_kv_heads;
    split_rows(tokens, heads * shape_.pool.head_dim, [&](std::int64_t first, std::int64_t last) {
        kernels_.rotate_store(args, first, last);
    });
}

void DecoderKernels::list_parts(std::int32_t window) {
    if (window == parts_window_) {
        return;
    }
    parts_.clear();
    for (std::int64_t token = 0; token < batch_.num_paged; ++token) {
        const std::int32_t last = batch_.positions[static_cast<std::size_t>(token)] + 1;
        const std::int32_t first = window > 0 ? std::max(0, last - window) : 0;
        const std::int32_t first_part = first / part_positions;
        const std::int32_t end_part = (last - 1) / part_positions + 1;
        for (std::int32_t part = first_part; part < end_part; ++part) {
            parts_.push_back({token, std::max(first, part * part_positions),
                              std::min(last, (part + 1) * part_positions),
                              static_cast<std::int64_t>(parts_.size()),
                              part == first_part ? end_part - first_part : 0});
        }
    }
    parts_window_ = window;
}

void DecoderKernels::attend(std::int32_t layer, const void* qkv, void* out, std::int32_t window,
                            float scale) {
    if (batch_.num_paged > 0) {
        attend_singles(layer, qkv, out, window, scale);
    }
    if (!tiles_.empty()) {
        attend_chunks(layer, qkv, out, window, scale);
    }
}

void DecoderKernels::attend_chunks(std::int32_t layer, const void* qkv, void* out,
                                   std::int32_t window, float scale) {
    const PoolView& pool = shape_.pool;
    const std::size_t head_bytes =
        static_cast<std::size_t>(pool.head_dim) * element_bytes(shape_.element);
    const std::size_t q_bytes = static_cast<std::size_t>(shape_.num_heads) * head_bytes;
    const std::size_t row_bytes =
        q_bytes + 2 * static_cast<std::size_t>(pool.num_kv_heads) * head_bytes;
    const std::int64_t heads = pool.num_kv_heads;
    team_.run(static_cast<std::int64_t>(tiles_.size()) * heads, [&](std::int64_t item, int thread) {
        const Tile& tile = tiles_[static_cast<std::size_t>(item / heads)];
        const Chunk& chunk = batch_.chunks[static_cast<std::size_t>(tile.chunk)];
        const auto token = static_cast<std::size_t>(chunk.first_token);
        const ChunkArgs args{
            pool,
            layer,
            shape_.num_heads,
            static_cast<const std::byte*>(qkv) + token * row_bytes,
            static_cast<std::byte*>(out) + token * q_bytes,
            batch_.tables.data() + (batch_.num_paged + tile.chunk) * batch_.table_width,
            chunk.start,
            tile.first_token,
            tile.last_token,
            static_cast<std::int32_t>(item % heads),
            window,
            scale};
        kernels_.attend_tile(args,
                             scratch_.data() + static_cast<std::size_t>(thread) * scratch_floats_);
    });
}

void DecoderKernels::attend_singles(std::int32_t layer, const void* qkv, void* out,
                                    std::int32_t window, float scale) {
    list_parts(window);
    const PoolView& pool = shape_.pool;
    const std::size_t head_bytes =
        static_cast<std::size_t>(pool.head_dim) * element_bytes(shape_.element);
    const std::size_t q_bytes = static_cast<std::size_t>(shape_.num_heads) * head_bytes;
    const std::size_t row_bytes =
        q_bytes + 2 * static_cast<std::size_t>(pool.num_kv_heads) * head_bytes;
    const std::size_t floats = part_floats(shape_.num_heads, pool.head_dim);
    results_.resize(std::max(results_.size(), parts_.size() * floats));

    const auto attend_one = [&](std::int64_t item, int thread) {
        const Part& part = parts_[static_cast<std::size_t>(item)];
        const AttendArgs args{
            pool,
            layer,
            shape_.num_heads,
            static_cast<const std::byte*>(qkv) + static_cast<std::size_t>(part.token) * row_bytes,
            batch_.tables.data() + part.token * batch_.table_width,
            part.first,
            part.last,
            scale};
        kernels_.attend_part(args, results_.data() + static_cast<std::size_t>(item) * floats,
                             scratch_.data() + static_cast<std::size_t>(thread) * scratch_floats_);
    };
    std::int64_t positions = 0;
    for (const Part& part : parts_) {
        positions += part.last - part.first;
    }
    const auto num_parts = static_cast<std::int64_t>(parts_.size());
    if (positions * shape_.num_heads * pool.head_dim < min_parallel_elements) {
        for (std::int64_t item = 0; item < num_parts; ++item) {
            attend_one(item, 0);
        }
    } else {
        team_.run(num_parts, attend_one);
    }
    for (const Part& part : parts_) {
        if (part.num_parts > 0) {
            kernels_.join_parts(
                results_.data() + static_cast<std::size_t>(part.index) * floats, part.num_parts,
                shape_.num_heads, pool.head_dim,
                static_cast<std::byte*>(out) + static_cast<std::size_t>(part.token) * q_bytes);
        }
    }
}

}  // namespace flowpath::cpu
