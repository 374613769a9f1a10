#include "flowpath/memory/piece_copy.hpp"

#include <cstring>

#include "flowpath/memory/checksum.hpp"

namespace flowpath {

namespace {

constexpr std::int64_t word_bytes = 8;

bool fits(std::int64_t offset, std::int64_t num_bytes, std::size_t block_bytes) noexcept {
    const auto size = static_cast<std::int64_t>(block_bytes);
    return offset >= 0 && num_bytes >= 0 && offset <= size && num_bytes <= size - offset &&
           offset % word_bytes == 0 && num_bytes % word_bytes == 0;
}

// The sum of what one copy writes at `offset` of a block.
std::uint64_t write(std::byte* block, std::int64_t offset, const std::byte* from,
                    std::int64_t num_bytes) noexcept {
    const auto size = static_cast<std::size_t>(num_bytes);
    std::memcpy(block + offset, from, size);
    return checksum_words({from, size}, static_cast<std::uint64_t>(offset / word_bytes));
}

}  // namespace

bool is_inside(const PieceCopy& copy) noexcept {
    const Pieces& pieces = copy.pieces;
    const Rest& rest = copy.rest;
    if (pieces.count < 1 || pieces.num_bytes < 1 || pieces.src_stride < pieces.num_bytes ||
        pieces.dst_stride < pieces.num_bytes || pieces.src_stride % word_bytes != 0 ||
        pieces.dst_stride % word_bytes != 0) {
        return false;
    }
    const auto largest = static_cast<std::int64_t>(
        copy.src_block_bytes > copy.dst_block_bytes ? copy.src_block_bytes : copy.dst_block_bytes);
    // Blocks are far smaller than 2^31 bytes, so the products below cannot overflow.
    if (largest > INT32_MAX || pieces.count > largest || pieces.src_stride > largest || pieces.dst_stride > largest) {
        return false;
    }
    const std::int64_t last = pieces.count - 1;
    return pieces.num_bytes % word_bytes == 0 &&
           fits(pieces.src_offset, last * pieces.src_stride + pieces.num_bytes,
                copy.src_block_bytes) &&
           fits(pieces.dst_offset, last * pieces.dst_stride + pieces.num_bytes,
                copy.dst_block_bytes) &&
           fits(rest.src_offset, rest.num_bytes, copy.src_block_bytes) &&
           fits(rest.dst_offset, rest.num_bytes, copy.dst_block_bytes) &&
           fits(rest.dst_offset + rest.num_bytes, rest.num_zeros, copy.dst_block_bytes);
}

void copy_pieces(std::span<std::byte> dst, std::span<const std::byte> src,
                 std::span<const std::int32_t> dst_ids, std::span<const std::int32_t> src_ids,
                 const PieceCopy& copy, std::span<std::uint64_t> sums) noexcept {
    const Pieces& pieces = copy.pieces;
    const Rest& rest = copy.rest;
    for (std::size_t i = 0; i < sums.size(); ++i) {
        const std::byte* const from =
            src.data() + static_cast<std::size_t>(src_ids[i]) * copy.src_block_bytes;
        std::byte* const to =
            dst.data() + static_cast<std::size_t>(dst_ids[i]) * copy.dst_block_bytes;
        std::uint64_t sum = 0;
        for (std::int64_t n = 0; n < pieces.count; ++n) {
            sum += write(to, pieces.dst_offset + n * pieces.dst_stride,
                         from + pieces.src_offset + n * pieces.src_stride, pieces.num_bytes);
        }
        sum += write(to, rest.dst_offset, from + rest.src_offset, rest.num_bytes);
        const std::int64_t zeros = rest.dst_offset + rest.num_bytes;
        const auto num_zeros = static_cast<std::size_t>(rest.num_zeros);
        std::memset(to + zeros, 0, num_zeros);
        sum += checksum_words({to + zeros, num_zeros},
                              static_cast<std::uint64_t>(zeros / word_bytes));
        sums[i] = sum;
    }
}

}  // namespace flowpath
