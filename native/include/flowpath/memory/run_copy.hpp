// Carries out a plan of contiguous copies between two pools in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flowpath/core/runs.hpp"
#include "flowpath/core/status.hpp"

namespace flowpath {

// Examines every run against both pools before a byte moves; `Outcome::item` names the run at
// fault. A last part of a pool that is shorter than a block belongs to no block.
[[nodiscard]] Outcome validate_copy(std::size_t dst_bytes, std::size_t src_bytes,
                                    std::span<const CopyRun> runs,
                                    std::size_t block_bytes) noexcept;

// Copies validated runs in order; returns the bytes copied. One run's source and target may
// overlap; blocks that one run writes and a later run reads are read as written.
std::size_t copy_runs(std::span<std::byte> dst, std::span<const std::byte> src,
                      std::span<const CopyRun> runs, std::size_t block_bytes) noexcept;

// The same, and writes the checksum of each source block, in the order of the runs, to `sums` (one
// for each block of the runs). The bytes are read from memory once. A run's source and target must
// not overlap.
std::size_t copy_runs_checksummed(std::span<std::byte> dst, std::span<const std::byte> src,
                                  std::span<const CopyRun> runs, std::size_t block_bytes,
                                  std::span<std::uint64_t> sums) noexcept;

// Copies as many bytes as both have past the caches, where this machine can store to `dst` that way,
// and does nothing else: what memory gives a copy at best. They must not overlap.
void copy_streamed(std::span<std::byte> dst, std::span<const std::byte> src) noexcept;

// The checksum of each block of `ids`, which the caller has bounds-checked.
void checksum_blocks(std::span<const std::byte> pool, std::span<const std::int32_t> ids,
                     std::size_t block_bytes, std::span<std::uint64_t> sums) noexcept;

}  // namespace flowpath
