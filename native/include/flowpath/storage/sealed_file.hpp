// The file of one stored block, as far as reading and writing it concern this layer:
//
//   offset 0        header, one page: whatever its owner puts there, and at its end two words
//            4080     checksum of the payload
//            4088     checksum of the header's first 4088 bytes
//   offset 4096     payload: a whole number of pages
//
// The header has a page of its own so that direct I/O moves the payload from and to memory that is
// aligned to pages, without a copy. What the header says beyond its two words is for the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace flowpath {

inline constexpr std::size_t page_bytes = 4096;
inline constexpr std::size_t payload_sum_offset = page_bytes - 16;
inline constexpr std::size_t header_sum_offset = page_bytes - 8;

// How a block fared: 0, a positive errno, or one of these.
enum BlockOutcome : std::int32_t {
    block_ok = 0,
    block_truncated = -1,  // the file is shorter than header and payload
    block_damaged = -2,    // a checksum does not fit
};

// Fills `file` (a page and the payload's bytes): `head` and zeros, both words, the payload.
void seal_into(std::span<std::byte> file, std::span<const std::byte> head,
               std::span<const std::byte> payload) noexcept;

// block_ok, or block_damaged where header or payload differ from what was sealed.
[[nodiscard]] BlockOutcome verify_seal(std::span<const std::byte, page_bytes> header,
                                       std::span<const std::byte> payload) noexcept;

}  // namespace flowpath
