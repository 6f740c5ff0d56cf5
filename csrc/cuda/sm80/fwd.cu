// SPDX-License-Identifier: Apache-2.0
//
// Forward for every architecture from sm_80: mma.sync, K and V by cp.async in two stages.
//
//     tile n + 1   load K, V ........................
//     tile n             S = Q K^T | mask, softmax | O = O alpha + P V
//
// A block has one tile of rows, all heads of a group side by side; Q stays in shared memory, S, P and O in registers. A warp owns
// kRowBlocks x 16 rows alone, so the softmax needs no shared memory. A row's sums run over key tiles anchored at key 0, and a masked key
// adds zero: its bits do not depend on its neighbours. Shared memory: Q, then per stage K and V; rows of kHeadDim elements whose 16-byte
// chunk c lies at c ^ (row % 8), so that ldmatrix meets no bank twice. head_dim below kHeadDim is filled with zeros by the loads.

#include "cuda/attn/work.cuh"
#include "cuda/cuda_backend.h"
#include "cuda/device/ptx_sm80.cuh"

namespace sa {
namespace {

template <class Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kRowBlocks_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kTileQ = kTileQ_, kTileK = kTileK_, kRowBlocks = kRowBlocks_; // of 16 rows, a warp
    static constexpr int kWarpRows = 16 * kRowBlocks, kThreads = 32 * kTileQ / kWarpRows;
    static constexpr int kChunks = kHeadDim / 8, kRowBytes = kHeadDim * 2;
    static constexpr int kQueryBytes = kTileQ * kRowBytes, kKeyBytes = kTileK * kRowBytes, kStageBytes = 2 * kKeyBytes;
    static constexpr int kSharedBytes = kQueryBytes + 2 * kStageBytes;
    static_assert(kHeadDim % 64 == 0 && kTileK % 16 == 0, "a warp reads whole swizzled rows, and 16 keys a product");
    static_assert(kTileQ % kWarpRows == 0 && kThreads % kChunks == 0 && kTileK % (kThreads / kChunks) == 0,
                  "threads share the work evenly");
};

template <class C> __device__ __forceinline__ uint32_t chunk_address(uint32_t base, int row, int chunk) {
    return base + row * C::kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// What each row of the tile sees: [0, sink_end) and [begin, end). In shared memory: only masked tiles ask.
template <class C> struct RowKeys {
    int32_t begin[C::kTileQ], end[C::kTileQ], sink_end[C::kTileQ];

    __device__ __forceinline__ bool sees(int row, int32_t j) const { return (j >= begin[row] && j < end[row]) || j < sink_end[row]; }
};

// The rows of a thread's accumulators, 2 a row block. pivot in log2 units; sum over this lane's columns.
template <class C> struct Rows {
    float pivot[2 * C::kRowBlocks], sum[2 * C::kRowBlocks];
};

// The i-th of a thread's rows, in the tile.
template <class C> __device__ __forceinline__ int thread_row(int i) {
    return threadIdx.x / 32 * C::kWarpRows + (i / 2) * 16 + (i & 1) * 8 + threadIdx.x % 32 / 4;
}

template <class C> __device__ __forceinline__ float s_aux_of(const sinkattn_fwd_args &args, const Work &work, int64_t r) {
    if (!work.has_sink) return -INFINITY;
    return static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, work.kv_head * work.group + r % work.group));
}

template <class C>
__device__ __forceinline__ void start_rows(Rows<C> &rows, RowKeys<C> &row_keys, const sinkattn_fwd_args &args, const Work &work) {
    for (int row = threadIdx.x; row < C::kTileQ; row += C::kThreads) {
        const int64_t r = work.rows.begin + row;
        const sa_range keys = r < work.rows.end ? sa_row_band(&work.band, r / work.group) : sa_range{0, 0};
        row_keys.begin[row] = static_cast<int32_t>(keys.begin);
        row_keys.end[row] = static_cast<int32_t>(keys.end);
        row_keys.sink_end[row] = r < work.rows.end ? static_cast<int32_t>(sa_row_sink_end(&work.band, r / work.group)) : 0;
    }
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        const int64_t r = work.rows.begin + thread_row<C>(i);
        const float s = r < work.rows.end ? s_aux_of<C>(args, work, r) : -INFINITY;
        rows.pivot[i] = s * kLog2e;
        rows.sum[i] = threadIdx.x % 4 == 0 ? static_cast<float>(sa_sink_sum(s)) : 0.0f;
    }
}

// A thread copies one column of chunks, kRowStep rows apart.
template <class C> struct Loader {
    static constexpr int kRowStep = C::kThreads / C::kChunks;
    int row, chunk;
    bool valid;

    __device__ __forceinline__ explicit Loader(int64_t head_dim)
        : row(threadIdx.x / C::kChunks), chunk(threadIdx.x % C::kChunks), valid(chunk * 8 < head_dim) {}

    __device__ __forceinline__ void load_queries(uint32_t to, const sinkattn_fwd_args &args, const Work &work) const {
        const auto *data = static_cast<const uint16_t *>(args.q.data);
        for (int i = row; i < C::kTileQ; i += kRowStep) {
            const bool real = valid && work.rows.begin + i < work.rows.end;
            cp_async_16(chunk_address<C>(to, i, chunk), data + (real ? query_offset(work, args.q, work.rows.begin + i) + chunk * 8 : 0),
                        real);
        }
    }

    // Keys outside [keys.begin, keys.end) become zeros: nothing that no row sees is ever read.
    __device__ __forceinline__ void load_keys(uint32_t to, const uint16_t *base, int64_t row_stride, int64_t first, sa_range keys) const {
        const int begin = static_cast<int>(keys.begin - first), end = static_cast<int>(keys.end - first);
        const uint16_t *from = base + (first + row) * row_stride + chunk * 8;
#pragma unroll
        for (int i = 0; i < C::kTileK / kRowStep; i++) {
            const bool real = valid && row + i * kRowStep >= begin && row + i * kRowStep < end;
            cp_async_16(chunk_address<C>(to, row + i * kRowStep, chunk), real ? from : base, real);
            from += kRowStep * row_stride;
        }
    }
};

template <class C>
__device__ __forceinline__ void qk_product(float (&s)[C::kRowBlocks][C::kTileK / 8][4], uint32_t q, uint32_t k, bool negate) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int b = 0; b < C::kRowBlocks; b++)
        for (int n = 0; n < C::kTileK / 8; n++)
            for (int x = 0; x < 4; x++) s[b][n][x] = 0.0f;
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; step++) {
        uint32_t a[C::kRowBlocks][4];
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; b++)
            ldmatrix_x4(a[b], chunk_address<C>(q, warp * C::kWarpRows + b * 16 + (lane & 15), 2 * step + (lane >> 4)));
        if (negate)
#pragma unroll
            for (int b = 0; b < C::kRowBlocks; b++)
                for (uint32_t &pair : a[b]) pair ^= 0x80008000u;
#pragma unroll
        for (int n = 0; n < C::kTileK / 16; n++) {
            uint32_t keys[4];
            ldmatrix_x4(keys, chunk_address<C>(k, n * 16 + (lane & 7) + ((lane >> 4) << 3), 2 * step + ((lane >> 3) & 1)));
#pragma unroll
            for (int b = 0; b < C::kRowBlocks; b++) {
                mma_m16n8k16<typename C::Element>(s[b][2 * n], a[b], keys[0], keys[1]);
                mma_m16n8k16<typename C::Element>(s[b][2 * n + 1], a[b], keys[2], keys[3]);
            }
        }
    }
}

// Scores to -inf where the row does not see the key. first is the tile's first key.
template <class C>
__device__ __forceinline__ void mask_tile(float (&s)[C::kRowBlocks][C::kTileK / 8][4], const RowKeys<C> &row_keys, int32_t first) {
    const int32_t column = first + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        const int row = thread_row<C>(i);
        const int32_t begin = row_keys.begin[row] - column, end = row_keys.end[row] - column, sink_end = row_keys.sink_end[row] - column;
#pragma unroll
        for (int n = 0; n < C::kTileK / 8; n++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int32_t j = n * 8 + x;
                if (!((j >= begin && j < end) || j < sink_end)) s[i / 2][n][2 * (i & 1) + x] = -INFINITY;
            }
    }
}

// s becomes P; o is rescaled to the new pivot.
template <class C>
__device__ __forceinline__ void softmax_step(float (&s)[C::kRowBlocks][C::kTileK / 8][4], float (&o)[C::kRowBlocks][C::kHeadDim / 8][4],
                                             Rows<C> &rows, float scale_log2) {
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        const int b = i / 2, half = 2 * (i & 1);
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < C::kTileK / 8; n++)
#pragma unroll
            for (int x = half; x < half + 2; x++) top = fmaxf(top, s[b][n][x]);
        top = quad_max(top) * scale_log2;
        const float before = rows.pivot[i];
        const float pivot = top > before ? top : before; // a NaN in s_aux stays
        const float from = pivot == -INFINITY ? 0.0f : pivot;
        const float alpha = before == pivot ? 1.0f : exp2_approx(before - from);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < C::kTileK / 8; n++)
#pragma unroll
            for (int x = half; x < half + 2; x++) {
                s[b][n][x] = exp2_approx(fmaf(s[b][n][x], scale_log2, -from));
                sum += s[b][n][x];
            }
        rows.pivot[i] = pivot;
        rows.sum[i] = rows.sum[i] * alpha + sum;
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n++)
#pragma unroll
            for (int x = half; x < half + 2; x++) o[b][n][x] *= alpha;
    }
}

template <class C>
__device__ __forceinline__ void pv_product(float (&o)[C::kRowBlocks][C::kHeadDim / 8][4], const float (&p)[C::kRowBlocks][C::kTileK / 8][4],
                                           uint32_t v) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; step++) {
        uint32_t a[C::kRowBlocks][4];
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; b++)
#pragma unroll
            for (int x = 0; x < 4; x++)
                a[b][x] = pack_halves<typename C::Element>(p[b][2 * step + x / 2][2 * (x & 1)], p[b][2 * step + x / 2][2 * (x & 1) + 1]);
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 16; n++) {
            uint32_t values[4];
            ldmatrix_x4_trans(values, chunk_address<C>(v, step * 16 + (lane & 15), 2 * n + (lane >> 4)));
#pragma unroll
            for (int b = 0; b < C::kRowBlocks; b++) {
                mma_m16n8k16<typename C::Element>(o[b][2 * n], a[b], values[0], values[1]);
                mma_m16n8k16<typename C::Element>(o[b][2 * n + 1], a[b], values[2], values[3]);
            }
        }
    }
}

// A masked key's P is 0, but 0 * NaN is not: where a value that is not finite meets rows that do not see it, it is zeroed in shared memory
// and added by hand to the rows that do. Every thread of the block comes here.
template <class C>
__device__ __forceinline__ void hide_unfinite(unsigned char *values, float (&o)[C::kRowBlocks][C::kHeadDim / 8][4],
                                              const RowKeys<C> &row_keys, int32_t first) {
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll 1
    for (int key = 0; key < C::kTileK; key++) {
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n++) {
            const auto *chunk = reinterpret_cast<const uint16_t *>(values + key * C::kRowBytes + ((n ^ (key & 7)) << 4));
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const uint16_t half = chunk[column + x];
                if ((half & kExponent<typename C::Element>) != kExponent<typename C::Element>) continue;
#pragma unroll
                for (int i = 0; i < 2 * C::kRowBlocks; i++)
                    if (row_keys.sees(thread_row<C>(i), first + key)) o[i / 2][n][2 * (i & 1) + x] += widen<typename C::Element>(half);
            }
        }
    }
    __syncthreads();
    for (int x = threadIdx.x; x < C::kKeyBytes / 2; x += C::kThreads) {
        auto &half = reinterpret_cast<uint16_t *>(values)[x];
        if ((half & kExponent<typename C::Element>) == kExponent<typename C::Element>) half = 0;
    }
    __syncthreads();
}

template <class C> __device__ __forceinline__ bool sees_unfinite(const unsigned char *values) {
    bool bad = false;
    for (int x = threadIdx.x; x < C::kKeyBytes / 16; x += C::kThreads) {
        const uint4 halves = reinterpret_cast<const uint4 *>(values)[x];
        for (const uint32_t pair : {halves.x, halves.y, halves.z, halves.w}) {
            constexpr uint32_t kLow = kExponent<typename C::Element>, kHigh = kLow << 16;
            bad |= (pair & kLow) == kLow || (pair & kHigh) == kHigh;
        }
    }
    return __syncthreads_or(bad);
}

// out through shared memory, where Q was: a row leaves in whole 16-byte chunks.
template <class C>
__device__ __forceinline__ void write_out(unsigned char *shared, float (&o)[C::kRowBlocks][C::kHeadDim / 8][4], const Rows<C> &rows,
                                          const sinkattn_fwd_args &args, const Work &work) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        const float sum = quad_sum(rows.sum[i]);
        const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = thread_row<C>(i);
        const int64_t r = work.rows.begin + row;
        if (r < work.rows.end && lane % 4 == 0) {
            const float s = s_aux_of<C>(args, work, r);
            const float pivot = rows.pivot[i] == s * kLog2e ? s : rows.pivot[i] * kLn2; // a row without keys gets s itself
            static_cast<float *>(args.lse)[stat_index(work, args.problem, r)] = sum == 0.0f ? -INFINITY : pivot + logf(sum);
        }
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n++) {
            const float *pair = &o[i / 2][n][2 * (i & 1)];
            *reinterpret_cast<uint32_t *>(shared + row * C::kRowBytes + ((n ^ (row & 7)) << 4) + 4 * (lane % 4)) =
                pack_halves<typename C::Element>(pair[0] * factor, pair[1] * factor);
        }
    }
    __syncwarp();
    auto *out = static_cast<uint16_t *>(args.out.data);
    for (int x = lane; x < C::kWarpRows * C::kChunks; x += 32) {
        const int row = warp * C::kWarpRows + x / C::kChunks, chunk = x % C::kChunks;
        if (work.rows.begin + row >= work.rows.end || chunk * 8 >= args.problem.head_dim) continue;
        const uint4 halves = *reinterpret_cast<const uint4 *>(shared + row * C::kRowBytes + ((chunk ^ (row & 7)) << 4));
        *reinterpret_cast<uint4 *>(out + query_offset(work, args.out, work.rows.begin + row) + chunk * 8) = halves;
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads) void fwd_kernel(const __grid_constant__ sinkattn_fwd_args args, int64_t num_tiles,
                                                          float scale_log2, unsigned *error_word) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ RowKeys<C> row_keys;
    __shared__ Work work; // out of the registers, which the loop needs
    __shared__ bool has_work;
    if (blockIdx.x == 0) check_lengths(args, error_word);
    if (threadIdx.x == 0) has_work = find_work(args, C::kTileQ, C::kTileK, num_tiles, blockIdx.x, work);
    __syncthreads();
    if (!has_work) return;

    const uint32_t q = shared_address(shared), stages = q + C::kQueryBytes;
    const Loader<C> loader(args.problem.head_dim);
    const uint16_t *keys_base = static_cast<const uint16_t *>(args.k.data) + key_offset(work, args.k, 0);
    const uint16_t *values_base = static_cast<const uint16_t *>(args.v.data) + key_offset(work, args.v, 0);
    const sa_key_tiles tiles = work.tiles;
    const auto load = [&](int t, int stage) {
        const uint32_t to = stages + stage * C::kStageBytes;
        const sa_range keys = sa_key_tile(&work.tiles, t);
        loader.load_keys(to, keys_base, args.k.row_stride, static_cast<int64_t>(t) * C::kTileK, keys);
        loader.load_keys(to + C::kKeyBytes, values_base, args.v.row_stride, static_cast<int64_t>(t) * C::kTileK, keys);
    };
    int t = sa_key_tile_from(&tiles, 0);
    loader.load_queries(q, args, work);
    if (t < tiles.end) load(t, 0);
    cp_async_commit();

    Rows<C> rows;
    start_rows<C>(rows, row_keys, args, work);
    float o[C::kRowBlocks][C::kHeadDim / 8][4] = {};
    for (int stage = 0; t < tiles.end; stage ^= 1) {
        const int next = sa_key_tile_from(&tiles, t + 1);
        cp_async_wait<0>();
        __syncthreads(); // tile t has landed, and nobody reads the other stage any more
        if (next < tiles.end) load(next, stage ^ 1);
        cp_async_commit();

        const uint32_t k = stages + stage * C::kStageBytes;
        float s[C::kRowBlocks][C::kTileK / 8][4];
        qk_product<C>(s, q, k, scale_log2 < 0.0f);
        const int32_t first = t * C::kTileK;
        const bool masked = !sa_key_tile_is_full(&tiles, t);
        if (masked) mask_tile<C>(s, row_keys, first);
        softmax_step<C>(s, o, rows, fabsf(scale_log2));
        unsigned char *values = shared + C::kQueryBytes + stage * C::kStageBytes + C::kKeyBytes;
        if (masked && sees_unfinite<C>(values)) hide_unfinite<C>(values, o, row_keys, first);
        pv_product<C>(o, s, k + C::kKeyBytes);
        t = next;
    }
    cp_async_wait<0>();
    __syncthreads();
    write_out<C>(shared, o, rows, args, work);
}

template <class C> sinkattn_status launch(const sinkattn_fwd_args &args, const sinkattn_context &context) {
    const int64_t num_tiles = num_row_tiles(args.problem, C::kTileQ), num_blocks = num_tiles * args.problem.num_kv_heads;
    if (num_blocks == 0) return sa_ok();
    if (num_blocks > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows; a launch holds at most 2^31", static_cast<long long>(num_blocks));
    unsigned *error_word;
    sinkattn_status status = sa_cuda_error_word(&error_word);
    if (status.code) return status;
    status = allow_shared<fwd_kernel<C>>(C::kSharedBytes);
    if (status.code) return status;
    const float scale_log2 = static_cast<float>(sa_softmax_scale(&args.problem)) * kLog2e;
    fwd_kernel<C><<<static_cast<unsigned>(num_blocks), C::kThreads, C::kSharedBytes, static_cast<cudaStream_t>(context.stream)>>>(
        args, num_tiles, scale_log2, error_word);
    return sa_cuda_status("sa_fwd_cuda_sm80", cudaGetLastError());
}

template <int kHeadDim, int kTileQ, int kTileK, int kRowBlocks>
sinkattn_status launch_dtype(const sinkattn_fwd_args &args, const sinkattn_context &context) {
    if (args.problem.dtype == SINKATTN_BF16) return launch<Config<Bf16, kHeadDim, kTileQ, kTileK, kRowBlocks>>(args, context);
    return launch<Config<Fp16, kHeadDim, kTileQ, kTileK, kRowBlocks>>(args, context);
}

// Two row blocks a warp halve the reads of K and V; at head_dim 256, O alone would fill the registers.
template <int kHeadDim, int kTileQ, int kTileK> sinkattn_status launch_mask(const void *arguments, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_fwd_args *>(arguments);
    if constexpr (kHeadDim == 64) // less of a narrow window's tiles is masked where they are small
        if (sa_window_keys(&args.problem.mask) <= 2 * kTileK) return launch_dtype<kHeadDim, kTileQ, 32, 1>(args, *context);
    return launch_dtype<kHeadDim, kTileQ, kTileK, kHeadDim <= 128 ? 2 : 1>(args, *context);
}

} // namespace
} // namespace sa

extern "C" sinkattn_status sa_fwd_cuda_sm80_d64(const void *args, const sinkattn_plan *, const sinkattn_context *context) {
    return sa::launch_mask<64, sa::sa_fwd_cuda_sm80_d64_tile_q, sa::sa_fwd_cuda_sm80_d64_tile_k>(args, context);
}

extern "C" sinkattn_status sa_fwd_cuda_sm80_d128(const void *args, const sinkattn_plan *, const sinkattn_context *context) {
    return sa::launch_mask<128, sa::sa_fwd_cuda_sm80_d128_tile_q, sa::sa_fwd_cuda_sm80_d128_tile_k>(args, context);
}

extern "C" sinkattn_status sa_fwd_cuda_sm80_d256(const void *args, const sinkattn_plan *, const sinkattn_context *context) {
    return sa::launch_mask<256, sa::sa_fwd_cuda_sm80_d256_tile_q, sa::sa_fwd_cuda_sm80_d256_tile_k>(args, context);
}
