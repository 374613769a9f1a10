// Copies parts of KV blocks between pools whose blocks differ in width, and sums what it writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flowpath/core/status.hpp"

namespace flowpath {

// `count` pieces of `num_bytes` bytes, in every block: piece i lies at src_offset + i * src_stride
// of the source's block and goes to dst_offset + i * dst_stride of the target's. All numbers of
// bytes are multiples of 8: pieces are whole words of the target's checksum.
struct Pieces {
    std::int64_t src_offset;
    std::int64_t dst_offset;
    std::int64_t num_bytes;
    std::int64_t count;
    std::int64_t src_stride;
    std::int64_t dst_stride;
};

// Behind the pieces: num_bytes bytes to copy, then num_zeros zeros to write.
struct Rest {
    std::int64_t src_offset;
    std::int64_t dst_offset;
    std::int64_t num_bytes;
    std::int64_t num_zeros;
};

struct PieceCopy {
    Pieces pieces;
    Rest rest;
    std::size_t src_block_bytes;
    std::size_t dst_block_bytes;
};

// Whether all it reads and writes lies inside of a block, in whole words.
[[nodiscard]] bool is_inside(const PieceCopy& copy) noexcept;

// Carries the copy out for block src_ids[i] of `src` and dst_ids[i] of `dst`, for all i, and writes
// to sums[i] the sum of the terms (see checksum.hpp) of what it wrote, where it lies in the target's
// block. The parts that several copies write into one block add up to the block's sum. The copy is
// inside, the caller has bounds-checked the ids, and the pools do not overlap.
void copy_pieces(std::span<std::byte> dst, std::span<const std::byte> src,
                 std::span<const std::int32_t> dst_ids, std::span<const std::int32_t> src_ids,
                 const PieceCopy& copy, std::span<std::uint64_t> sums) noexcept;

}  // namespace flowpath
