// Attention of single tokens over the pool, in parts. A part of cpu_kernels_body.hpp.

namespace flowpath::cpu::FLOWPATH_ISA {

namespace {

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

}  // namespace

}  // namespace flowpath::cpu::FLOWPATH_ISA
