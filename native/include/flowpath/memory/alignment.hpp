// Plans a transfer: pairs of (source block, target block) become the fewest contiguous copies.
//
// With block-major memory one contiguous copy covers exactly the pairs (a, b), (a+1, b+1), ... .
// Each pair has at most one such predecessor, so the pairs form disjoint chains, and one copy per
// chain is the optimum. Sorting by (dst - src, src) lays every chain out in one piece.
#pragma once

#include <span>
#include <vector>

#include "flowpath/core/runs.hpp"
#include "flowpath/core/status.hpp"

namespace flowpath {

// Appends the copies for src[i] -> dst[i] to `out`, sorted by (dst - src, src).
// A source may repeat (a shared prefix copied twice); a repeated target is `given_twice`, a
// negative id `out_of_range`; `Outcome::item` is then a position in the lists. `max_length` cuts
// copies to that many blocks; 0 means no limit.
[[nodiscard]] Outcome align(std::span<const std::int32_t> src, std::span<const std::int32_t> dst,
                            std::int32_t max_length, std::vector<CopyRun>& out);

}  // namespace flowpath
