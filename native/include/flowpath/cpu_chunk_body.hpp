// Attention of a prefill chunk: tiles of queries against tiles of keys, both in float32. A part of
// cpu_kernels_body.hpp.

namespace flowpath::cpu::FLOWPATH_ISA {

namespace {

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

}  // namespace flowpath::cpu::FLOWPATH_ISA
