#include "flowpath/memory/alignment.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

namespace flowpath {

namespace {

// A piece of consecutive pairs, ordered by one 64-bit key.
struct Piece {
    std::uint64_t key;
    std::int32_t length;
    std::uint32_t item;  // position of its first pair in the input
};

constexpr std::size_t radix_from = 256;  // below this std::sort is the faster one

// Sorts by key: least significant byte first, skipping bytes that are equal in all keys. Block
// ids rarely fill 32 bits, so about half of the passes fall away.
void sort_by_key(std::vector<Piece>& pieces, std::vector<Piece>& scratch) {
    if (pieces.size() < radix_from) {
        std::sort(pieces.begin(), pieces.end(),
                  [](const Piece& a, const Piece& b) { return a.key < b.key; });
        return;
    }
    constexpr std::size_t num_digits = 8;
    std::array<std::array<std::uint32_t, 256>, num_digits> counts{};
    for (const Piece& piece : pieces) {
        for (std::size_t digit = 0; digit < num_digits; ++digit) {
            ++counts[digit][(piece.key >> (8 * digit)) & 0xFF];
        }
    }
    scratch.resize(pieces.size());
    for (std::size_t digit = 0; digit < num_digits; ++digit) {
        auto& count = counts[digit];
        const unsigned shift = static_cast<unsigned>(8 * digit);
        if (count[(pieces.front().key >> shift) & 0xFF] == pieces.size()) {
            continue;
        }
        std::uint32_t position = 0;
        for (auto& slot : count) {
            const std::uint32_t size = slot;
            slot = position;
            position += size;
        }
        for (const Piece& piece : pieces) {
            scratch[count[(piece.key >> shift) & 0xFF]++] = piece;
        }
        pieces.swap(scratch);
    }
}

std::uint64_t high_half(std::int64_t value) noexcept {
    return static_cast<std::uint64_t>(value) << 32;
}

void append_cut(CopyRun copy, std::int32_t max_length, std::vector<CopyRun>& out) {
    while (max_length > 0 && copy.length > max_length) {
        out.push_back({copy.src, copy.dst, max_length});
        copy.src += max_length;
        copy.dst += max_length;
        copy.length -= max_length;
    }
    out.push_back(copy);
}

}  // namespace

Outcome align(std::span<const std::int32_t> src, std::span<const std::int32_t> dst,
              std::int32_t max_length, std::vector<CopyRun>& out) {
    const std::size_t count = src.size();
    if (dst.size() != count) {
        return {Status::different_lengths};
    }
    // Pairs that are consecutive in logical order join before the sort: the usual input is a few
    // long runs, and the sort then has next to nothing to do.
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < count; ++i) {
        if (src[i] < 0 || dst[i] < 0) {
            return {Status::out_of_range, i};
        }
        if (i > 0 && std::int64_t{src[i]} == std::int64_t{src[i - 1]} + 1 &&
            std::int64_t{dst[i]} == std::int64_t{dst[i - 1]} + 1) {
            ++pieces.back().length;
        } else {
            pieces.push_back({high_half(dst[i]), 1, static_cast<std::uint32_t>(i)});
        }
    }
    std::vector<Piece> scratch;
    if (pieces.size() > 1) {
        sort_by_key(pieces, scratch);
        for (std::size_t i = 1; i < pieces.size(); ++i) {
            const std::int64_t previous_end =
                std::int64_t{dst[pieces[i - 1].item]} + pieces[i - 1].length;
            if (dst[pieces[i].item] < previous_end) {
                return {Status::given_twice, pieces[i].item};
            }
        }
        for (Piece& piece : pieces) {
            const std::int64_t shift = std::int64_t{dst[piece.item]} - src[piece.item];
            // The bias makes the signed shift sort as an unsigned number.
            piece.key = high_half(shift + INT32_MAX) | static_cast<std::uint32_t>(src[piece.item]);
        }
        sort_by_key(pieces, scratch);
    }
    CopyRun open{0, 0, 0};
    for (const Piece& piece : pieces) {
        const std::int32_t from = src[piece.item];
        const std::int32_t to = dst[piece.item];
        const std::int64_t open_end = std::int64_t{open.src} + open.length;
        if (open.length > 0 && from == open_end && to - from == open.dst - open.src) {
            open.length += piece.length;
            continue;
        }
        if (open.length > 0) {
            append_cut(open, max_length, out);
        }
        open = {from, to, piece.length};
    }
    if (open.length > 0) {
        append_cut(open, max_length, out);
    }
    return {};
}

}  // namespace flowpath
