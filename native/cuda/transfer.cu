// Copies of whole KV blocks between pools, and the checksums of blocks, in one launch for any number
// of blocks in any order. Compiled at run time (NVRTC, CUDA 12 and 13; no headers).
//
// A block is `block_vectors` pieces of 16 bytes (a multiple of 256: blocks are whole pages). It is
// cut into chunks of blockDim.x * unroll vectors; all chunks of all blocks, in order, are dealt out
// in equal contiguous ranges, one for each CTA:
//
//   block 0                     block 1                     block 2
//   | c0 | c1 | c2 | c3 | c4 |  | c0 | c1 | c2 | c3 | c4 |  | c0 | ...
//   '------ CTA 0 ------''-------- CTA 1 --------''-------- CTA 2 --------'
//
// so that a CTA meets few block borders, and adds to a block's sum once for each border. The grid
// may have any size: fewer CTAs leave more of the device to others. blockDim.x is a multiple of 32.
//
// The checksum is that of memory/checksum.hpp. Its sum is taken here, in any order, on top of what
// `sums` holds (zero at the start); the part after the sum is the caller's.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u64 key_step = 0x9E3779B97F4A7C15ull;
constexpr u32 row_vectors = 32;  // 64 words of 8 bytes
constexpr u32 unroll = 4;        // loads of 16 bytes that a thread has in flight

__device__ __forceinline__ u64 mix(u64 h) {
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    return h ^ (h >> 31);
}

__device__ __forceinline__ u64 term(u32 low, u32 high, u64 key) {
    const u32 x_low = low ^ static_cast<u32>(key);
    const u32 x_high = high ^ static_cast<u32>(key >> 32);
    return static_cast<u64>(x_low) * x_high + (static_cast<u64>(x_high) << 32 | x_low);
}

template <bool is_copied>
__device__ __forceinline__ void run(const uint4* source, uint4* target, const int* source_ids,
                                    const int* target_ids, u64* sums, u32 num_blocks,
                                    u32 block_vectors) {
    const u32 chunk_vectors = blockDim.x * unroll;
    const u32 block_chunks = (block_vectors + chunk_vectors - 1) / chunk_vectors;
    const u64 num_chunks = static_cast<u64>(num_blocks) * block_chunks;
    const u64 first = num_chunks * blockIdx.x / gridDim.x;
    u32 left = static_cast<u32>(num_chunks * (blockIdx.x + 1) / gridDim.x - first);
    u32 block = static_cast<u32>(first / block_chunks);
    u32 chunk = static_cast<u32>(first % block_chunks);

    // A thread strides by whole rows, so that it always meets the same two words of a row: their
    // keys in the first row are its own, and each further row adds one number.
    const u32 word = 2 * (threadIdx.x % row_vectors);
    const u64 first_key = mix((word + 1) * key_step);
    const u64 second_key = mix((word + 2) * key_step);
    const u64 stride_shift = blockDim.x / row_vectors * key_step;

    while (left > 0) {
        const u32 taken = min(left, block_chunks - chunk);
        const uint4* const from = source + static_cast<u64>(source_ids[block]) * block_vectors;
        uint4* const to =
            is_copied ? target + static_cast<u64>(target_ids[block]) * block_vectors : nullptr;
        u32 at = chunk * chunk_vectors + threadIdx.x;
        u64 shift = at / row_vectors * key_step;
        u64 sum = 0;
        for (u32 n = 0; n < taken; ++n) {
            uint4 data[unroll];
#pragma unroll
            for (u32 i = 0; i < unroll; ++i) {
                if (at + i * blockDim.x < block_vectors) {
                    data[i] = __ldcs(from + at + i * blockDim.x);
                }
            }
#pragma unroll
            for (u32 i = 0; i < unroll; ++i) {
                if (at < block_vectors) {
                    if (is_copied) {
                        __stcs(to + at, data[i]);
                    }
                    sum += term(data[i].x, data[i].y, first_key + shift);
                    sum += term(data[i].z, data[i].w, second_key + shift);
                }
                at += blockDim.x;
                shift += stride_shift;
            }
        }
        for (u32 distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_down_sync(0xFFFFFFFFu, sum, distance);
        }
        if (threadIdx.x % 32 == 0) {
            atomicAdd(sums + block, sum);
        }
        left -= taken;
        ++block;
        chunk = 0;
    }
}

// target[target_ids[i]] = source[source_ids[i]] for all i; sums[i] += the block's checksum terms.
// The pools do not overlap where a block is written; no target is given twice.
extern "C" __global__ void __launch_bounds__(512)
    copy_blocks(const uint4* source, uint4* target, const int* source_ids, const int* target_ids,
                u64* sums, u32 num_blocks, u32 block_vectors) {
    run<true>(source, target, source_ids, target_ids, sums, num_blocks, block_vectors);
}

// sums[i] += the checksum terms of source[source_ids[i]]; nothing is written beside.
extern "C" __global__ void __launch_bounds__(512)
    sum_blocks(const uint4* source, const int* source_ids, u64* sums, u32 num_blocks,
               u32 block_vectors) {
    run<false>(source, nullptr, source_ids, nullptr, sums, num_blocks, block_vectors);
}

// Parts of blocks, between pools whose blocks differ in width (common/transfer/heads.py). Numbers are
// of vectors. In block i, num_pieces pieces of piece_vectors go from source_offset on, source_stride
// apart, to target_offset on, target_stride apart; then rest_vectors follow from rest_source to
// rest_target, and behind them zero_vectors zeros are written. sums[i] += the checksum terms of what
// is written, where it lies in the target's block: the parts that several launches write into one
// block add up. A CTA's range is cut as above, over the vectors that are written.
extern "C" __global__ void __launch_bounds__(512)
    copy_pieces(const uint4* source, uint4* target, const int* source_ids, const int* target_ids,
                u64* sums, u32 num_blocks, u32 source_vectors, u32 target_vectors,
                u32 source_offset, u32 target_offset, u32 piece_vectors, u32 num_pieces,
                u32 source_stride, u32 target_stride, u32 rest_source, u32 rest_target,
                u32 rest_vectors, u32 zero_vectors) {
    const u32 in_pieces = piece_vectors * num_pieces;
    const u32 copied_vectors = in_pieces + rest_vectors;
    const u32 written_vectors = copied_vectors + zero_vectors;
    const u32 chunk_vectors = blockDim.x * unroll;
    const u32 block_chunks = (written_vectors + chunk_vectors - 1) / chunk_vectors;
    const u64 num_chunks = static_cast<u64>(num_blocks) * block_chunks;
    const u64 first = num_chunks * blockIdx.x / gridDim.x;
    u32 left = static_cast<u32>(num_chunks * (blockIdx.x + 1) / gridDim.x - first);
    u32 block = static_cast<u32>(first / block_chunks);
    u32 chunk = static_cast<u32>(first % block_chunks);

    while (left > 0) {
        const u32 taken = min(left, block_chunks - chunk);
        const uint4* const from = source + static_cast<u64>(source_ids[block]) * source_vectors;
        uint4* const to = target + static_cast<u64>(target_ids[block]) * target_vectors;
        u32 at = chunk * chunk_vectors + threadIdx.x;
        u64 sum = 0;
        for (u32 n = 0; n < taken; ++n) {
            uint4 data[unroll];
            u32 place[unroll];
#pragma unroll
            for (u32 i = 0; i < unroll; ++i) {
                const u32 v = at + i * blockDim.x;
                data[i] = uint4{0, 0, 0, 0};
                if (v < in_pieces) {
                    const u32 piece = v / piece_vectors;
                    const u32 inside = v - piece * piece_vectors;
                    place[i] = target_offset + piece * target_stride + inside;
                    data[i] = __ldcs(from + source_offset + piece * source_stride + inside);
                } else {
                    place[i] = rest_target + (v - in_pieces);
                    if (v < copied_vectors) {
                        data[i] = __ldcs(from + rest_source + (v - in_pieces));
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < unroll; ++i) {
                if (at < written_vectors) {
                    __stcs(to + place[i], data[i]);
                    const u32 word = 2 * (place[i] % row_vectors);
                    const u64 shift = place[i] / row_vectors * key_step;
                    sum += term(data[i].x, data[i].y, mix((word + 1) * key_step) + shift);
                    sum += term(data[i].z, data[i].w, mix((word + 2) * key_step) + shift);
                }
                at += blockDim.x;
            }
        }
        for (u32 distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_down_sync(0xFFFFFFFFu, sum, distance);
        }
        if (threadIdx.x % 32 == 0) {
            atomicAdd(sums + block, sum);
        }
        left -= taken;
        ++block;
        chunk = 0;
    }
}
