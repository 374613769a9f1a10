// RMSNorm, SiLU, rotation and the store into the pool. A part of cpu_kernels_body.hpp.

namespace flowpath::cpu::FLOWPATH_ISA {

namespace {

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

}  // namespace

}  // namespace flowpath::cpu::FLOWPATH_ISA
