// SPDX-License-Identifier: Apache-2.0
//
// Tiles of rows of the general forward on sm_90, which are whole tokens with the heads of their GQA group: where they lie, and the bounds
// of the keys that each row sees.
#pragma once

#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/items.cuh"
#include "cuda/work/tile_walk.cuh"

namespace sa::fwd_sm90 {

enum NamedBarrier : int { kMathBarrier = 1 }; // one a math warpgroup, from this one on; 0 is __syncthreads

// Tile sizes and stages of an instance. kHeadDim: of Q and K; kHeadDimV: of V and O; kRowStages: described tiles of rows; kQueries: tiles
// of Q.
template <int kHeadDim_, int kHeadDimV_, int kTileQ_, int kTileK_, int kStages_, int kRowStages_, int kQueries_> struct Shape {
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kTileQ = kTileQ_, kTileK = kTileK_, kStages = kStages_,
                         kRowStages = kRowStages_, kQueries = kQueries_;
    static_assert(kTileK == (kHeadDim <= 64 ? 128 : 80), "one order of sums, whatever the rows of a tile");
};

// kChunks_: sums are cut into chunks.
template <class Element_, class Keys_, class Shape, bool kChunks_> struct Config : Shape {
    using Element = Element_;
    using Keys = Keys_;
    using Shape::kHeadDim, Shape::kHeadDimV, Shape::kTileQ, Shape::kTileK, Shape::kStages, Shape::kQueries;
    // Offsets of copies by threads take the room of a fourth at (192, 128).
    static constexpr int kRowStages = Keys::kByThreads && kHeadDim == 192 ? 3 : Shape::kRowStages;
    static constexpr int kMathWarpgroups = kTileQ / 64, kThreads = 128 * (kMathWarpgroups + 1), kCheckers = Keys::kCached ? 1 : 2;
    static constexpr int kHalves = (kHeadDim + 63) / 64, kHalvesV = (kHeadDimV + 63) / 64; // of 64 columns of a row, k*Half bytes apart
    static constexpr int kQueryHalf = kTileQ * kRowBytes, kKeyHalf = kTileK * kRowBytes;
    // One math warpgroup keeps the registers that it starts with.
    static constexpr int kLoaderRegisters = kMathWarpgroups == 3 ? 32 : 40, kMathRegisters = kMathWarpgroups == 3 ? 160 : 232;
    static constexpr bool kStagesOut = kQueries > 1;       // out leaves through the stage of the queries, else from registers
    static constexpr bool kStoresBounds = kHeadDim <= 128; // what a token sees is stored, else computed at each use
    static constexpr bool kChunks = kChunks_;
    static_assert(kTileQ * kTileQ < 65536, "row / group by a multiplication");
    static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kTileQ % 64 == 0 && kTileK % 16 == 0,
            "columns of two products of S, rows of a wgmma, keys of a wgmma");
    static_assert(kLoaderRegisters + kMathWarpgroups * kMathRegisters <= 512, "registers of a multiprocessor, for each of 128 threads");
};

// The keys of a token: [0, sink_end) and [begin, end).
struct TokenKeys {
    int begin, end, sink_end;
};

// A tile of rows, by token and by head. Row r is head r % group of token r / group.
template <class C> struct Rows {
    static constexpr int kStored = C::kStoresBounds ? C::kTileQ : 1;
    Barrier placed, full, empty; // placed: work, exists and awaited are there, which is all that loaders need
    Work work;
    // awaited: the scheduler waits until all its keys but kUnsent tiles are sent
    bool exists, awaited;
    sa_key_tiles warpgroup_tiles[C::kMathWarpgroups];                    // the tiles of work.tiles that rows of a math warpgroup see
    int begin[kStored], end[kStored], sink_end[kStored], first[kStored]; // of a token: keys() and first_tile()
    float s_aux[C::kTileQ];                                              // of a head
    int64_t lse;                                                         // the first row's offset in lse

    __device__ __forceinline__ int num_tokens() const { return work.tokens.end - work.tokens.begin; }

    __device__ __forceinline__ TokenKeys keys(int token) const {
        if constexpr (C::kStoresBounds) return {begin[token], end[token], sink_end[token]};
        const sa_range band = token < num_tokens() ? sa_row_band(&work.band, work.tokens.begin + token) : sa_range{0, 0};
        return {band.begin, band.end, sa_first(work.band.num_sink, band.begin)};
    }

    // The key tile of a token's first key.
    __device__ __forceinline__ int first_tile(int token) const {
        if constexpr (C::kStoresBounds) return first[token];
        const TokenKeys its = keys(token);
        return its.sink_end || its.begin == its.end ? 0 : sa_tile_of(its.begin, C::kTileK);
    }
};

struct Problem {
    unsigned long long *counter, tag; // NULL: blocks take items in a fixed order
    unsigned num_kv_heads, num_tiles, num_items;
    sa_divisor by_kv_heads, by_batch;
    int group, tokens; // heads and tokens of a tile of rows
    int group_inverse; // 2^16 / group, rounded up: row / group is row * group_inverse >> 16
    int copied_tokens; // of a math warpgroup's rows, by one copy of out; 0 where 64 rows are not whole tokens
    float scale_log2;
    int chunk_tiles; // key tiles of a chunk
    float4 *kept;    // see Math
};

// The sequence of tile n. By a whole warp.
__device__ __forceinline__ unsigned sequence_of_tile(const sinkattn_fwd_args &args, const Problem &p, unsigned n) {
    if (!args.problem.packed) return n - sa_divide(n, p.by_batch) * static_cast<unsigned>(args.problem.batch);
    return packed_sequence_of_tile(args, p.tokens, n);
}

// find_work for tiles of whole tokens. False if the tile has none. ascends: n ascends, and those of a packed sequence come last first.
template <class C>
__device__ __forceinline__ bool describe_tile(const sinkattn_fwd_args &args, const typename C::Keys &keys, const Problem &p,
        unsigned kv_head, unsigned b, unsigned n, bool ascends, Work &work) {
    const int first = args.problem.packed ? static_cast<int>(rows_before(args, b)) / p.tokens + static_cast<int>(b) : 0;
    int within = static_cast<int>(args.problem.packed ? n : sa_divide(n, p.by_batch)) - first;
    work.group = p.group;
    work.kv_head = kv_head;
    work.has_sink = args.s_aux && b < args.problem.batch;
    work.sequence = sequence_or_tail(args, b, keys);
    work.band = sa_band_of(&args.problem.mask, work.sequence.q_len, work.sequence.k_len);
    if (ascends) within = (static_cast<int>(work.sequence.q_len) - 1) / p.tokens - within;
    if (within < 0 || static_cast<int64_t>(within) * p.tokens >= work.sequence.q_len) return false;
    work.tokens.begin = within * p.tokens;
    work.tokens.end = sa_first(work.tokens.begin + p.tokens, work.band.q_len);
    work.rows = {work.tokens.begin * p.group, work.tokens.end * p.group};
    work.tiles = sa_key_tiles_of(&work.band, work.tokens, C::kTileK);
    return true;
}

// The key tiles of a math warpgroup's rows.
template <class C> __device__ __forceinline__ void describe_warpgroup(Rows<C> &rows, const Problem &p, int math_warpgroup) {
    const Work &work = rows.work;
    const int first = 64 * math_warpgroup * p.group_inverse >> 16,
              last = sa_first((64 * math_warpgroup + 63) * p.group_inverse >> 16, rows.num_tokens() - 1);
    sa_key_tiles *part = &rows.warpgroup_tiles[math_warpgroup];
    if constexpr (C::kStoresBounds) {
        sa_key_tiles_of_part(part, &work.tiles, &work.band, rows.begin, rows.end, first, last, C::kTileK);
    } else { // of these two tokens; they see nothing where the part has none
        const TokenKeys of_first = rows.keys(first), of_last = rows.keys(last);
        const int begin[2] = {of_first.begin, of_last.begin}, end[2] = {of_first.end, first <= last ? of_last.end : 0};
        sa_key_tiles_of_part(part, &work.tiles, &work.band, begin, end, 0, 1, C::kTileK);
    }
}

template <class C> __device__ __forceinline__ void describe_rows(Rows<C> &rows, const sinkattn_fwd_args &args, const Problem &p) {
    const Work &work = rows.work;
    const int lane = threadIdx.x % 32;
    const int64_t first_head = work.kv_head * p.group;
    if (lane == 0) rows.lse = sa_row_index(&args.problem, &work.sequence, first_head, work.tokens.begin);
#pragma unroll 1
    for (int head = lane; head < p.group; head += 32)
        rows.s_aux[head] = work.has_sink ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, first_head + head)) : -INFINITY;
    if constexpr (C::kStoresBounds) {
#pragma unroll 1
        for (int i = lane; i * p.group < C::kTileQ; i += 32) { // one more than p.tokens where the group does not divide the tile
            const sa_position_t token = work.tokens.begin + i;
            const bool real = token < work.tokens.end;
            const sa_range keys = real ? sa_row_band(&work.band, token) : sa_range{0, 0};
            rows.begin[i] = keys.begin;
            rows.end[i] = keys.end;
            rows.sink_end[i] = real ? sa_row_sink_end(&work.band, token) : 0;
            rows.first[i] = rows.sink_end[i] || keys.begin == keys.end ? 0 : sa_tile_of(keys.begin, C::kTileK);
        }
        __syncwarp();
    }
    if (lane < C::kMathWarpgroups) describe_warpgroup<C>(rows, p, lane);
}

} // namespace sa::fwd_sm90
