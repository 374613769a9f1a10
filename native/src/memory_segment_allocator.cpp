#include "flowpath/memory/segment_allocator.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace flowpath {

namespace {

// Appends a run, joined with the one before where they are adjacent.
void append_joined(std::vector<Run>& out, Run run) {
    if (!out.empty() && out.back().end() == run.start) {
        out.back().length += run.length;
    } else {
        out.push_back(run);
    }
}

}  // namespace

SegmentAllocator::SegmentAllocator(Blocks num_blocks, Blocks min_remainder)
    : num_blocks_(num_blocks), min_remainder_(min_remainder), num_free_(0) {
    insert_free({0, num_blocks});
    num_free_ = num_blocks;
}

SegmentAllocator::BySize::iterator SegmentAllocator::best_fit(Blocks count) const {
    const auto tightest = by_size_.lower_bound({count, 0});
    if (tightest == by_size_.end() || tightest->first == count) {
        return tightest;
    }
    const auto roomy = by_size_.lower_bound({count + min_remainder_, 0});
    return roomy == by_size_.end() ? tightest : roomy;
}

Run SegmentAllocator::take_prefix(Blocks start, Blocks count) {
    const auto segment = by_start_.find(start);
    const Blocks length = segment->second;
    by_size_.erase({length, start});
    by_start_.erase(segment);
    if (length > count) {
        by_start_.emplace(start + count, length - count);
        by_size_.emplace(length - count, start + count);
    }
    num_free_ -= count;
    return {start, count};
}

void SegmentAllocator::place(Blocks count, std::vector<Run>& out) {
    while (count > 0) {
        auto segment = best_fit(count);
        if (segment == by_size_.end()) {
            segment = by_size_.lower_bound({largest_free(), 0});
        }
        const Run taken = take_prefix(segment->second, std::min(segment->first, count));
        append_joined(out, taken);
        count -= taken.length;
    }
}

Outcome SegmentAllocator::allocate(Blocks count, std::vector<Run>& out) {
    if (count < 1) {
        return {Status::not_positive};
    }
    if (count > num_free_) {
        return {Status::no_room};
    }
    place(count, out);
    return {};
}

Outcome SegmentAllocator::grow(Blocks count, Blocks tail, std::vector<Run>& out) {
    if (count < 1) {
        return {Status::not_positive};
    }
    if (tail < 1 || tail > num_blocks_) {
        return {Status::out_of_range};
    }
    if (is_free({tail - 1, 1})) {
        return {Status::tail_not_owned};
    }
    if (count > num_free_) {
        return {Status::no_room};
    }
    if (const auto segment = by_start_.find(tail); segment != by_start_.end()) {
        const Run taken = take_prefix(tail, std::min(segment->second, count));
        out.push_back(taken);
        count -= taken.length;
    }
    place(count, out);
    return {};
}

Outcome SegmentAllocator::allocate_like(std::span<const Blocks> lengths, std::vector<Run>& out) {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] < 1) {
            return {Status::not_positive, i};
        }
    }
    Blocks total = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] > num_free_ - total) {
            return {Status::no_room, i};
        }
        total += lengths[i];
    }
    if (total == 0) {
        return {};
    }
    if (best_fit(total) != by_size_.end()) {
        place(total, out);
        return {};
    }
    std::vector<std::size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
    std::vector<std::vector<Run>> placed(lengths.size());
    for (const std::size_t i : order) {
        place(lengths[i], placed[i]);
    }
    for (const auto& runs : placed) {
        for (const Run run : runs) {
            append_joined(out, run);
        }
    }
    return {};
}

Outcome SegmentAllocator::release(std::span<const Run> runs) {
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const Run run = runs[i];
        if (run.length < 1) {
            return {Status::not_positive, i};
        }
        if (run.start < 0 || run.start >= num_blocks_ || run.length > num_blocks_ - run.start) {
            return {Status::out_of_range, i};
        }
        // The last segment that starts before the run's end is the only one that can reach into it.
        const auto after = by_start_.lower_bound(run.end());
        if (after != by_start_.begin()) {
            const auto before = std::prev(after);
            if (before->first + before->second > run.start) {
                return {Status::already_free, i};
            }
        }
    }
    std::vector<std::size_t> order(runs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return std::pair(runs[a].start, a) < std::pair(runs[b].start, b);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
        if (runs[order[i]].start < runs[order[i - 1]].end()) {
            return {Status::given_twice, order[i]};
        }
    }
    for (const Run run : runs) {
        insert_free(run);
        num_free_ += run.length;
    }
    return {};
}

void SegmentAllocator::insert_free(Run run) {
    auto right = by_start_.lower_bound(run.start);
    if (right != by_start_.begin()) {
        const auto left = std::prev(right);
        if (left->first + left->second == run.start) {
            run = {left->first, left->second + run.length};
            by_size_.erase({left->second, left->first});
            by_start_.erase(left);
        }
    }
    if (right != by_start_.end() && right->first == run.end()) {
        run.length += right->second;
        by_size_.erase({right->second, right->first});
        by_start_.erase(right);
    }
    by_start_.emplace(run.start, run.length);
    by_size_.emplace(run.length, run.start);
}

Blocks SegmentAllocator::largest_free() const noexcept {
    return by_size_.empty() ? 0 : by_size_.rbegin()->first;
}

double SegmentAllocator::fragmentation() const noexcept {
    if (num_free_ == 0) {
        return 0.0;
    }
    return 1.0 - static_cast<double>(largest_free()) / static_cast<double>(num_free_);
}

bool SegmentAllocator::is_free(Run run) const {
    if (run.length < 1 || run.start < 0) {
        return false;
    }
    const auto after = by_start_.upper_bound(run.start);
    if (after == by_start_.begin()) {
        return false;
    }
    const auto segment = std::prev(after);
    return run.length <= segment->first + segment->second - run.start;
}

std::vector<Run> SegmentAllocator::free_segments() const {
    std::vector<Run> segments;
    segments.reserve(by_start_.size());
    for (const auto& [start, length] : by_start_) {
        segments.push_back({start, length});
    }
    return segments;
}

std::string SegmentAllocator::check() const {
    const auto named = [](Blocks start, Blocks length) {
        return "segment (start=" + std::to_string(start) + ", length=" + std::to_string(length) + ")";
    };
    if (by_start_.size() != by_size_.size()) {
        return std::to_string(by_start_.size()) + " segments by start, " +
               std::to_string(by_size_.size()) + " by size";
    }
    Blocks sum = 0;
    Blocks previous_end = -1;
    for (const auto& [start, length] : by_start_) {
        if (length < 1 || start < 0 || start + length > num_blocks_) {
            return named(start, length) + " is not inside of the pool";
        }
        if (start <= previous_end) {
            return named(start, length) + " overlaps or touches the segment before it";
        }
        if (!by_size_.contains({length, start})) {
            return named(start, length) + " is missing by size";
        }
        previous_end = start + length;
        sum += length;
    }
    if (sum != num_free_) {
        return std::to_string(sum) + " blocks in segments, " + std::to_string(num_free_) +
               " counted free";
    }
    return {};
}

}  // namespace flowpath
