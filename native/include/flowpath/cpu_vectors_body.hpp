// Vectors of FLOWPATH_LANES floats: loads and stores of both element types, and exp. A part of
// cpu_kernels_body.hpp.

namespace flowpath::cpu::FLOWPATH_ISA {

namespace {

constexpr int lanes = FLOWPATH_LANES;
constexpr std::int64_t ahead = 8;  // rows between a prefetch and its use

typedef float Floats __attribute__((vector_size(lanes * 4)));
typedef std::int32_t Ints __attribute__((vector_size(lanes * 4)));
typedef std::uint32_t Bits __attribute__((vector_size(lanes * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(lanes * 2)));

#define FLOWPATH_INLINE inline __attribute__((always_inline))

FLOWPATH_INLINE Floats splat(float value) { return Floats{} + value; }

FLOWPATH_INLINE Floats load(const float* from) {
    Floats value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

FLOWPATH_INLINE Floats load(const std::uint16_t* from) {
    Halves value;
    __builtin_memcpy(&value, from, sizeof value);
    return reinterpret_cast<Floats>(__builtin_convertvector(value, Bits) << 16);
}

FLOWPATH_INLINE void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }

// Rounds to nearest even. An infinity stays one, and so does the processor's own NaN.
FLOWPATH_INLINE void store(std::uint16_t* to, Floats value) {
    Bits bits = reinterpret_cast<Bits>(value);
    bits += 0x7fffu + ((bits >> 16) & 1u);
    const Halves halves = __builtin_convertvector(bits >> 16, Halves);
    __builtin_memcpy(to, &halves, sizeof halves);
}

// Two vectors of 2 * lanes numbers, in an order of the type's own: as they lie for float32; the even
// ones, then the odd ones for bfloat16, where that costs two instructions and no shuffle. Sums over
// all numbers do not depend on it, and store_pair undoes it.
struct Pair {
    Floats first;
    Floats second;
};

FLOWPATH_INLINE Pair load_pair(const float* from) { return {load(from), load(from + lanes)}; }

FLOWPATH_INLINE Pair load_pair(const std::uint16_t* from) {
    Bits both;
    __builtin_memcpy(&both, from, sizeof both);
    return {reinterpret_cast<Floats>(both << 16), reinterpret_cast<Floats>(both & 0xffff0000u)};
}

FLOWPATH_INLINE void store_pair(float* to, Pair pair) {
    store(to, pair.first);
    store(to + lanes, pair.second);
}

FLOWPATH_INLINE void store_pair(std::uint16_t* to, Pair pair) {
    Bits even = reinterpret_cast<Bits>(pair.first);
    Bits odd = reinterpret_cast<Bits>(pair.second);
    even += 0x7fffu + ((even >> 16) & 1u);
    odd += 0x7fffu + ((odd >> 16) & 1u);
    const Bits both = (even >> 16) | (odd & 0xffff0000u);
    __builtin_memcpy(to, &both, sizeof both);
}

FLOWPATH_INLINE float load_one(const float* from) { return *from; }
FLOWPATH_INLINE float load_one(const std::uint16_t* from) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(*from) << 16);
}
FLOWPATH_INLINE void store_one(float* to, float value) { *to = value; }
FLOWPATH_INLINE void store_one(std::uint16_t* to, float value) {
    std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    bits += 0x7fffu + ((bits >> 16) & 1u);
    *to = static_cast<std::uint16_t>(bits >> 16);
}

FLOWPATH_INLINE float sum(Floats value) {
    float total = 0.0f;
    for (int lane = 0; lane < lanes; ++lane) {
        total += value[lane];
    }
    return total;
}

// exp for inputs up to 88; a NaN stays a NaN. Relative error about 2e-7.
FLOWPATH_INLINE Floats exponential(Floats x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    x = x > splat(88.0f) ? splat(88.0f) : x;
    // Adding 1.5 * 2^23 rounds to an integer that then stands in the low bits.
    const Floats shifted = x * 1.44269504f + 12582912.0f;
    const Floats power = shifted - 12582912.0f;
    const Floats r = (x - power * 0.693359375f) + power * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const Bits exponent = (reinterpret_cast<Bits>(shifted) + 127u) << 23;
    return y * reinterpret_cast<Floats>(exponent);
}

FLOWPATH_INLINE float exponential_one(float x) { return exponential(splat(x))[0]; }

}  // namespace

}  // namespace flowpath::cpu::FLOWPATH_ISA
