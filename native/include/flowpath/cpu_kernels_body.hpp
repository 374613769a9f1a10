// The kernels' code. Included once per instruction set by cpu_kernels_*.cpp, which set
// FLOWPATH_ISA (the namespace and name) and FLOWPATH_LANES (floats in a vector) and switch the
// instructions on by pragma. Includes nothing itself: inline functions of the standard library
// must not be compiled with wide instructions, since the linker keeps one copy for all sets.

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

template <typename T>
void rms_norm(const NormArgs& args, std::int64_t first_row, std::int64_t last_row) {
    const std::int64_t size = args.size;
    const std::int64_t whole = size - size % lanes;
    const T* weight = static_cast<const T*>(args.weight);
    for (std::int64_t row = first_row; row < last_row; ++row) {
        T* x = static_cast<T*>(args.residual) + row * size;
        T* out = static_cast<T*>(args.out) + row * size;
        if (args.delta != nullptr) {
            const T* delta = static_cast<const T*>(args.delta) + row * size;
            for (std::int64_t i = 0; i < whole; i += lanes) {
                store(x + i, load(x + i) + load(delta + i));
            }
            for (std::int64_t i = whole; i < size; ++i) {
                store_one(x + i, load_one(x + i) + load_one(delta + i));
            }
        }
        Floats squares = splat(0.0f);
        for (std::int64_t i = 0; i < whole; i += lanes) {
            const Floats value = load(x + i);
            squares += value * value;
        }
        float total = sum(squares);
        for (std::int64_t i = whole; i < size; ++i) {
            total += load_one(x + i) * load_one(x + i);
        }
        const float scale =
            1.0f / __builtin_sqrtf(total / static_cast<float>(size) + args.epsilon);
        for (std::int64_t i = 0; i < whole; i += lanes) {
            store(out + i, load(x + i) * scale * load(weight + i));
        }
        for (std::int64_t i = whole; i < size; ++i) {
            store_one(out + i, load_one(x + i) * scale * load_one(weight + i));
        }
    }
}

template <typename T>
void silu_mul(const void* gate_up, void* out, std::int64_t size, std::int64_t first_row,
              std::int64_t last_row) {
    const std::int64_t whole = size - size % lanes;
    for (std::int64_t row = first_row; row < last_row; ++row) {
        const T* gate = static_cast<const T*>(gate_up) + row * 2 * size;
        const T* up = gate + size;
        T* to = static_cast<T*>(out) + row * size;
        for (std::int64_t i = 0; i < whole; i += lanes) {
            const Floats g = load(gate + i);
            store(to + i, g / (1.0f + exponential(-g)) * load(up + i));
        }
        for (std::int64_t i = whole; i < size; ++i) {
            const float g = load_one(gate + i);
            store_one(to + i, g / (1.0f + exponential_one(-g)) * load_one(up + i));
        }
    }
}

template <typename T>
void rotate_head(T* head, const T* weight, float epsilon, const float* cosine, const float* sine,
                 std::int32_t head_dim) {
    const std::int32_t half = head_dim / 2;
    float scale = 1.0f;
    if (weight != nullptr) {
        float total = 0.0f;
        for (std::int32_t i = 0; i < head_dim; ++i) {
            total += load_one(head + i) * load_one(head + i);
        }
        scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(head_dim) + epsilon);
    }
    std::int32_t i = 0;
    for (; i + lanes <= half; i += lanes) {
        Floats a = load(head + i);
        Floats b = load(head + half + i);
        if (weight != nullptr) {
            a *= scale * load(weight + i);
            b *= scale * load(weight + half + i);
        }
        const Floats c = load(cosine + i);
        const Floats s = load(sine + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = load_one(head + i);
        float b = load_one(head + half + i);
        if (weight != nullptr) {
            a *= scale * load_one(weight + i);
            b *= scale * load_one(weight + half + i);
        }
        store_one(head + i, a * cosine[i] - b * sine[i]);
        store_one(head + half + i, b * cosine[i] + a * sine[i]);
    }
}

template <typename T>
void rotate_store(const StoreArgs& args, std::int64_t first_token, std::int64_t last_token) {
    const PoolView& pool = args.pool;
    const std::int32_t dim = pool.head_dim;
    const std::int64_t q_size = static_cast<std::int64_t>(args.num_heads) * dim;
    const std::int64_t kv_size = static_cast<std::int64_t>(pool.num_kv_heads) * dim;
    const T* q_weight = static_cast<const T*>(args.q_weight);
    const T* k_weight = static_cast<const T*>(args.k_weight);
    for (std::int64_t token = first_token; token < last_token; ++token) {
        T* row = static_cast<T*>(args.qkv) + token * (q_size + 2 * kv_size);
        const std::int64_t angle = static_cast<std::int64_t>(args.positions[token]) * (dim / 2);
        const float* cosine = args.cosine + angle;
        const float* sine = args.sine + angle;
        for (std::int64_t i = 0; i < q_size; i += dim) {
            rotate_head(row + i, q_weight, args.epsilon, cosine, sine, dim);
        }
        for (std::int64_t i = q_size; i < q_size + kv_size; i += dim) {
            rotate_head(row + i, k_weight, args.epsilon, cosine, sine, dim);
        }
        const std::int64_t slot = args.slots[token];
        const std::int64_t offset = slot % pool.block_size * kv_size;
        for (std::int32_t plane = 0; plane < 2; ++plane) {
            T* to = reinterpret_cast<T*>(pool.plane(slot / pool.block_size, args.layer, plane));
            __builtin_memcpy(to + offset, row + q_size + plane * kv_size,
                             static_cast<std::size_t>(kv_size) * sizeof(T));
        }
    }
}

// Where lane `lane` of one round's result comes from, in the two vectors laid end to end.
constexpr int sum_source(int lane, int group) {
    const int base = lane / (2 * group) * (2 * group);
    const int within = lane % (2 * group);
    return within < group ? base + within : lanes + base + within - group;
}

#if !defined(__clang__)

template <int group, int... lane>
FLOWPATH_INLINE Floats add_neighbours(Floats a, Floats b, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(a, b, Ints{sum_source(lane, group)...}) +
           __builtin_shuffle(a, b, Ints{(sum_source(lane, group) + group)...});
}

// Sums each of `lanes` vectors; lane i of the result is the sum of rows[i]. Each round halves the
// vectors: after the round with groups of g lanes, one holds 2g rows' sums, spread over lanes / 2g.
template <int group = 1>
FLOWPATH_INLINE Floats sum_rows(Floats* rows) {
    if constexpr (group == lanes) {
        return rows[0];
    } else {
        for (int i = 0; i < lanes / (2 * group); ++i) {
            rows[i] = add_neighbours<group>(rows[2 * i], rows[2 * i + 1],
                                            std::make_integer_sequence<int, lanes>{});
        }
        return sum_rows<2 * group>(rows);
    }
}

#else

FLOWPATH_INLINE Floats sum_rows(Floats* rows) {
    Floats totals{};
    for (int row = 0; row < lanes; ++row) {
        totals[row] = sum(rows[row]);
    }
    return totals;
}

#endif

// Asks for the row that lies `ahead` rows on. Its address may be past the block's end, where it
// costs a useless line and nothing else.
template <typename T>
FLOWPATH_INLINE void prefetch_row(const T* row, std::int64_t stride, std::int32_t size) {
    const auto address =
        reinterpret_cast<std::uintptr_t>(row) +
        static_cast<std::uintptr_t>(ahead * stride * static_cast<std::int64_t>(sizeof(T)));
    const auto bytes = static_cast<std::uintptr_t>(size) * sizeof(T);
    for (std::uintptr_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(address + at));
    }
}

// Scores of `heads` query heads against `count` <= lanes keys that lie `stride` elements apart.
template <typename T, int heads>
FLOWPATH_INLINE void score_tile(const float* queries, const T* keys, std::int64_t stride, int count,
                                std::int32_t dim, float* scores) {
    Floats partial[heads * lanes];
    for (int key = 0; key < count; ++key) {
        Floats totals[heads];
        for (int head = 0; head < heads; ++head) {
            totals[head] = splat(0.0f);
        }
        const T* from = keys + key * stride;
        prefetch_row(from, stride, dim);
        for (std::int32_t i = 0; i < dim; i += 2 * lanes) {
            const Pair pair = load_pair(from + i);
            for (int head = 0; head < heads; ++head) {
                totals[head] += pair.first * load(queries + head * dim + i);
                totals[head] += pair.second * load(queries + head * dim + i + lanes);
            }
        }
        for (int head = 0; head < heads; ++head) {
            partial[head * lanes + key] = totals[head];
        }
    }
    for (int head = 0; head < heads; ++head) {
        Floats* rows = partial + head * lanes;
        for (int key = count; key < lanes; ++key) {
            rows[key] = splat(0.0f);
        }
        const Floats totals = sum_rows(rows);
        __builtin_memcpy(scores + head * part_positions, &totals,
                         static_cast<std::size_t>(count) * sizeof(float));
    }
}

// Adds the weighted values of `count` positions to `heads` rows of `pairs` * 2 * lanes sums.
template <typename T, int heads, int pairs>
FLOWPATH_INLINE void add_values(const float* weights, const T* values, std::int64_t stride,
                                std::int32_t count, std::int32_t dim, float* sums) {
    Floats totals[heads][2 * pairs];
    for (int head = 0; head < heads; ++head) {
        for (int v = 0; v < 2 * pairs; ++v) {
            totals[head][v] = load(sums + head * dim + v * lanes);
        }
    }
    for (std::int32_t position = 0; position < count; ++position) {
        const T* from = values + position * stride;
        prefetch_row(from, stride, pairs * 2 * lanes);
        for (int v = 0; v < pairs; ++v) {
            const Pair pair = load_pair(from + v * 2 * lanes);
            for (int head = 0; head < heads; ++head) {
                const float weight = weights[head * part_positions + position];
                totals[head][2 * v] += weight * pair.first;
                totals[head][2 * v + 1] += weight * pair.second;
            }
        }
    }
    for (int head = 0; head < heads; ++head) {
        for (int v = 0; v < 2 * pairs; ++v) {
            store(sums + head * dim + v * lanes, totals[head][v]);
        }
    }
}

// Turns count scores into exponentials relative to their maximum; returns the maximum.
FLOWPATH_INLINE float softmax_part(float* scores, std::int32_t count, float* total) {
    float maximum = scores[0];
    for (std::int32_t i = 1; i < count; ++i) {
        // The comparison is false for a NaN score, which then reaches the sum by itself.
        maximum = scores[i] > maximum ? scores[i] : maximum;
    }
    Floats sums = splat(0.0f);
    std::int32_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const Floats value = exponential(load(scores + i) - maximum);
        store(scores + i, value);
        sums += value;
    }
    *total = sum(sums);
    for (; i < count; ++i) {
        scores[i] = exponential_one(scores[i] - maximum);
        *total += scores[i];
    }
    return maximum;
}

// The rows of one plane from a position to the end of its block or of the part.
template <typename T>
struct Stretch {
    const T* rows;
    std::int32_t count;
};

template <typename T>
FLOWPATH_INLINE Stretch<T> stretch_at(const AttendArgs& args, std::int32_t position,
                                      std::int32_t plane, std::int64_t stride) {
    const PoolView& pool = args.pool;
    const std::int32_t offset = position % pool.block_size;
    const std::int32_t room = pool.block_size - offset;
    const std::int32_t rest = args.last - position;
    const std::byte* base = pool.plane(args.table[position / pool.block_size], args.layer, plane);
    return {reinterpret_cast<const T*>(base) + offset * stride, rest < room ? rest : room};
}

// One KV head's tile or stretch, with its query heads in bunches that fit the registers.
template <typename T, int heads>
FLOWPATH_INLINE void add_stretch(const float* weights, const T* values, std::int64_t stride,
                                 std::int32_t count, std::int32_t dim, float* sums) {
    std::int32_t i = 0;
    for (; i + 4 * lanes <= dim; i += 4 * lanes) {
        add_values<T, heads, 2>(weights, values + i, stride, count, dim, sums + i);
    }
    for (; i < dim; i += 2 * lanes) {
        add_values<T, heads, 1>(weights, values + i, stride, count, dim, sums + i);
    }
}

template <typename T>
FLOWPATH_INLINE void score_group(std::int32_t group, const float* queries, const T* keys,
                                 std::int64_t stride, int count, std::int32_t dim, float* scores) {
    for (std::int32_t head = 0; head < group;) {
        const float* q = queries + head * dim;
        float* to = scores + head * part_positions;
        switch (group - head) {
            case 1: score_tile<T, 1>(q, keys, stride, count, dim, to); return;
            case 2: score_tile<T, 2>(q, keys, stride, count, dim, to); return;
            case 3: score_tile<T, 3>(q, keys, stride, count, dim, to); return;
            default: score_tile<T, 4>(q, keys, stride, count, dim, to);
        }
        head += 4;
    }
}

template <typename T>
FLOWPATH_INLINE void add_group(std::int32_t group, const float* weights, const T* values,
                               std::int64_t stride, std::int32_t count, std::int32_t dim,
                               float* sums) {
    for (std::int32_t head = 0; head < group;) {
        const float* from = weights + head * part_positions;
        float* to = sums + head * dim;
        switch (group - head) {
            case 1: add_stretch<T, 1>(from, values, stride, count, dim, to); return;
            case 2: add_stretch<T, 2>(from, values, stride, count, dim, to); return;
            case 3: add_stretch<T, 3>(from, values, stride, count, dim, to); return;
            default: add_stretch<T, 4>(from, values, stride, count, dim, to);
        }
        head += 4;
    }
}

// All heads of one token over one part: K of the part is read once, front to back, then V.
template <typename T>
void attend_part(const AttendArgs& args, float* part, float* scratch) {
    const std::int32_t kv_heads = args.pool.num_kv_heads;
    const std::int32_t group = args.num_heads / kv_heads;
    const std::int32_t dim = args.pool.head_dim;
    const std::int32_t size = args.num_heads * dim;
    const std::int64_t stride = static_cast<std::int64_t>(kv_heads) * dim;
    float* queries = scratch;
    float* scores = queries + size;
    float* maxima = part;
    float* totals = part + args.num_heads;
    float* sums = part + 2 * args.num_heads;
    const T* from = static_cast<const T*>(args.queries);
    for (std::int32_t i = 0; i < size; i += 2 * lanes) {
        const Pair pair = load_pair(from + i);
        store(queries + i, pair.first * args.scale);
        store(queries + i + lanes, pair.second * args.scale);
        store(sums + i, splat(0.0f));
        store(sums + i + lanes, splat(0.0f));
    }
    for (std::int32_t at = args.first; at < args.last;) {
        const Stretch<T> keys = stretch_at<T>(args, at, 0, stride);
        for (std::int32_t key = 0; key < keys.count; key += lanes) {
            const int tile = keys.count - key < lanes ? keys.count - key : lanes;
            for (std::int32_t head = 0; head < kv_heads; ++head) {
                score_group<T>(group, queries + head * group * dim,
                               keys.rows + key * stride + head * dim, stride, tile, dim,
                               scores + head * group * part_positions + (at - args.first) + key);
            }
        }
        at += keys.count;
    }
    for (std::int32_t head = 0; head < args.num_heads; ++head) {
        maxima[head] =
            softmax_part(scores + head * part_positions, args.last - args.first, totals + head);
    }
    for (std::int32_t at = args.first; at < args.last;) {
        const Stretch<T> values = stretch_at<T>(args, at, 1, stride);
        for (std::int32_t done = 0; done < values.count; done += lanes) {
            const std::int32_t tile = values.count - done < lanes ? values.count - done : lanes;
            for (std::int32_t head = 0; head < kv_heads; ++head) {
                add_group<T>(group,
                             scores + head * group * part_positions + (at - args.first) + done,
                             values.rows + done * stride + head * dim, stride, tile, dim,
                             sums + head * group * dim);
            }
        }
        at += values.count;
    }
}

template <typename T>
void join_parts(const float* parts, std::int64_t num_parts, std::int32_t num_heads,
                std::int32_t head_dim, void* out) {
    const auto step = static_cast<std::int64_t>(part_floats(num_heads, head_dim));
    for (std::int32_t head = 0; head < num_heads; ++head) {
        const float* own = parts + head;
        float maximum = own[0];
        for (std::int64_t part = 1; part < num_parts; ++part) {
            maximum = own[part * step] > maximum ? own[part * step] : maximum;
        }
        float total = 0.0f;
        for (std::int64_t part = 0; part < num_parts; ++part) {
            total += exponential_one(own[part * step] - maximum) * own[part * step + num_heads];
        }
        T* to = static_cast<T*>(out) + head * head_dim;
        for (std::int32_t i = 0; i < head_dim; i += 2 * lanes) {
            Pair sums{splat(0.0f), splat(0.0f)};
            for (std::int64_t part = 0; part < num_parts; ++part) {
                const float weight = exponential_one(own[part * step] - maximum) / total;
                const float* from = parts + part * step + 2 * num_heads + head * head_dim + i;
                sums.first += weight * load(from);
                sums.second += weight * load(from + lanes);
            }
            store_pair(to + i, sums);
        }
    }
}

// --- Attention of a prefill chunk: tiles of queries against tiles of keys, both in float32. ---

constexpr int product_rows = 6;                        // rows of one register block
constexpr int wide = lanes == 16 ? 4 : 2;              // its vectors a row: what the registers hold
static_assert(tile_keys % (wide * lanes) == 0);

// c (product_rows, vectors * lanes) = a (product_rows, depth) * b (depth, ...), added to c where
// `adds`. Rows of a, b and c lie a_stride, b_stride and c_stride floats apart.
template <int vectors, bool adds>
FLOWPATH_INLINE void multiply_block(const float* a, std::int64_t a_stride, const float* b,
                                    std::int64_t b_stride, float* c, std::int64_t c_stride,
                                    std::int32_t depth) {
    Floats totals[product_rows][vectors];
#pragma GCC unroll 6
    for (int row = 0; row < product_rows; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            totals[row][v] = adds ? load(c + row * c_stride + v * lanes) : splat(0.0f);
        }
    }
    for (std::int32_t k = 0; k < depth; ++k) {
        Floats right[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            right[v] = load(b + k * b_stride + v * lanes);
        }
#pragma GCC unroll 6
        for (int row = 0; row < product_rows; ++row) {
            const Floats left = splat(a[row * a_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                totals[row][v] += left * right[v];
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < product_rows; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            store(c + row * c_stride + v * lanes, totals[row][v]);
        }
    }
}

#if !defined(__clang__)

template <int group, int... lane>
FLOWPATH_INLINE void swap_corners(Floats& a, Floats& b, std::integer_sequence<int, lane...>) {
    const Floats low = __builtin_shuffle(
        a, b, Ints{((lane & group) == 0 ? lane : lanes + lane - group)...});
    b = __builtin_shuffle(a, b, Ints{((lane & group) == 0 ? lane + group : lanes + lane)...});
    a = low;
}

// Transposes a square of lanes x lanes: corners of 1, then of 2, 4, ... are swapped.
template <int group = 1>
FLOWPATH_INLINE void transpose(Floats* rows) {
    if constexpr (group < lanes) {
#pragma GCC unroll 16
        for (int row = 0; row < lanes; ++row) {
            if ((row & group) == 0) {
                swap_corners<group>(rows[row], rows[row + group],
                                    std::make_integer_sequence<int, lanes>{});
            }
        }
        transpose<2 * group>(rows);
    }
}

#else

FLOWPATH_INLINE void transpose(Floats* rows) {
    for (int row = 0; row < lanes; ++row) {
        for (int lane = 0; lane < row; ++lane) {
            const float value = rows[row][lane];
            rows[row][lane] = rows[lane][row];
            rows[lane][row] = value;
        }
    }
}

#endif

// Unpacks tile_keys positions from `begin`: keys as (head_dim, tile_keys), values as (tile_keys,
// head_dim). Positions outside of first .. last - 1 become zeros and are not read.
template <typename T>
FLOWPATH_INLINE void unpack_tile(const ChunkArgs& args, std::int32_t begin, std::int32_t first,
                                 std::int32_t last, float* keys, float* values) {
    const PoolView& pool = args.pool;
    const std::int32_t dim = pool.head_dim;
    const std::int64_t stride = static_cast<std::int64_t>(pool.num_kv_heads) * dim;
    const T* key_rows[tile_keys];
    for (int i = 0; i < tile_keys; ++i) {
        const std::int32_t position = begin + i;
        key_rows[i] = nullptr;
        float* value = values + static_cast<std::int64_t>(i) * dim;
        if (position < first || position >= last) {
            for (std::int32_t d = 0; d < dim; d += lanes) {
                store(value + d, splat(0.0f));
            }
            continue;
        }
        const std::int64_t block = args.table[position / pool.block_size];
        const std::int64_t offset =
            position % pool.block_size * stride + static_cast<std::int64_t>(args.kv_head) * dim;
        key_rows[i] = reinterpret_cast<const T*>(pool.plane(block, args.layer, 0)) + offset;
        const T* from = reinterpret_cast<const T*>(pool.plane(block, args.layer, 1)) + offset;
        for (std::int32_t d = 0; d < dim; d += lanes) {
            store(value + d, load(from + d));
        }
    }
    for (int i = 0; i < tile_keys; i += lanes) {
        for (std::int32_t d = 0; d < dim; d += lanes) {
            Floats square[lanes];
            for (int row = 0; row < lanes; ++row) {
                square[row] =
                    key_rows[i + row] == nullptr ? splat(0.0f) : load(key_rows[i + row] + d);
            }
            transpose(square);
            for (int row = 0; row < lanes; ++row) {
                store(keys + static_cast<std::int64_t>(d + row) * tile_keys + i, square[row]);
            }
        }
    }
}

// Turns one row's scores into weights, of which those outside of begin .. end - 1 are 0, and brings
// the row's maximum, sum and accumulated values to the new maximum.
FLOWPATH_INLINE void weigh_row(float* scores, int begin, int end, float* maximum, float* total,
                               float* sums, std::int32_t dim) {
    float highest = *maximum;
    if (begin == 0 && end == tile_keys) {
        Floats most = load(scores);
        for (int i = lanes; i < tile_keys; i += lanes) {
            const Floats other = load(scores + i);
            most = other > most ? other : most;
        }
        for (int lane = 0; lane < lanes; ++lane) {
            highest = most[lane] > highest ? most[lane] : highest;
        }
    } else {
        for (int i = begin; i < end; ++i) {
            highest = scores[i] > highest ? scores[i] : highest;
        }
    }
    Floats added = splat(0.0f);
    for (int i = 0; i < tile_keys; i += lanes) {
        const Floats weight = exponential(load(scores + i) - highest);
        store(scores + i, weight);
    }
    for (int i = 0; i < begin; ++i) {
        scores[i] = 0.0f;
    }
    for (int i = end; i < tile_keys; ++i) {
        scores[i] = 0.0f;
    }
    for (int i = 0; i < tile_keys; i += lanes) {
        added += load(scores + i);
    }
    if (highest > *maximum) {
        const float shrink = exponential_one(*maximum - highest);
        *total *= shrink;
        for (std::int32_t d = 0; d < dim; d += lanes) {
            store(sums + d, load(sums + d) * shrink);
        }
        *maximum = highest;
    }
    *total += sum(added);
}

template <int vectors>
FLOWPATH_INLINE std::int32_t add_weighted(const float* weights, const float* values, float* sums,
                                          std::int32_t dim, std::int32_t d) {
    for (; d + vectors * lanes <= dim; d += vectors * lanes) {
        multiply_block<vectors, true>(weights, tile_keys, values + d, dim, sums + d, dim,
                                      tile_keys);
    }
    return d;
}

template <typename T>
void attend_tile(const ChunkArgs& args, float* scratch) {
    const PoolView& pool = args.pool;
    const std::int32_t dim = pool.head_dim;
    const std::int32_t group = args.num_heads / pool.num_kv_heads;
    const std::int32_t rows = (args.last_token - args.first_token) * group;
    const std::int32_t padded = (rows + product_rows - 1) / product_rows * product_rows;
    const std::int64_t in_stride =
        static_cast<std::int64_t>(args.num_heads + 2 * pool.num_kv_heads) * dim;
    const std::int64_t out_stride = static_cast<std::int64_t>(args.num_heads) * dim;
    float* queries = scratch;
    float* sums = queries + static_cast<std::int64_t>(padded) * dim;
    float* scores = sums + static_cast<std::int64_t>(padded) * dim;
    float* maxima = scores + static_cast<std::int64_t>(padded) * tile_keys;
    float* totals = maxima + padded;
    float* keys = totals + padded;
    float* values = keys + static_cast<std::int64_t>(tile_keys) * dim;
    for (std::int32_t row = 0; row < padded; ++row) {
        const std::int64_t head = args.kv_head * group + row % group;
        const T* from = static_cast<const T*>(args.qkv) +
                        (args.first_token + row / group) * in_stride + head * dim;
        for (std::int32_t d = 0; d < dim; d += lanes) {
            store(queries + row * dim + d, row < rows ? load(from + d) * args.scale : splat(0.0f));
            store(sums + row * dim + d, splat(0.0f));
        }
        maxima[row] = -3.0e38f;
        totals[row] = 0.0f;
    }
    const std::int32_t first_position = args.start + args.first_token;
    const std::int32_t last = args.start + args.last_token;
    const std::int32_t reach = first_position + 1 - args.window;
    const std::int32_t first = args.window > 0 && reach > 0 ? reach : 0;
    for (std::int32_t begin = first / tile_keys * tile_keys; begin < last; begin += tile_keys) {
        unpack_tile<T>(args, begin, first, last, keys, values);
        for (std::int32_t row = 0; row < padded; row += product_rows) {
            const std::int32_t end_row = row + product_rows < rows ? row + product_rows : rows;
            if (first_position + (end_row - 1) / group < begin) {
                continue;  // all of these rows' tokens come before the tile
            }
            for (int key = 0; key < tile_keys; key += wide * lanes) {
                multiply_block<wide, false>(queries + row * dim, dim, keys + key, tile_keys,
                                            scores + row * tile_keys + key, tile_keys, dim);
            }
            for (std::int32_t r = row; r < row + product_rows; ++r) {
                // Of this tile, the row's token sees keys from .. to - 1.
                const std::int32_t position = first_position + (r < rows ? r : rows - 1) / group;
                std::int32_t from =
                    args.window > 0 ? position + 1 - args.window - begin : 0;
                std::int32_t to = position + 1 - begin;
                from = from < 0 ? 0 : (from > tile_keys ? tile_keys : from);
                to = to < from ? from : (to > tile_keys ? tile_keys : to);
                weigh_row(scores + r * tile_keys, from, to, maxima + r, totals + r, sums + r * dim,
                          dim);
            }
            std::int32_t d = add_weighted<wide>(scores + row * tile_keys, values,
                                                sums + row * dim, dim, 0);
            add_weighted<2>(scores + row * tile_keys, values, sums + row * dim, dim, d);
        }
    }
    for (std::int32_t row = 0; row < rows; ++row) {
        const std::int64_t head = args.kv_head * group + row % group;
        T* to = static_cast<T*>(args.out) + (args.first_token + row / group) * out_stride +
                head * dim;
        for (std::int32_t d = 0; d < dim; d += lanes) {
            store(to + d, load(sums + row * dim + d) / totals[row]);
        }
    }
}

}  // namespace

#define FLOWPATH_STRING_OF(name) #name
#define FLOWPATH_STRING(name) FLOWPATH_STRING_OF(name)

const Kernels float32_kernels{FLOWPATH_STRING(FLOWPATH_ISA), lanes,
                              rms_norm<float>,               silu_mul<float>,
                              rotate_store<float>,           attend_part<float>,
                              join_parts<float>,             attend_tile<float>};
const Kernels bfloat16_kernels{FLOWPATH_STRING(FLOWPATH_ISA), lanes,
                               rms_norm<std::uint16_t>,       silu_mul<std::uint16_t>,
                               rotate_store<std::uint16_t>,   attend_part<std::uint16_t>,
                               join_parts<std::uint16_t>,     attend_tile<std::uint16_t>};

}  // namespace flowpath::cpu::FLOWPATH_ISA
