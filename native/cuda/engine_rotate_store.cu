// Rotates queries and keys in place and writes keys and values into the paged pool, in one pass.
//
// Compiled at run time with HEAD_DIM (64, 128 or 256) and IS_BFLOAT16 (1, or 0 for float16), and with
// KV_E4M3 for a pool of 8-bit numbers. It includes nothing, so that it needs no headers of the
// toolkit: numbers are converted by hand. With HOST_PRIMITIVES who compiles it brings what is written
// in the GPU's own language.
//
// One group of HEAD_DIM / 16 neighbouring lanes has one head of one token. Each lane holds eight
// numbers of the head's first half and the eight that rotate with them, of its second half. All
// lanes of a head are in one warp.

typedef unsigned short u16;
typedef unsigned int u32;

constexpr int LANES = HEAD_DIM / 16;
constexpr int HALF = HEAD_DIM / 2;

union Vector {
  uint4 whole;
  u16 at[8];
};

union Angles {
  float4 whole[2];
  float at[8];
};

#ifdef KV_E4M3
typedef unsigned char Stored;

union Packed {
  uint2 whole;
  u16 at[4];
};
#else
typedef u16 Stored;
#endif

__device__ __forceinline__ Vector load(const u16* from) {
  Vector vector;
  vector.whole = *reinterpret_cast<const uint4*>(from);
  return vector;
}

__device__ __forceinline__ Angles load(const float* from) {
  Angles angles;
  angles.whole[0] = reinterpret_cast<const float4*>(from)[0];
  angles.whole[1] = reinterpret_cast<const float4*>(from)[1];
  return angles;
}

#ifndef HOST_PRIMITIVES
__device__ __forceinline__ void store(u16* to, const Vector& vector) {
  // Written out, because the compiler splits the store where two paths meet.
  const uint4 all = vector.whole;
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(all.x), "r"(all.y), "r"(all.z), "r"(all.w)
               : "memory");
}

__device__ __forceinline__ float to_float(u16 bits) {
#if IS_BFLOAT16
  return __uint_as_float(static_cast<u32>(bits) << 16);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

__device__ __forceinline__ u16 from_float(float value) {
  u16 bits;
#if IS_BFLOAT16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
  return bits;
}

#ifdef KV_E4M3
// Returns two numbers of 8 bits, `low` in the lower ones; what is too large becomes the largest.
__device__ __forceinline__ u16 to_e4m3(float low, float high) {
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
#endif
#endif

#ifdef KV_E4M3
__device__ __forceinline__ void store(Stored* to, const Vector& vector, float inverse) {
  Packed packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed.at[i] =
        to_e4m3(to_float(vector.at[2 * i]) * inverse, to_float(vector.at[2 * i + 1]) * inverse);
  }
  *reinterpret_cast<uint2*>(to) = packed.whole;
}
#endif

__device__ __forceinline__ float sum_of_head(float value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// heads:     (num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM), tokens `token_stride` apart:
//            queries, keys, values. num_heads may be 0.
// positions: (num_tokens), into the tables `cosine` and `sine`, (positions, HALF).
// slots:     (num_tokens), block * block_size + offset; a negative one stores nothing.
// q_norm, k_norm: (HEAD_DIM), or null where the model has none.
// keys, values: this layer's planes of block 0; blocks are `block_stride` numbers apart, and a
//            plane is (block_size, num_kv_heads, HEAD_DIM).
// scales, inverses: of the layer's keys and values; what is stored is number * inverse.
// trailer:   this layer's two scales in block 0; a block's are written with its first slot.
extern "C" __global__ void rotate_store(u16* heads, long long token_stride, int num_tokens,
                                        int num_heads, int num_kv_heads, const int* positions,
                                        const int* slots, const float* cosine, const float* sine,
                                        const u16* q_norm, const u16* k_norm, float epsilon,
                                        Stored* keys, Stored* values, long long block_stride,
                                        int block_size
#ifdef KV_E4M3
                                        ,
                                        float key_scale, float value_scale, float key_inverse,
                                        float value_inverse, float* trailer
#endif
) {
  const int num_all = num_heads + 2 * num_kv_heads;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long item = thread / LANES;
  const int lane = static_cast<int>(thread % LANES);
  // Lanes beyond the end go on with the last head, because every lane takes part in the sums.
  const long long last = static_cast<long long>(num_tokens) * num_all - 1;
  const bool is_real = item <= last;
  const long long place = is_real ? item : last;
  const int token = static_cast<int>(place / num_all);
  const int head = static_cast<int>(place % num_all);
  const int first = lane * 8;

  u16* source = heads + token * token_stride + static_cast<long long>(head) * HEAD_DIM;
  Vector low = load(source + first);
  Vector high = load(source + HALF + first);
  const bool is_value = head >= num_heads + num_kv_heads;
  const u16* norm = is_value ? nullptr : (head < num_heads ? q_norm : k_norm);

  float a[8], b[8];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    a[i] = to_float(low.at[i]);
    b[i] = to_float(high.at[i]);
    squares += a[i] * a[i] + b[i] * b[i];
  }
  squares = sum_of_head(squares);
  if (!is_real) return;

  if (norm != nullptr) {
    const float scale = rsqrtf(squares / HEAD_DIM + epsilon);
    const Vector low_norm = load(norm + first), high_norm = load(norm + HALF + first);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] *= scale * to_float(low_norm.at[i]);
      b[i] *= scale * to_float(high_norm.at[i]);
    }
  }
  if (!is_value) {
    const long long row = static_cast<long long>(positions[token]) * HALF + first;
    const Angles c = load(cosine + row), s = load(sine + row);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      low.at[i] = from_float(a[i] * c.at[i] - b[i] * s.at[i]);
      high.at[i] = from_float(b[i] * c.at[i] + a[i] * s.at[i]);
    }
    store(source + first, low);
    store(source + HALF + first, high);
  }
  if (head < num_heads || slots[token] < 0) return;

  const int slot = slots[token];
  const int kv_head = is_value ? head - num_heads - num_kv_heads : head - num_heads;
  const long long offset = static_cast<long long>(slot / block_size) * block_stride +
                           (static_cast<long long>(slot % block_size) * num_kv_heads + kv_head) *
                               HEAD_DIM;
  Stored* target = (is_value ? values : keys) + offset;
#ifdef KV_E4M3
  const float inverse = is_value ? value_inverse : key_inverse;
  store(target + first, low, inverse);
  store(target + HALF + first, high, inverse);
  if (slot % block_size == 0 && kv_head == 0 && lane == 0) {
    float* scale = trailer + slot / block_size * (block_stride / sizeof(float));
    scale[is_value] = is_value ? value_scale : key_scale;
  }
#else
  store(target + first, low);
  store(target + HALF + first, high);
#endif
}
