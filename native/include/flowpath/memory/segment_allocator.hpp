// Hands out runs of adjacent blocks (segments) of one pool, as few and as long as it can, because
// the number of runs is the number of calls that a KV transfer needs.
//
// Free memory is kept twice: by start (neighbours, coalescing) and by (length, start) (best fit).
// Every operation is O(log segments) for each run that it touches.
//
// Not thread-safe: its one owner serialises calls (from Python, the GIL does).
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "flowpath/core/runs.hpp"
#include "flowpath/core/status.hpp"

namespace flowpath {

class SegmentAllocator {
public:
    // A pool of `num_blocks` (1 to max_pool_blocks) free blocks. `min_remainder` (0 or more) is the
    // shortest piece worth leaving behind: best fit prefers a segment that leaves nothing or at
    // least that much, and falls back to the plain best fit. Nothing is rounded up.
    SegmentAllocator(Blocks num_blocks, Blocks min_remainder);

    // Takes `count` blocks, all or nothing; appends the runs to `out` in logical order.
    // Best fit when one segment can hold what is left to place, else the largest segment whole
    // and on with the rest; the lowest start wins a tie.
    [[nodiscard]] Outcome allocate(Blocks count, std::vector<Run>& out);

    // The same for a request whose last block is `tail - 1`: takes what it can in place at `tail`
    // first, so that the first run returned continues the request's last one.
    [[nodiscard]] Outcome grow(Blocks count, Blocks tail, std::vector<Run>& out);

    // Takes room that mirrors the sender's run lengths: one best-fit segment for the total, else
    // whole runs, the longest placed first. `out` is in the order of `lengths`, with runs joined
    // where neighbours happen to be adjacent. Aligning it with k sender runs needs at most
    // k + out.size() - 1 copies. `Outcome::item` names the length at fault.
    [[nodiscard]] Outcome allocate_like(std::span<const Blocks> lengths, std::vector<Run>& out);

    // Gives runs back and joins them with free neighbours. Runs need not be those that were handed
    // out: any allocated blocks will do. All runs are examined first: an error changes nothing,
    // and `Outcome::item` names the run at fault.
    [[nodiscard]] Outcome release(std::span<const Run> runs);

    [[nodiscard]] Blocks num_blocks() const noexcept { return num_blocks_; }
    [[nodiscard]] Blocks min_remainder() const noexcept { return min_remainder_; }
    [[nodiscard]] Blocks num_free() const noexcept { return num_free_; }
    [[nodiscard]] std::size_t num_segments() const noexcept { return by_start_.size(); }
    [[nodiscard]] Blocks largest_free() const noexcept;
    // 1 - largest free run / free blocks; 0 when nothing is free.
    [[nodiscard]] double fragmentation() const noexcept;
    // Whether the whole run lies in the pool and is free.
    [[nodiscard]] bool is_free(Run run) const;
    [[nodiscard]] std::vector<Run> free_segments() const;

    // Names the first broken invariant, or is empty: both views hold the same segments; segments
    // are inside of the pool, neither overlap nor touch, and add up to num_free.
    [[nodiscard]] std::string check() const;

private:
    using ByStart = std::map<Blocks, Blocks>;
    using BySize = std::set<std::pair<Blocks, Blocks>>;

    // Best fit under the remainder rule, or end() when no segment holds `count`.
    [[nodiscard]] BySize::iterator best_fit(Blocks count) const;
    // Takes the first `count` blocks of the free segment that begins at `start`.
    Run take_prefix(Blocks start, Blocks count);
    // Places `count` blocks, which the caller knows to be free.
    void place(Blocks count, std::vector<Run>& out);
    void insert_free(Run run);

    Blocks num_blocks_;
    Blocks min_remainder_;
    Blocks num_free_;
    ByStart by_start_;
    BySize by_size_;
};

}  // namespace flowpath
