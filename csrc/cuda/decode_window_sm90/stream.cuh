// SPDX-License-Identifier: Apache-2.0
//
// A block's stream: up to 8 heads of one kv head for one token, where its keys lie, and the copies of their tiles.
//
// Its keys have places: with positional sink tokens places 0 to 15 are keys 0 to 15, and the window's keys follow from the anchor on.
#pragma once

#include <type_traits>

#include "cuda/ptx/sm80.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/work/items.cuh"

namespace sa::decode_window_sm90 {

constexpr int kHeadDim = 64, kRows = 8, kTileK = 16, kTileBytes = kTileK * kRowBytes, kWindowSteps = 9;
static_assert(kWindowSteps * kTileK == sa_fwd_cuda_sm90_window_tile_k &&
                      sa_decode_cuda_sm90_window_tile_k == sa_fwd_cuda_sm90_window_tile_k && SA_WINDOW_SINK_TOKENS == kTileK,
        "the forward's keys");

// Strides count elements.
struct Params {
    const int32_t *cache_seqlens, *block_table;
    int64_t block_table_stride;
    sa_band band;       // over a full cache
    uint32_t num_heads; // streams of a token: kv heads, each so often as it has 8 q heads
    sa_divisor by_heads, by_q_len, by_page_size;
    int32_t num_rows, streams_log2;            // q heads of a stream; streams of a kv head, a power of two
    int32_t num_pages, page_size, tile_tokens; // tile_tokens: of the forward's tiles
    const uint16_t *k, *v, *q;
    int64_t k_page, v_page, q_batch, out_batch; // strides of a page, of a sequence in a contiguous cache
    int32_t k_head, v_head, k_row, v_row, q_row, q_head, out_row, out_head, head_dim;
    float scale_log2;
    const void *s_aux;
    sinkattn_dtype s_aux_dtype;
    uint16_t *out;
    float *lse, *lse_raw; // lse_raw: NULL if not requested
    unsigned *error_word;
    // Read where kExtras alone.
    int64_t k_gap, v_gap;                 // sa_tier_gap
    int32_t first_host_page;              // pages from this one on lie in host memory
    uint8_t *nvfp4_values, *nvfp4_scales; // NULL if not requested
    float global_scale;
};

// A sequence's length, past the SM's caches; the capacity if the cache has no lengths.
__device__ __forceinline__ int32_t read_length(const Params &params, int32_t batch) {
    return params.cache_seqlens ? load_relaxed(params.cache_seqlens + batch) : params.band.k_len;
}

template <class Element_, int kWarps_, bool kHasSinkTokens_, bool kExtras_> struct Config {
    using Element = Element_;
    static constexpr bool kHasSinkTokens = kHasSinkTokens_, kExtras = kExtras_;
    static constexpr int kSteps = kWindowSteps + kHasSinkTokens, kLaneKeys = (kSteps * kTileK + 31) / 32; // kLaneKeys: a lane's places
    static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kTiles = kWarps == 1 ? 6 : 2 * kSteps; // kTiles: in shared memory
    static constexpr int kColumns = kHeadDim / kWarps, kMine = (kSteps + kWarps - 1) / kWarps;            // of a warp; steps that it scores
    static constexpr int kBlocks = kWarps == 1 ? (kHasSinkTokens ? 12 : 16) : kHasSinkTokens ? 5 : 6;     // of an SM
};

template <class C> __device__ __forceinline__ void sync() {
    if constexpr (C::kWarps == 1)
        __syncwarp();
    else
        __syncthreads();
}

template <class C> __device__ __forceinline__ bool sync_or(bool x) {
    if constexpr (C::kWarps == 1)
        return __any_sync(0xffffffffu, x);
    else
        return __syncthreads_or(x);
}

// The block's stream, and where its keys lie.
template <class C> struct Stream {
    int32_t batch, token, kv_head, first_head, length = INT32_MIN;
    int32_t sink_end, begin, end, anchor; // the token sees keys [0, sink_end) and [begin, end)
    int32_t pages[C::kLaneKeys] = {};     // of places lane + 32 i

    __device__ __forceinline__ explicit Stream(const Params &params) {
        const uint32_t row = sa_divide(blockIdx.x, params.by_heads);
        const auto number = static_cast<int32_t>(blockIdx.x - row * params.num_heads);
        kv_head = number >> params.streams_log2;
        first_head = number * params.num_rows;
        batch = static_cast<int32_t>(sa_divide(row, params.by_q_len));
        token = static_cast<int32_t>(row) - batch * params.band.q_len;
    }

    __device__ __forceinline__ int32_t key(int place) const {
        return !C::kHasSinkTokens ? anchor + place : place < kTileK ? place : anchor + place - kTileK;
    }

    __device__ __forceinline__ bool sees(int place) const {
        const int32_t at = key(place);
        return C::kHasSinkTokens && place < kTileK ? at < sink_end : (at >= begin) & (at < end);
    }

    // The i-th place that the lane looks up.
    __device__ __forceinline__ static int own_place(int i) { return static_cast<int>(threadIdx.x % 32) + 32 * i; }

    // Reads the length and the pages. True if they differ from those before.
    __device__ __forceinline__ bool look_up(const Params &params) {
        const int32_t now = read_length(params, batch);
        bool differs = now != length;
        length = now;
        const sa_band band = sa_band_with_keys(params.band, max(0, min(length, params.band.k_len)));
        const sa_range keys = sa_row_band(&band, token);
        sink_end = min(band.num_sink, keys.end);
        begin = max(keys.begin, sink_end); // a sink token is no key of the window
        end = keys.end;
        anchor = sa_window_begin(&band, sa_position(&band, token) & -params.tile_tokens);
#pragma unroll
        for (int i = 0; i < C::kLaneKeys; i++) {
            const int place = own_place(i);
            int32_t page = sees(place) ? batch : -1;
            if (params.block_table && page >= 0)
                page = load_relaxed(params.block_table + batch * params.block_table_stride + sa_divide(key(place), params.by_page_size));
            differs |= page != pages[i];
            pages[i] = page;
        }
        return differs;
    }

    __device__ __forceinline__ bool bad_page(const Params &params) const {
        bool bad = false;
        for (int i = 0; i < C::kLaneKeys; i++)
            bad |= sees(own_place(i)) & (static_cast<uint32_t>(pages[i]) >= static_cast<uint32_t>(params.num_pages));
        return bad;
    }
};

// Copies the tile of a step: V's if of_values. A key that the token does not see, or whose page is unmapped, becomes zeros.
template <class C>
__device__ __forceinline__ void copy_tile(uint32_t to, const Stream<C> &stream, const Params &params, int step, bool of_values) {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const uint16_t *base = of_values ? params.v + static_cast<int64_t>(stream.kv_head) * params.v_head
                                     : params.k + static_cast<int64_t>(stream.kv_head) * params.k_head;
    const int64_t page_stride = of_values ? params.v_page : params.k_page, row_stride = of_values ? params.v_row : params.k_row;
#pragma unroll
    for (int i = 0; i < kTileK; i += 4) {
        const int row = lane / 8 + i, place = step * kTileK + row;
        const int32_t page = __shfl_sync(0xffffffffu, stream.pages[step / 2], place % 32), key = stream.key(place);
        const int32_t slot = params.block_table ? key - static_cast<int32_t>(sa_divide(key, params.by_page_size)) * params.page_size : key;
        const bool valid =
                stream.sees(place) && static_cast<uint32_t>(page) < static_cast<uint32_t>(params.num_pages) && chunk * 8 < params.head_dim;
        int64_t from = page * page_stride + slot * row_stride + chunk * 8;
        if constexpr (C::kExtras) from += page >= params.first_host_page ? of_values ? params.v_gap : params.k_gap : 0;
        cp_async_16_once(to + swizzled(row, chunk), base + from, valid);
    }
}

// Of the stream's rows: Q, transposed, as the right side of S^T = K Q^T.
struct Queries {
    uint32_t q[kHeadDim / 16][2];
};

template <class C> __device__ __forceinline__ void load_queries(Queries &queries, const Stream<C> &stream, const Params &params) {
    const int lane = threadIdx.x % 32, head = stream.first_head + min(fragment_row(0), params.num_rows - 1);
    const auto *from = reinterpret_cast<const uint32_t *>(params.q + stream.batch * params.q_batch +
                                                          static_cast<int64_t>(stream.token) * params.q_row +
                                                          static_cast<int64_t>(head) * params.q_head) +
                       lane % 4;
#pragma unroll
    for (int x = 0; x < kHeadDim / 8; x++) queries.q[x / 2][x % 2] = 8 * x < params.head_dim ? from[4 * x] : 0;
}

} // namespace sa::decode_window_sm90
