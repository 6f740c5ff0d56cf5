// SPDX-License-Identifier: Apache-2.0
//
// Forward for every architecture from sm_80: mma.sync, K and V by cp.async in two stages.
//
//     tile n + 1   load K, V ........................
//     tile n             S = Q K^T | mask, maxima | P of 16 keys, O += P V of 16 keys, ..
//
// A block has one tile of rows, all heads of a GQA group side by side; Q stays in shared memory, S, P and O in registers. A warp owns
// kRowBlocks x 16 rows alone, so the softmax needs no shared memory. A row's sums run over key tiles anchored at key 0, and a masked key
// adds zero: the row's bits do not depend on its neighbours. Shared memory: Q, then K and V of each stage, 25 to 130 KiB; swizzled rows of
// kHeadDim elements, zero-filled by the loads past head_dim, of V past head_dim_v. Registers: 80 or 255; docs/kernels/fwd_sm80.md has the
// budget.

#include "cuda/host/launch.cuh"
#include "cuda/tile/mma.cuh"
#include "cuda/tile/pivot.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/work/items.cuh"
#include "cuda/work/keys.cuh"
#include "cuda/work/tile_walk.cuh"

namespace sa::fwd_sm80 {
namespace {

// A warp owns kRowBlocks x 16 rows; registers are limited so that an SM holds kMinBlocks blocks of threads.
template <class Element_, class Keys_, int kHeadDim_, int kTileQ_, int kTileK_, int kRowBlocks_, int kMinBlocks_> struct Config {
    using Element = Element_;
    using Keys = Keys_;
    static constexpr int kHeadDim = kHeadDim_, kTileQ = kTileQ_, kTileK = kTileK_, kRowBlocks = kRowBlocks_, kMinBlocks = kMinBlocks_;
    static constexpr int kWarpRows = 16 * kRowBlocks, kThreads = 32 * kTileQ / kWarpRows;
    static constexpr int kChunks = kHeadDim / 8, kRowBytes = kHeadDim * 2;
    static constexpr int kQueryBytes = kTileQ * kRowBytes, kKeyBytes = kTileK * kRowBytes, kStageBytes = 2 * kKeyBytes;
    static constexpr int kSharedBytes = kQueryBytes + 2 * kStageBytes;

    // Of V and out. Smaller kernels, whose values are as wide as keys, have no register for it.
    __device__ __forceinline__ static int64_t head_dim_v(const sinkattn_problem &problem) {
        return kHeadDim > 128 ? sa_head_dim_v(&problem) : problem.head_dim;
    }

    static_assert(kHeadDim % 64 == 0 && kTileK % 16 == 0, "a warp reads whole swizzled rows, and 16 keys a product");
    static_assert(
            kTileQ % kWarpRows == 0 && kThreads % kChunks == 0 && kTileK % (kThreads / kChunks) == 0, "threads share the work evenly");
    static_assert(kTileQ <= kThreads && kTileK <= kThreads, "each row, and each key's page, is found by a thread of its own");
};

// Row r of a kv head: its token in the sequence, and its head in the GQA group.
struct TokenHead {
    uint32_t token, head;

    __device__ __forceinline__ TokenHead(sa_position_t r, sa_position_t group, sa_divisor by_group)
        : token(sa_divide(static_cast<uint32_t>(r), by_group)), head(static_cast<uint32_t>(r) - token * static_cast<uint32_t>(group)) {}

    __device__ __forceinline__ int64_t offset(const sinkattn_tensor &tensor) const {
        return token * tensor.row_stride + head * tensor.head_stride;
    }
};

// The block's work, found by one thread. In shared memory: the loop needs the registers.
struct Block {
    Work work;
    const uint16_t *q, *k, *v; // at row 0, or key 0; of a cache, at the kv head
    uint16_t *out;
    bool has_work;
};

template <class C>
__device__ __forceinline__ void find_block(Block &block, const sinkattn_fwd_args &args, const typename C::Keys &keys, int64_t num_tiles) {
    Work &work = block.work;
    block.has_work = find_work(args, C::kTileQ, C::kTileK, num_tiles, blockIdx.x, work, keys);
    if (!block.has_work) return;
    block.q = static_cast<const uint16_t *>(args.q.data) + query_offset(work, args.q, 0);
    const auto first_key = [&](const sinkattn_tensor &tensor) {
        return C::Keys::kCached ? work.kv_head * tensor.head_stride : key_offset(work, tensor, 0);
    };
    block.k = static_cast<const uint16_t *>(args.k.data) + first_key(args.k);
    block.v = static_cast<const uint16_t *>(args.v.data) + first_key(args.v);
    block.out = static_cast<uint16_t *>(args.out.data) + query_offset(work, args.out, 0);
}

// Each row of the tile sees keys [0, sink_end) and [begin, end); rows past the last see its keys. In shared memory: only masked tiles, the
// start and the end read it.
template <class C> struct RowTable {
    int32_t begin[C::kTileQ], end[C::kTileQ], sink_end[C::kTileQ];
    float s_aux[C::kTileQ];

    __device__ __forceinline__ bool sees(int row, int32_t j) const { return (j >= begin[row] && j < end[row]) || j < sink_end[row]; }
};

template <class C> using Scores = float[C::kRowBlocks][C::kTileK / 8][4];

// The state of a thread's rows, 2 a row block: O, the pivot in log2 units, and the sum over this lane's columns.
template <class C> struct Rows {
    float o[C::kRowBlocks][C::kHeadDim / 8][4];
    float pivot[2 * C::kRowBlocks], sum[2 * C::kRowBlocks];
};

template <class C> __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 * C::kWarpRows; }

// The thread's row i, in the tile.
template <class C> __device__ __forceinline__ int thread_row(int i) { return warp_row<C>() + fragment_row(i); }

template <class C>
__device__ __forceinline__ void describe_rows(RowTable<C> &table, const sinkattn_fwd_args &args, const Work &work, sa_divisor by_group) {
    const int row = threadIdx.x;
    if (row >= C::kTileQ) return;
    const TokenHead at(sa_first(work.rows.begin + row, work.rows.end - 1), work.group, by_group);
    const auto i = static_cast<sa_position_t>(at.token);
    const sa_range keys = sa_row_band(&work.band, i);
    table.begin[row] = keys.begin;
    table.end[row] = keys.end;
    table.sink_end[row] = sa_row_sink_end(&work.band, i);
    table.s_aux[row] = work.has_sink
                               ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, work.kv_head * work.group + at.head))
                               : -INFINITY;
}

template <class C> __device__ __forceinline__ void start_rows(Rows<C> &rows) {
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        rows.pivot[i] = -INFINITY;
        rows.sum[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n++) rows.o[i / 2][n][2 * (i & 1)] = rows.o[i / 2][n][2 * (i & 1) + 1] = 0.0f;
    }
}

// A thread copies one column of chunks, kRowStep rows apart.
template <class C> struct Loader {
    static constexpr int kRowStep = C::kThreads / C::kChunks;
    int row, chunk;
    bool valid, valid_v; // the chunk lies within head_dim, within head_dim_v

    __device__ __forceinline__ explicit Loader(const sinkattn_problem &problem)
        : row(threadIdx.x / C::kChunks), chunk(threadIdx.x % C::kChunks), valid(chunk * 8 < problem.head_dim),
          valid_v(chunk * 8 < C::head_dim_v(problem)) {}

    __device__ __forceinline__ uint32_t offset(int i) const { return swizzled<C::kRowBytes>(row + i * kRowStep, chunk); }

    __device__ __forceinline__ void load_queries(
            uint32_t to, const Block &block, const sinkattn_tensor &tensor, sa_divisor by_group) const {
        const uint16_t *q = block.q + chunk * 8;
        const sa_position_t first = block.work.rows.begin + row, end = block.work.rows.end, group = block.work.group;
#pragma unroll
        for (int i = 0; i < C::kTileQ / kRowStep; i++) {
            const sa_position_t r = first + i * kRowStep;
            const bool real = valid && r < end;
            cp_async_16(to + offset(i), q + TokenHead(r, group, by_group).offset(tensor), real);
        }
    }

    // Negates the chunks that this thread loaded.
    __device__ __forceinline__ void negate_queries(unsigned char *q) const {
        for (int i = 0; i < C::kTileQ / kRowStep; i++)
            for (int x = 0; x < 4; x++) reinterpret_cast<uint32_t *>(q + offset(i))[x] ^= 0x80008000u;
    }

    // Keys outside [keys.begin, keys.end) become zeros: a key that no row sees is never read. in_row: the chunk lies within the row.
    __device__ __forceinline__ void load_keys(
            uint32_t to, const uint16_t *base, int64_t row_stride, int32_t first, sa_range keys, bool in_row) const {
        const uint16_t *from = base + (first + row) * row_stride + chunk * 8;
        const auto at = static_cast<unsigned>(first + row - keys.begin), count = static_cast<unsigned>(in_row ? keys.end - keys.begin : 0);
#pragma unroll
        for (int i = 0; i < C::kTileK / kRowStep; i++) {
            cp_async_16(to + offset(i), from, at + i * kRowStep < count);
            from += kRowStep * row_stride;
        }
    }

    // K and V of a cache. pages: of the tile's keys. False if a key that some row sees has no page; it becomes zeros.
    __device__ __forceinline__ bool load_cached(uint32_t to, const Block &block, const sinkattn_fwd_args &args, const CacheKeys &cache,
            const int32_t *pages, int32_t first) const {
        const sa_key_tiles &tiles = block.work.tiles;
        bool complete = true;
#pragma unroll
        for (int i = 0; i < C::kTileK / kRowStep; i++) {
            const int32_t at = row + i * kRowStep, key = first + at, page = pages[at];
            const bool seen = sees_some(tiles, key, key + 1), exists = seen && cache.has_page(page);
            complete &= exists || !seen;
            const auto load = [&](uint32_t tile, const uint16_t *base, const sinkattn_tensor &tensor, bool in_row) {
                cp_async_16(tile + offset(i), base + (exists ? cache.offset(tensor, page, key) : 0) + chunk * 8, exists && in_row);
            };
            load(to, block.k, args.k, valid);
            load(to + C::kKeyBytes, block.v, args.v, valid_v);
        }
        return complete;
    }
};

// The pages of a cache's key tiles, in shared memory: of the tile that is loaded next, and of the one after it.
template <class C> struct PageTable {
    int32_t pages[2][C::Keys::kCached ? C::kTileK : 1];

    // Copies those of tile t by cp.async; of keys that no row sees, nothing is read.
    __device__ __forceinline__ void fetch(int stage, const CacheKeys &cache, const Work &work, int32_t t) {
        if (threadIdx.x >= C::kTileK) return;
        const auto key = static_cast<int32_t>(t * C::kTileK + threadIdx.x);
        const CacheRow row = cache.row(work.sequence);
        int32_t &to = pages[stage][threadIdx.x];
        if (row.pages)
            cp_async_4(shared_address(&to), row.pages + cache.page_index(key), sees_some(work.tiles, key, key + 1));
        else
            to = row.number;
    }
};

// Sets scores to -inf where the row does not see the key. first: the tile's first key.
template <class C> __device__ __forceinline__ void mask_tile(Scores<C> &s, const RowTable<C> &table, int32_t first) {
    const int32_t column = first + fragment_column();
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        const int row = thread_row<C>(i);
        const int32_t begin = table.begin[row] - column, end = table.end[row] - column, sink_end = table.sink_end[row] - column;
#pragma unroll
        for (int n = 0; n < C::kTileK / 8; n++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int32_t j = n * 8 + x;
                if (!((j >= begin && j < end) || j < sink_end)) s[i / 2][n][2 * (i & 1) + x] = -INFINITY;
            }
    }
}

// Raises the rows' pivots for one more tile of scores, and rescales o and the sums. from: what to subtract from the scores, in log2 units.
template <class C>
__device__ __forceinline__ void raise_pivots(float (&from)[2 * C::kRowBlocks], const Scores<C> &s, Rows<C> &rows, float scale_log2) {
    float alpha[2 * C::kRowBlocks];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < C::kTileK / 8; n++)
#pragma unroll
            for (int x = 2 * (i & 1); x < 2 * (i & 1) + 2; x++) top = fmaxf(top, s[i / 2][n][x]);
        top = quad_max(top) * scale_log2;
        const float before = rows.pivot[i];
        const float pivot = top > before + kLazy ? top : before;
        from[i] = pivot == -INFINITY ? 0.0f : pivot;
        alpha[i] = before == pivot ? 1.0f : exp2_approx(before - from[i]);
        grown |= before != pivot;
        rows.pivot[i] = pivot;
    }
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        rows.sum[i] *= alpha[i];
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n++)
#pragma unroll
            for (int x = 2 * (i & 1); x < 2 * (i & 1) + 2; x++) rows.o[i / 2][n][x] *= alpha[i];
    }
}

// O += P V; s becomes P 16 keys at a time, so that their exponentials run under the products of the 16 keys before.
template <class C>
__device__ __forceinline__ void weigh_values(
        Rows<C> &rows, Scores<C> &s, const float (&from)[2 * C::kRowBlocks], float scale_log2, uint32_t v) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; step++) {
#pragma unroll
        for (int i = 0; i < 2 * C::kRowBlocks; i++)
#pragma unroll
            for (int n = 2 * step; n < 2 * step + 2; n++)
#pragma unroll
                for (int x = 2 * (i & 1); x < 2 * (i & 1) + 2; x++) {
                    s[i / 2][n][x] = exp2_approx(fmaf(s[i / 2][n][x], scale_log2, -from[i]));
                    rows.sum[i] += s[i / 2][n][x];
                }
        uint32_t p[C::kRowBlocks][4];
        left_of<typename C::Element>(p, s, step);
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n += 2) {
            uint32_t values[4];
            ldmatrix_x4_trans(values, v + swizzled<C::kRowBytes>(16 * step + left_row(lane), n + left_chunk(lane)));
#pragma unroll
            for (int b = 0; b < C::kRowBlocks; b++) {
                mma_m16n8k16<typename C::Element>(rows.o[b][n], p[b], values[0], values[1]);
                mma_m16n8k16<typename C::Element>(rows.o[b][n + 1], p[b], values[2], values[3]);
            }
        }
    }
}

// A masked key's P is 0, but 0 * NaN is NaN: values that are not finite are added explicitly to the rows that see them, then zeroed in
// shared memory. Called by every thread of the block.
template <class C>
__device__ __forceinline__ void hide_nonfinite(unsigned char *values, Rows<C> &rows, const RowTable<C> &table, int32_t first) {
#pragma unroll 1
    for (int key = 0; key < C::kTileK; key++) {
        bool sees[2 * C::kRowBlocks];
#pragma unroll
        for (int i = 0; i < 2 * C::kRowBlocks; i++) sees[i] = table.sees(thread_row<C>(i), first + key);
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n++) {
            const auto *chunk = reinterpret_cast<const uint16_t *>(values + swizzled<C::kRowBytes>(key, n));
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const uint16_t half = chunk[2 * (threadIdx.x % 4) + x];
                const float value = nonfinite_part<typename C::Element>(half);
#pragma unroll
                for (int i = 0; i < 2 * C::kRowBlocks; i++)
                    if (sees[i]) rows.o[i / 2][n][2 * (i & 1) + x] += value;
            }
        }
    }
    __syncthreads();
    for (int x = threadIdx.x; x < C::kKeyBytes / 2; x += C::kThreads)
        zero_nonfinite<typename C::Element>(reinterpret_cast<uint16_t *>(values)[x]);
    __syncthreads();
}

// Writes out and lse. out leaves through Q's place in shared memory, in whole 16-byte chunks.
template <class C>
__device__ __forceinline__ void write_out(unsigned char *shared, const Rows<C> &rows, const RowTable<C> &table,
        const sinkattn_fwd_args &args, const Block &block, sa_divisor by_group) {
    const int lane = threadIdx.x % 32;
    const Work &work = block.work;
    const sa_position_t first = work.rows.begin, end = work.rows.end, group = work.group;
#pragma unroll
    for (int i = 0; i < 2 * C::kRowBlocks; i++) {
        const float sum = quad_sum(rows.sum[i]);
        const int row = thread_row<C>(i);
        const RowEnd row_end(rows.pivot[i], sum, table.s_aux[row]);
        const float factor = row_end.factor();
        if (first + row < end && lane % 4 == 0) {
            const TokenHead at(first + row, group, by_group);
            const int64_t stat = sa_row_index(&args.problem, &work.sequence, work.kv_head * group + at.head, at.token);
            static_cast<float *>(args.lse)[stat] = row_end.lse();
            if (args.lse_raw) static_cast<float *>(args.lse_raw)[stat] = raw_lse(rows.pivot[i], sum);
        }
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n++) {
            const float *pair = &rows.o[i / 2][n][2 * (i & 1)];
            *reinterpret_cast<uint32_t *>(shared + swizzled<C::kRowBytes>(row, n) + 4 * (lane % 4)) =
                    pack_halves<typename C::Element>(pair[0] * factor, pair[1] * factor);
        }
    }
    __syncwarp();
    uint16_t *out = block.out;
#pragma unroll
    for (int x = lane; x < C::kWarpRows * C::kChunks; x += 32) {
        const int row = warp_row<C>() + x / C::kChunks, chunk = x % C::kChunks;
        if (first + row >= end || chunk * 8 >= C::head_dim_v(args.problem)) continue;
        *reinterpret_cast<uint4 *>(out + TokenHead(first + row, group, by_group).offset(args.out) + chunk * 8) =
                *reinterpret_cast<const uint4 *>(shared + swizzled<C::kRowBytes>(row, chunk));
    }
}

// Works through the key tiles. load(t, stage) copies tile t's K and V; it has begun for the first.
template <class C, class Load>
__device__ __forceinline__ void attend(Rows<C> &rows, unsigned char *shared, const RowTable<C> &table, const sa_key_tiles &tiles,
        float scale_log2, bool hide, const Load &load) {
    const uint32_t q = shared_address(shared);
    int stage = 0;
    for (KeyTileWalk tile(tiles); tile.exists(); stage ^= 1) {
        const KeyTileWalk next(tiles, tile.t + 1);
        cp_async_wait<0>(); // in flight: this tile's copies, with a cache the next tile's pages; before the first, Q's too
        __syncthreads();    // they have landed, and no thread reads the other stage any more
        if (next.exists()) load(next.t, stage ^ 1);

        const int stage_at = C::kQueryBytes + stage * C::kStageBytes, values_at = stage_at + C::kKeyBytes;
        Scores<C> s;
        float from[2 * C::kRowBlocks];
        product_abt<typename C::Element, C::kRowBytes>(s, q + warp_row<C>() * C::kRowBytes, q + stage_at);
        const int32_t first = tile.t * C::kTileK;
        const bool masked = !tile.is_full();
        if (masked) mask_tile<C>(s, table, first);
        raise_pivots<C>(from, s, rows, scale_log2);
        if (hide && masked) hide_nonfinite<C>(shared + values_at, rows, table, first);
        weigh_values<C>(rows, s, from, scale_log2, q + values_at);
        tile = next;
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kMinBlocks) void fwd_kernel(const __grid_constant__ sinkattn_fwd_args args, int64_t num_tiles,
        sa_divisor by_group, float scale_log2, unsigned *error_word, const __grid_constant__ typename C::Keys keys) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Block block;
    __shared__ RowTable<C> table;
    __shared__ PageTable<C> page_table;
    if (blockIdx.x == 0) check_lengths(args, keys, error_word);
    if (threadIdx.x == 0) find_block<C>(block, args, keys, num_tiles);
    __syncthreads();
    if (!block.has_work) return;

    const uint32_t q = shared_address(shared), stages = q + C::kQueryBytes;
    const Loader<C> loader(args.problem);
    const sa_key_tiles tiles = block.work.tiles;
    const uint16_t *k_data = block.k, *v_data = block.v;
    const auto load = [&](int t, int stage) {
        const uint32_t to = stages + stage * C::kStageBytes;
        if constexpr (C::Keys::kCached) {
            if (!loader.load_cached(to, block, args, keys, page_table.pages[stage], t * C::kTileK)) atomicOr(error_word, kBadBlockTable);
            const KeyTileWalk next(block.work.tiles, t + 1);
            if (next.exists()) page_table.fetch(stage ^ 1, keys, block.work, next.t);
        } else {
            const sa_range seen = sa_key_tile(&block.work.tiles, t);
            loader.load_keys(to, k_data, args.k.row_stride, t * C::kTileK, seen, loader.valid);
            loader.load_keys(to + C::kKeyBytes, v_data, args.v.row_stride, t * C::kTileK, seen, loader.valid_v);
        }
        cp_async_commit();
    };
    const KeyTileWalk first(tiles);
    const auto load_first = [&] {
        if constexpr (C::Keys::kCached) {
            page_table.fetch(0, keys, block.work, first.t);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
        }
        load(first.t, 0);
    };
    if (first.exists()) { // else nothing would wait for a copy to Q's place, through which out leaves
        loader.load_queries(q, block, args.q, by_group);
        load_first();
    }
    describe_rows<C>(table, args, block.work, by_group);
    if (scale_log2 < 0.0f) {
        cp_async_wait<0>();
        loader.negate_queries(shared);
        scale_log2 = -scale_log2;
    }
    __syncthreads();

    Rows<C> rows;
    for (bool hide = false;; hide = true) {
        start_rows<C>(rows);
        attend<C>(rows, shared, table, tiles, scale_log2, hide, load);
        // A value that is not finite meets 0 in masked tiles and leaves NaN everywhere: if so, compute again with such values hidden.
        if (!__syncthreads_or(!hide && !is_finite(rows.o))) break;
        load_first();
    }
    write_out<C>(shared, rows, table, args, block, by_group);
}

template <class C> sinkattn_status launch(const sinkattn_fwd_args &args, const typename C::Keys &keys, const sinkattn_context &context) {
    const int64_t num_tiles = num_row_tiles(args.problem, C::kTileQ), num_blocks = num_tiles * args.problem.num_kv_heads;
    if (num_blocks == 0) return sa_ok();
    if (num_blocks > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows; a launch holds at most 2^31", static_cast<long long>(num_blocks));
    static_assert(C::kHeadDim > 128 || C::kSharedBytes + sizeof(Block) + sizeof(RowTable<C>) + sizeof(PageTable<C>) <= 99 * 1024,
            "a block of 8.6 has room: SA_ROOMY_VARIANT");
    unsigned *error_word;
    SA_TRY(sa_cuda_error_word(&error_word));
    const sa_divisor by_group = sa_divisor_of(static_cast<uint32_t>(args.problem.num_q_heads / args.problem.num_kv_heads));
    const float scale_log2 = static_cast<float>(sa_softmax_scale(&args.problem)) * kLog2e;
    return launch_blocks<fwd_kernel<C>>("sa_fwd_cuda_sm80", static_cast<unsigned>(num_blocks), C::kThreads, C::kSharedBytes, context.stream,
            args, num_tiles, by_group, scale_log2, error_word, keys);
}

template <int kHeadDim, int kTileQ, int kTileK, int kRowBlocks, int kMinBlocks = 1, class Keys>
sinkattn_status launch_dtype(const sinkattn_fwd_args &args, const Keys &keys, const sinkattn_context &context) {
    if (args.problem.dtype == SINKATTN_BF16)
        return launch<Config<Bf16, Keys, kHeadDim, kTileQ, kTileK, kRowBlocks, kMinBlocks>>(args, keys, context);
    return launch<Config<Fp16, Keys, kHeadDim, kTileQ, kTileK, kRowBlocks, kMinBlocks>>(args, keys, context);
}

// Two row blocks a warp halve the reads of K and V; at head_dim 256, O alone would fill the registers. Narrow windows take small tiles, of
// which fewer keys are masked, and 24 warps an SM, which hide the start and the end of a tile of rows.
template <int kHeadDim, int kTileQ, int kTileK, class Keys>
sinkattn_status launch_mask(const sinkattn_fwd_args &args, const Keys &keys, const sinkattn_context &context) {
    if constexpr (kHeadDim == 64)
        if (sa_window_keys(&args.problem.mask) <= 256) return launch_dtype<kHeadDim, 64, 32, 1, 6>(args, keys, context);
    return launch_dtype<kHeadDim, kTileQ, kTileK, kHeadDim <= 128 ? 2 : 1>(args, keys, context);
}

} // namespace

// The forward of tensors, and that of rows over a cache, a decode.
#define SA_LAUNCHERS(head_dim) \
    extern "C" sinkattn_status sa_fwd_cuda_sm80_d##head_dim(const void *args, const sinkattn_plan *, const sinkattn_context *context) { \
        constexpr int kTileQ = sa_fwd_cuda_sm80_d##head_dim##_tile_q, kTileK = sa_fwd_cuda_sm80_d##head_dim##_tile_k; \
        return launch_mask<head_dim, kTileQ, kTileK>(*static_cast<const sinkattn_fwd_args *>(args), TensorKeys{}, *context); \
    } \
    extern "C" sinkattn_status sa_decode_cuda_sm80_packed_d##head_dim( \
            const void *arguments, const sinkattn_plan *, const sinkattn_context *context) { \
        constexpr int kTileQ = sa_decode_cuda_sm80_packed_d##head_dim##_tile_q, kTileK = sa_decode_cuda_sm80_packed_d##head_dim##_tile_k; \
        const auto &args = *static_cast<const sinkattn_decode_args *>(arguments); \
        SA_TRY(check_no_host_pages(args)); \
        return launch_mask<head_dim, kTileQ, kTileK>(args.fwd, CacheKeys(args, kTileK), *context); \
    }
SA_LAUNCHERS(64)
SA_LAUNCHERS(128)
SA_LAUNCHERS(256)

} // namespace sa::fwd_sm80
