// The vocabulary of block memory: every quantity counts blocks unless its name says bytes.
#pragma once

#include <cstdint>

namespace flowpath {

// Pools hold fewer than 2^31 blocks, so ids fit the int32 arrays that Python passes; sums of
// lengths are kept in 64 bits.
using Blocks = std::int64_t;

inline constexpr Blocks max_pool_blocks = INT32_MAX;

// `length` adjacent blocks from block `start` on.
struct Run {
    Blocks start;
    Blocks length;

    [[nodiscard]] constexpr Blocks end() const noexcept { return start + length; }
};

// One contiguous copy of `length` blocks between two pools. Its memory is a row of an int32 (k, 3)
// array.
struct CopyRun {
    std::int32_t src;
    std::int32_t dst;
    std::int32_t length;
};

static_assert(sizeof(CopyRun) == 3 * sizeof(std::int32_t));

}  // namespace flowpath
