#include "flowpath/storage/sealed_file.hpp"

#include <cstring>

#include "flowpath/core/runs.hpp"
#include "flowpath/memory/checksum.hpp"
#include "flowpath/memory/run_copy.hpp"

namespace flowpath {

namespace {

std::uint64_t word_at(std::span<const std::byte, page_bytes> header, std::size_t offset) noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, header.data() + offset, sizeof word);
    return word;
}

}  // namespace

void seal_into(std::span<std::byte> file, std::span<const std::byte> head,
               std::span<const std::byte> payload) noexcept {
    std::memset(file.data(), 0, page_bytes);
    std::memcpy(file.data(), head.data(), head.size());
    const CopyRun whole{0, 0, 1};
    std::uint64_t payload_sum = 0;
    copy_runs_checksummed(file.subspan(page_bytes), payload, {&whole, 1}, payload.size(),
                          {&payload_sum, 1});
    std::memcpy(file.data() + payload_sum_offset, &payload_sum, sizeof payload_sum);
    const std::uint64_t header_sum = checksum(file.first(header_sum_offset));
    std::memcpy(file.data() + header_sum_offset, &header_sum, sizeof header_sum);
}

BlockOutcome verify_seal(std::span<const std::byte, page_bytes> header,
                         std::span<const std::byte> payload) noexcept {
    // The header first: a file that is none of ours costs no hash of its payload.
    const bool is_whole =
        word_at(header, header_sum_offset) == checksum(header.first<header_sum_offset>()) &&
        word_at(header, payload_sum_offset) == checksum(payload);
    return is_whole ? block_ok : block_damaged;
}

}  // namespace flowpath
