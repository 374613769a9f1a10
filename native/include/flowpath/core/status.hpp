// Outcomes of the native core. Nothing below the binding layer throws on bad input: a function
// returns an Outcome, and the binding layer turns it into a Python exception that names the item.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowpath {

enum class Status : std::uint8_t {
    ok,
    no_room,            // fewer free blocks than asked for: a normal answer, not an error
    not_positive,       // a count, length or size that must be at least 1 is not
    out_of_range,       // a run or block lies outside of the pool or buffer
    already_free,       // a freed run covers blocks that are free already
    given_twice,        // a block appears twice in one call where it may appear once
    tail_not_owned,     // the block before a growth point is free, so no request ends there
    different_lengths,  // two lists that must be of equal length are not
};

// A status and, where one item of the input is at fault, its position there.
struct Outcome {
    Status status = Status::ok;
    std::size_t item = 0;

    [[nodiscard]] constexpr bool is_ok() const noexcept { return status == Status::ok; }
};

// What is wrong, as the second half of a sentence that names the item.
[[nodiscard]] constexpr const char* describe(Status status) noexcept {
    switch (status) {
        case Status::ok: return "is valid";
        case Status::no_room: return "does not fit into the free blocks";
        case Status::not_positive: return "must be at least 1";
        case Status::out_of_range: return "is out of range";
        case Status::already_free: return "covers blocks that are already free";
        case Status::given_twice: return "covers blocks that were given before in the same call";
        case Status::tail_not_owned: return "does not follow an allocated block";
        case Status::different_lengths: return "differs in length from its partner";
    }
    return "is invalid";
}

}  // namespace flowpath
