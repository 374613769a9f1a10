#include "flowpath/memory/checksum.hpp"

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

// A kernel sums the terms of `num_words` whole words; `key` is the key of the first one.
using SumKernel = std::uint64_t (*)(const std::byte* words, std::size_t num_words,
                                    std::uint64_t key) noexcept;

std::uint64_t sum_portable(const std::byte* words, std::size_t num_words,
                           std::uint64_t key) noexcept {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < num_words; ++i) {
        std::uint64_t word;
        std::memcpy(&word, words + 8 * i, 8);
        const std::uint64_t x = word ^ (key + i * key_step);
        sum += (x & 0xFFFFFFFF) * (x >> 32) + x;
    }
    return sum;
}

#if defined(__x86_64__)

// Four vectors in flight hide the latency of the multiply; each has its own keys, and all step by
// the same amount.

__attribute__((target("avx2"))) std::uint64_t sum_avx2(const std::byte* words,
                                                       std::size_t num_words,
                                                       std::uint64_t key) noexcept {
    constexpr std::size_t words_per_turn = 16;
    __m256i keys[4];
    __m256i sums[4];
    for (std::uint64_t v = 0; v < 4; ++v) {
        const std::uint64_t first = key + 4 * v * key_step;
        keys[v] = _mm256_set_epi64x(static_cast<long long>(first + 3 * key_step),
                                    static_cast<long long>(first + 2 * key_step),
                                    static_cast<long long>(first + key_step),
                                    static_cast<long long>(first));
        sums[v] = _mm256_setzero_si256();
    }
    const __m256i step = _mm256_set1_epi64x(static_cast<long long>(words_per_turn * key_step));
    std::size_t done = 0;
    for (; done + words_per_turn <= num_words; done += words_per_turn) {
        const std::byte* at = words + 8 * done;
        for (std::size_t v = 0; v < 4; ++v) {
            const __m256i word =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32 * v));
            const __m256i x = _mm256_xor_si256(word, keys[v]);
            const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
            sums[v] = _mm256_add_epi64(sums[v], _mm256_add_epi64(product, x));
            keys[v] = _mm256_add_epi64(keys[v], step);
        }
    }
    const __m256i total = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]),
                                           _mm256_add_epi64(sums[2], sums[3]));
    alignas(32) std::uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), total);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] +
           sum_portable(words + 8 * done, num_words - done, key + done * key_step);
}

__attribute__((target("avx512f"))) std::uint64_t sum_avx512(const std::byte* words,
                                                            std::size_t num_words,
                                                            std::uint64_t key) noexcept {
    constexpr std::size_t words_per_turn = 32;
    __m512i keys[4];
    __m512i sums[4];
    for (std::uint64_t v = 0; v < 4; ++v) {
        alignas(64) std::uint64_t first[8];
        for (std::uint64_t lane = 0; lane < 8; ++lane) {
            first[lane] = key + (8 * v + lane) * key_step;
        }
        keys[v] = _mm512_load_si512(first);
        sums[v] = _mm512_setzero_si512();
    }
    const __m512i step = _mm512_set1_epi64(static_cast<long long>(words_per_turn * key_step));
    std::size_t done = 0;
    for (; done + words_per_turn <= num_words; done += words_per_turn) {
        const std::byte* at = words + 8 * done;
        for (std::size_t v = 0; v < 4; ++v) {
            const __m512i x = _mm512_xor_si512(_mm512_loadu_si512(at + 64 * v), keys[v]);
            const __m512i product = _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
            sums[v] = _mm512_add_epi64(sums[v], _mm512_add_epi64(product, x));
            keys[v] = _mm512_add_epi64(keys[v], step);
        }
    }
    const __m512i total = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]),
                                           _mm512_add_epi64(sums[2], sums[3]));
    alignas(64) std::uint64_t lanes[8];
    _mm512_store_si512(lanes, total);
    std::uint64_t sum = sum_portable(words + 8 * done, num_words - done, key + done * key_step);
    for (const std::uint64_t lane : lanes) {
        sum += lane;
    }
    return sum;
}

#endif

// The compiler runtime reads the CPU's features once for the process; asking costs a load.
SumKernel fastest_kernel() noexcept {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        return sum_avx512;
    }
    if (__builtin_cpu_supports("avx2")) {
        return sum_avx2;
    }
#endif
    return sum_portable;
}

std::uint64_t sum_with(SumKernel kernel, std::span<const std::byte> bytes,
                       std::uint64_t first_word) noexcept {
    const std::size_t num_words = bytes.size() / 8;
    std::uint64_t sum = kernel(bytes.data(), num_words, (first_word + 1) * key_step);
    if (const std::size_t rest = bytes.size() % 8; rest != 0) {
        std::byte padded[8]{};
        std::memcpy(padded, bytes.data() + 8 * num_words, rest);
        sum += sum_portable(padded, 1, (first_word + num_words + 1) * key_step);
    }
    return sum;
}

}  // namespace

std::uint64_t checksum_sum(std::span<const std::byte> bytes, std::uint64_t first_word) noexcept {
    return sum_with(fastest_kernel(), bytes, first_word);
}

std::uint64_t checksum_finish(std::uint64_t sum, std::uint64_t num_bytes) noexcept {
    std::uint64_t h = sum + num_bytes * length_step;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB;
    return h ^ (h >> 31);
}

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
    return checksum_finish(checksum_sum(bytes, 0), bytes.size());
}

std::uint64_t checksum_portable(std::span<const std::byte> bytes) noexcept {
    return checksum_finish(sum_with(sum_portable, bytes, 0), bytes.size());
}

}  // namespace flowpath
