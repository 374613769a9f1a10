#include "flowpath/memory/checksum.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flowpath {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

namespace {

constexpr std::uint64_t key_step = 0x9E3779B97F4A7C15;
constexpr std::uint64_t length_step = 0xD6E8FEB86659FD93;
constexpr std::size_t row_words = checksum_row_bytes / 8;

constexpr std::uint64_t mix(std::uint64_t h) noexcept {
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB;
    return h ^ (h >> 31);
}

struct alignas(64) RowKeys {
    std::uint64_t key[row_words];
};

constexpr RowKeys first_row_keys = [] {
    RowKeys keys{};
    for (std::uint64_t i = 0; i < row_words; ++i) {
        keys.key[i] = mix((i + 1) * key_step);
    }
    return keys;
}();

// A kernel sums the terms of whole words from the begin of row `row` on.
using SumKernel = std::uint64_t (*)(const std::byte* words, std::size_t num_words,
                                    std::uint64_t row) noexcept;

std::uint64_t term(std::uint64_t word, std::uint64_t index) noexcept {
    const std::uint64_t x =
        word ^ (first_row_keys.key[index % row_words] + index / row_words * key_step);
    return (x & 0xFFFFFFFF) * (x >> 32) + x;
}

std::uint64_t sum_portable(const std::byte* words, std::size_t num_words,
                           std::uint64_t row) noexcept {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < num_words; ++i) {
        std::uint64_t word;
        std::memcpy(&word, words + 8 * i, 8);
        sum += term(word, row * row_words + i);
    }
    return sum;
}

#if defined(__x86_64__)

// Both kernels take a row in turns of four vectors with a sum each, which hides the latency of the
// multiply; the keys come from the first-level cache.

__attribute__((target("avx2"))) std::uint64_t sum_avx2(const std::byte* words,
                                                       std::size_t num_words,
                                                       std::uint64_t row) noexcept {
    __m256i sums[4] = {};
    const std::size_t num_rows = num_words / row_words;
    for (std::size_t r = 0; r < num_rows; ++r) {
        const __m256i shift = _mm256_set1_epi64x(static_cast<long long>((row + r) * key_step));
        const std::byte* const at = words + r * checksum_row_bytes;
        for (std::size_t v = 0; v < row_words / 4; ++v) {
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32 * v));
            const __m256i key = _mm256_load_si256(
                reinterpret_cast<const __m256i*>(first_row_keys.key + 4 * v));
            const __m256i x = _mm256_xor_si256(word, _mm256_add_epi64(key, shift));
            const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
            sums[v % 4] = _mm256_add_epi64(sums[v % 4], _mm256_add_epi64(product, x));
        }
    }
    alignas(32) std::uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                       _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]),
                                        _mm256_add_epi64(sums[2], sums[3])));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] +
           sum_portable(words + num_rows * checksum_row_bytes, num_words % row_words,
                        row + num_rows);
}

// Vectors of this width already write a target as fast as memory takes it.
__attribute__((target("avx2"))) std::uint64_t stream_avx2(std::byte* to, const std::byte* words,
                                                          std::size_t num_rows,
                                                          std::uint64_t row) noexcept {
    __m256i sums[4] = {};
    for (std::size_t r = 0; r < num_rows; ++r) {
        const __m256i shift = _mm256_set1_epi64x(static_cast<long long>((row + r) * key_step));
        const std::byte* const at = words + r * checksum_row_bytes;
        std::byte* const into = to + r * checksum_row_bytes;
        for (std::size_t v = 0; v < row_words / 4; ++v) {
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32 * v));
            _mm256_stream_si256(reinterpret_cast<__m256i*>(into + 32 * v), word);
            const __m256i key = _mm256_load_si256(
                reinterpret_cast<const __m256i*>(first_row_keys.key + 4 * v));
            const __m256i x = _mm256_xor_si256(word, _mm256_add_epi64(key, shift));
            const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
            sums[v % 4] = _mm256_add_epi64(sums[v % 4], _mm256_add_epi64(product, x));
        }
    }
    _mm_sfence();
    alignas(32) std::uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                       _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]),
                                        _mm256_add_epi64(sums[2], sums[3])));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) std::uint64_t sum_avx512(const std::byte* words,
                                                            std::size_t num_words,
                                                            std::uint64_t row) noexcept {
    __m512i sums[4] = {};
    const std::size_t num_rows = num_words / row_words;
    for (std::size_t r = 0; r < num_rows; ++r) {
        const __m512i shift = _mm512_set1_epi64(static_cast<long long>((row + r) * key_step));
        const std::byte* const at = words + r * checksum_row_bytes;
        for (std::size_t v = 0; v < row_words / 8; ++v) {
            const __m512i key = _mm512_load_si512(first_row_keys.key + 8 * v);
            const __m512i x =
                _mm512_xor_si512(_mm512_loadu_si512(at + 64 * v), _mm512_add_epi64(key, shift));
            const __m512i product = _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
            sums[v % 4] = _mm512_add_epi64(sums[v % 4], _mm512_add_epi64(product, x));
        }
    }
    alignas(64) std::uint64_t lanes[8];
    _mm512_store_si512(lanes, _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]),
                                               _mm512_add_epi64(sums[2], sums[3])));
    std::uint64_t sum = sum_portable(words + num_rows * checksum_row_bytes, num_words % row_words,
                                     row + num_rows);
    for (const std::uint64_t lane : lanes) {
        sum += lane;
    }
    return sum;
}

#endif

struct Kernel {
    std::string_view name;
    SumKernel sum;
    bool (*can_run)() noexcept;
};

// The fastest first; the last one runs everywhere. The compiler runtime reads the CPU's features
// once for the process, so asking costs a load.
constexpr Kernel kernels[] = {
#if defined(__x86_64__)
    {"avx512", sum_avx512, []() noexcept -> bool { return __builtin_cpu_supports("avx512f"); }},
    {"avx2", sum_avx2, []() noexcept -> bool { return __builtin_cpu_supports("avx2"); }},
#endif
    {"portable", sum_portable, []() noexcept { return true; }},
};

// Sums words of one row, from its word `first` on.
using PartKernel = std::uint64_t (*)(const std::byte* words, std::size_t num_words,
                                     std::size_t first, std::uint64_t row) noexcept;

std::uint64_t part_portable(const std::byte* words, std::size_t num_words, std::size_t first,
                            std::uint64_t row) noexcept {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < num_words; ++i) {
        std::uint64_t word;
        std::memcpy(&word, words + 8 * i, 8);
        sum += term(word, row * row_words + first + i);
    }
    return sum;
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) std::uint64_t part_avx2(const std::byte* words,
                                                        std::size_t num_words, std::size_t first,
                                                        std::uint64_t row) noexcept {
    const __m256i shift = _mm256_set1_epi64x(static_cast<long long>(row * key_step));
    const std::size_t num_vectors = num_words / 4;
    __m256i sum = _mm256_setzero_si256();
    for (std::size_t v = 0; v < num_vectors; ++v) {
        const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 32 * v));
        const __m256i key = _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(first_row_keys.key + first + 4 * v));
        const __m256i x = _mm256_xor_si256(word, _mm256_add_epi64(key, shift));
        const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
        sum = _mm256_add_epi64(sum, _mm256_add_epi64(product, x));
    }
    alignas(32) std::uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] +
           part_portable(words + 32 * num_vectors, num_words % 4, first + 4 * num_vectors, row);
}

#endif

PartKernel fastest_part_kernel() noexcept {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        return part_avx2;
    }
#endif
    return part_portable;
}

SumKernel fastest_kernel() noexcept {
    for (const Kernel& kernel : kernels) {
        if (kernel.can_run()) {
            return kernel.sum;
        }
    }
    return sum_portable;
}

std::uint64_t sum_with(SumKernel kernel, std::span<const std::byte> bytes,
                       std::uint64_t first_row) noexcept {
    const std::size_t num_words = bytes.size() / 8;
    std::uint64_t sum = kernel(bytes.data(), num_words, first_row);
    if (const std::size_t rest = bytes.size() % 8; rest != 0) {
        std::uint64_t padded = 0;
        std::memcpy(&padded, bytes.data() + 8 * num_words, rest);
        sum += term(padded, first_row * row_words + num_words);
    }
    return sum;
}

}  // namespace

std::uint64_t checksum_sum(std::span<const std::byte> bytes, std::uint64_t first_row) noexcept {
    return sum_with(fastest_kernel(), bytes, first_row);
}

std::uint64_t checksum_words(std::span<const std::byte> words, std::uint64_t first_word) noexcept {
    const std::size_t num_words = words.size() / 8;
    const std::size_t in_row = first_word % row_words;
    // What is left of the row that it begins in, whole rows, and a part of the last row.
    const std::size_t head = in_row == 0 ? 0 : std::min(num_words, row_words - in_row);
    const std::size_t num_rows = (num_words - head) / row_words;
    const std::size_t tail = num_words - head - num_rows * row_words;
    const std::uint64_t row = (first_word + head) / row_words;
    const PartKernel part = fastest_part_kernel();
    std::uint64_t sum = 0;
    if (head != 0) {
        sum += part(words.data(), head, in_row, first_word / row_words);
    }
    if (num_rows != 0) {
        sum += checksum_sum(words.subspan(8 * head, num_rows * checksum_row_bytes), row);
    }
    if (tail != 0) {
        sum += part(words.data() + 8 * (num_words - tail), tail, 0, row + num_rows);
    }
    return sum;
}

bool can_stream_to([[maybe_unused]] const std::byte* to) noexcept {
#if defined(__x86_64__)
    return reinterpret_cast<std::uintptr_t>(to) % 32 == 0 && __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

std::uint64_t checksum_sum_streamed(std::byte* to, std::span<const std::byte> rows,
                                    std::uint64_t first_row) noexcept {
#if defined(__x86_64__)
    return stream_avx2(to, rows.data(), rows.size() / checksum_row_bytes, first_row);
#else
    std::memcpy(to, rows.data(), rows.size());
    return checksum_sum(rows, first_row);
#endif
}

std::uint64_t checksum_finish(std::uint64_t sum, std::uint64_t num_bytes) noexcept {
    return mix(sum + num_bytes * length_step);
}

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
    return checksum_finish(checksum_sum(bytes, 0), bytes.size());
}

std::vector<std::string_view> checksum_kernels() {
    std::vector<std::string_view> names;
    for (const Kernel& kernel : kernels) {
        if (kernel.can_run()) {
            names.push_back(kernel.name);
        }
    }
    return names;
}

std::optional<std::uint64_t> checksum_with(std::string_view kernel_name,
                                           std::span<const std::byte> bytes) noexcept {
    for (const Kernel& kernel : kernels) {
        if (kernel.name == kernel_name && kernel.can_run()) {
            return checksum_finish(sum_with(kernel.sum, bytes, 0), bytes.size());
        }
    }
    return std::nullopt;
}

}  // namespace flowpath
