// The block checksum: one 64-bit function over a block's bytes, the same on every machine, tier and
// backend. It guards against wrong, stale and damaged blocks, not against an adversary.
//
// Definition, all arithmetic modulo 2^64:
//
//   mix(h): h = (h XOR (h >> 30)) * 0xBF58476D1CE4E5B9
//           h = (h XOR (h >> 27)) * 0x94D049BB133111EB
//           h XOR (h >> 31)
//   pad the n bytes with zeros to whole 8-byte little-endian words w[0] .. w[m-1]
//   key(i)  = mix((i mod 64 + 1) * 0x9E3779B97F4A7C15) + (i div 64) * 0x9E3779B97F4A7C15
//   x       = w[i] XOR key(i);  lo = x mod 2^32;  hi = x div 2^32
//   term(i) = lo * hi + x
//   sum     = term(0) + ... + term(m-1)
//   result  = mix(sum + n * 0xD6E8FEB86659FD93)
//
// The sum may be taken in any order and in any number of parts, so threads of a GPU and lanes of a
// vector add up what they like; a thread that strides by a multiple of 64 words mixes one key, once.
// `mix` is a bijection.
//
// What it detects: term = (lo + 2^32) * (hi + 1) - 2^32, and neither factor is ever zero modulo
// 2^64, so any change within one aligned 4-byte half of a word changes the result for certain (all
// single-bit flips are among these). Because of the keys, words that change places change the
// result as well. Unrelated changes of many words go unseen with a probability of about 2^-64; the
// worst structured case, one bit flipped in each of two words, with about 2^-32. The mixed part of
// the keys matters: with keys that are linear in i, flipped bits in words i and 2i + 1 of a constant
// block can cancel out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace flowpath {

// One row of words: the keys of a row differ from those of the first row by one added number.
inline constexpr std::size_t checksum_row_bytes = 512;

// The sum of the terms of `bytes`, a piece of a message that begins at its row `first_row`. A last
// part of fewer than 8 bytes is padded, so only the last piece of a message may have one. Uses
// AVX-512 or AVX2 where the machine has them.
[[nodiscard]] std::uint64_t checksum_sum(std::span<const std::byte> bytes,
                                         std::uint64_t first_row) noexcept;

// The sum of the terms of whole words, a piece of a message that begins at its word `first_word`.
[[nodiscard]] std::uint64_t checksum_words(std::span<const std::byte> words,
                                           std::uint64_t first_word) noexcept;

// Whether this machine can copy to `to` with stores that pass the caches by.
[[nodiscard]] bool can_stream_to(const std::byte* to) noexcept;

// The same sum over whole rows, and a copy of them to `to`, for which `can_stream_to` holds, past
// the caches: nothing is read of the target's memory, and what the caches held stays there. The
// copy is visible to every thread on return.
[[nodiscard]] std::uint64_t checksum_sum_streamed(std::byte* to, std::span<const std::byte> rows,
                                                  std::uint64_t first_row) noexcept;

// The part after the sum, for a message of `num_bytes` bytes.
[[nodiscard]] std::uint64_t checksum_finish(std::uint64_t sum, std::uint64_t num_bytes) noexcept;

// The whole function.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;

// The kernels that this machine can run, the fastest first; all give the same value.
[[nodiscard]] std::vector<std::string_view> checksum_kernels();

// The whole function by the kernel of that name; empty when this machine has none of that name.
[[nodiscard]] std::optional<std::uint64_t> checksum_with(std::string_view kernel,
                                                         std::span<const std::byte> bytes) noexcept;

}  // namespace flowpath
