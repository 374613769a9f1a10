// Memory that direct I/O accepts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "flowpath/storage/sealed_file.hpp"

namespace flowpath {

struct FreeDeleter {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
};

using AlignedMemory = std::unique_ptr<std::byte[], FreeDeleter>;

// `num_bytes` (whole pages) aligned to pages; throws std::bad_alloc.
[[nodiscard]] inline AlignedMemory aligned_memory(std::size_t num_bytes) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(page_bytes, num_bytes));
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return AlignedMemory(memory);
}

[[nodiscard]] inline bool is_page_aligned(const std::byte* memory) noexcept {
    return reinterpret_cast<std::uintptr_t>(memory) % page_bytes == 0;
}

}  // namespace flowpath
