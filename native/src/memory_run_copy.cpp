#include "flowpath/memory/run_copy.hpp"

#include <algorithm>
#include <cstring>

#include "flowpath/memory/checksum.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flowpath {

namespace {

// Small enough to stay in the first-level cache between the hash and the copy of a piece, and a
// whole number of checksum rows.
constexpr std::size_t piece_bytes = 32 * checksum_row_bytes;

// From here on a copy would push out of the second-level cache what it holds, and find nothing of
// its target there: writing past the caches takes less than half the time of writing through them.
constexpr std::size_t min_streamed_bytes = 1024 * 1024;

std::span<const std::byte> block_of(std::span<const std::byte> pool, std::int32_t id,
                                    std::size_t block_bytes) noexcept {
    return pool.subspan(static_cast<std::size_t>(id) * block_bytes, block_bytes);
}

std::uint64_t copy_block_checksummed(std::byte* to, std::span<const std::byte> block) noexcept {
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < block.size(); at += piece_bytes) {
        const auto piece = block.subspan(at, std::min(piece_bytes, block.size() - at));
        sum += checksum_sum(piece, at / checksum_row_bytes);
        std::memcpy(to + at, piece.data(), piece.size());
    }
    return checksum_finish(sum, block.size());
}

// The same past the caches.
std::uint64_t copy_block_streamed(std::byte* to, std::span<const std::byte> block) noexcept {
    const std::size_t num_rows = block.size() / checksum_row_bytes;
    const std::size_t in_rows = num_rows * checksum_row_bytes;
    std::uint64_t sum = checksum_sum_streamed(to, block.first(in_rows), 0);
    if (const auto rest = block.subspan(in_rows); !rest.empty()) {
        sum += checksum_sum(rest, num_rows);
        std::memcpy(to + in_rows, rest.data(), rest.size());
    }
    return checksum_finish(sum, block.size());
}

#if defined(__x86_64__)

// Returns the bytes copied: all but a last part of less than a cache line.
__attribute__((target("avx2"))) std::size_t stream_lines(std::byte* to, const std::byte* from,
                                                         std::size_t num_bytes) noexcept {
    const std::size_t in_lines = num_bytes / 64 * 64;
    for (std::size_t at = 0; at < in_lines; at += 64) {
        const auto* const line = reinterpret_cast<const __m256i*>(from + at);
        auto* const into = reinterpret_cast<__m256i*>(to + at);
        const __m256i first = _mm256_loadu_si256(line);
        const __m256i second = _mm256_loadu_si256(line + 1);
        _mm256_stream_si256(into, first);
        _mm256_stream_si256(into + 1, second);
    }
    _mm_sfence();
    return in_lines;
}

#endif

std::size_t bytes_of(std::span<const CopyRun> runs, std::size_t block_bytes) noexcept {
    std::size_t num_blocks = 0;
    for (const CopyRun run : runs) {
        num_blocks += static_cast<std::size_t>(run.length);
    }
    return num_blocks * block_bytes;
}

}  // namespace

Outcome validate_copy(std::size_t dst_bytes, std::size_t src_bytes, std::span<const CopyRun> runs,
                      std::size_t block_bytes) noexcept {
    const auto dst_blocks = static_cast<std::int64_t>(dst_bytes / block_bytes);
    const auto src_blocks = static_cast<std::int64_t>(src_bytes / block_bytes);
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const CopyRun run = runs[i];
        if (run.length < 1) {
            return {Status::not_positive, i};
        }
        if (run.src < 0 || run.dst < 0 || std::int64_t{run.src} + run.length > src_blocks ||
            std::int64_t{run.dst} + run.length > dst_blocks) {
            return {Status::out_of_range, i};
        }
    }
    return {};
}

std::size_t copy_runs(std::span<std::byte> dst, std::span<const std::byte> src,
                      std::span<const CopyRun> runs, std::size_t block_bytes) noexcept {
    std::size_t copied = 0;
    for (const CopyRun run : runs) {
        const std::size_t bytes = static_cast<std::size_t>(run.length) * block_bytes;
        std::memmove(dst.data() + static_cast<std::size_t>(run.dst) * block_bytes,
                     src.data() + static_cast<std::size_t>(run.src) * block_bytes, bytes);
        copied += bytes;
    }
    return copied;
}

std::size_t copy_runs_checksummed(std::span<std::byte> dst, std::span<const std::byte> src,
                                  std::span<const CopyRun> runs, std::size_t block_bytes,
                                  std::span<std::uint64_t> sums) noexcept {
    const std::size_t num_bytes = bytes_of(runs, block_bytes);
    const bool is_large = num_bytes >= min_streamed_bytes;
    std::size_t next = 0;
    for (const CopyRun run : runs) {
        for (std::int32_t i = 0; i < run.length; ++i) {
            std::byte* const to = dst.data() + static_cast<std::size_t>(run.dst + i) * block_bytes;
            const auto block = block_of(src, run.src + i, block_bytes);
            sums[next++] = is_large && can_stream_to(to) ? copy_block_streamed(to, block)
                                                         : copy_block_checksummed(to, block);
        }
    }
    return num_bytes;
}

void copy_streamed(std::span<std::byte> dst, std::span<const std::byte> src) noexcept {
    std::size_t copied = 0;
    const std::size_t num_bytes = std::min(dst.size(), src.size());
#if defined(__x86_64__)
    if (can_stream_to(dst.data())) {
        copied = stream_lines(dst.data(), src.data(), num_bytes);
    }
#endif
    if (copied < num_bytes) {
        std::memcpy(dst.data() + copied, src.data() + copied, num_bytes - copied);
    }
}

void checksum_blocks(std::span<const std::byte> pool, std::span<const std::int32_t> ids,
                     std::size_t block_bytes, std::span<std::uint64_t> sums) noexcept {
    for (std::size_t i = 0; i < ids.size(); ++i) {
        sums[i] = checksum(block_of(pool, ids[i], block_bytes));
    }
}

}  // namespace flowpath
