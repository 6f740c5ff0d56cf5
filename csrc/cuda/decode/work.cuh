// SPDX-License-Identifier: Apache-2.0
//
// What a decode block works on: a fragment, a run of the key tiles of one stream of rows. Streams are cut into parts, each of them a
// block's work: either every stream into the same number, or all of them into parts of one length, which follows from the lengths found;
// where that would be more parts than blocks, into shares that end anywhere, each a block's, with a part of every stream that it meets.
//
// Parts are numbered: sequence by sequence, row tile by row tile, part by part, with the kv head running fastest, so that blocks that run
// at the same time read neighbours in memory.
#pragma once

#include "cuda/ptx/sm80.cuh"
#include "cuda/work/items.cuh"

namespace sa::decode {

constexpr int kTileQ = sa_decode_cuda_sm80_d64_tile_q, kTileK = sa_decode_cuda_sm80_d64_tile_k, kMaxStages = 4;
static_assert(kTileQ == 16 && kTileK == 16, "one mma.sync tile of rows, and one step of P V");

constexpr uint32_t kCluster = 8;           // blocks of a cluster, which are the parts of one stream
constexpr int64_t kMostClusterKeys = 4096; // of its sequence: with 8192, twice as many blocks without clusters are faster

constexpr int64_t kLeastPairKeys = 4096; // least capacity at which two kv heads are processed as one; slower at 2048

// What the launcher knows, in the order in which the kernel asks for it: its parameters come from memory a line at a time.
struct Params {
    const int32_t *cache_seqlens, *block_table;
    int64_t block_table_stride;
    sa_band band;                              // of a full cache
    int32_t batch, num_rows, row_tiles, group; // rows of a sequence and kv head; heads
    uint32_t num_heads, num_splits;            // of k and v; 0: parts of one length
    sa_divisor by_group, by_heads, by_splits, by_row_tiles;
    sa_cut cut;
    uint32_t head_slots; // of a kv head

    const uint16_t *k, *v;
    int64_t k_page, v_page; // strides, of a sequence where there are no pages
    int32_t k_head, v_head, k_row, v_row, head_dim, num_pages, page_size, stages;
    sa_divisor by_page_size;
    bool whole_tiles; // no tile lies in two pages
    float scale_log2;

    const uint16_t *q;
    int64_t q_batch;
    int32_t q_row, q_head;
    const void *s_aux;
    sinkattn_dtype s_aux_dtype;
    uint32_t slot_floats;
    float *slots; // in the workspace, one a part of a stream that is cut
    unsigned long long tag;
    uint16_t *out;
    int64_t out_batch;
    int32_t out_row, out_head;
    float *lse, *lse_raw; // lse_raw: NULL where it is not wanted
    unsigned *error_word;
    bool two_pass; // another kernel merges the parts
    bool fills;    // blocks take more than half of the SMs' room, so that the next launch's find none beside them
};

// What few decodes ask for; the others run kernels that know nothing of it.
struct Extras : Params {
    int64_t k_gap, v_gap;                 // sa_tier_gap
    int32_t first_host_page;              // pages from here on are the host's
    uint8_t *nvfp4_values, *nvfp4_scales; // NULL: not wanted
    float global_scale;
};

inline void set_extras(Extras &params, const sinkattn_decode_args &args) {
    const int64_t num_pages = args.fwd.problem.num_pages;
    params.first_host_page = INT32_MAX;
    if (args.host.num_pages && num_pages < INT32_MAX) {
        params.first_host_page = static_cast<int32_t>(num_pages);
        params.k_gap = sa_tier_gap(&args.fwd.k, &args.host.k, num_pages, sizeof(uint16_t));
        params.v_gap = sa_tier_gap(&args.fwd.v, &args.host.v, num_pages, sizeof(uint16_t));
    }
    params.nvfp4_values = args.nvfp4.values;
    params.nvfp4_scales = args.nvfp4.scales;
    params.global_scale = args.nvfp4.global_scale != 0.0 ? static_cast<float>(args.nvfp4.global_scale) : 1.0f;
}

// One stream of rows: rows r = token * group + head within the group.
struct Stream {
    sa_band band;
    sa_key_tiles tiles;
    int32_t row_begin, num_rows;
    uint32_t num_tiles; // at least 1: but in shares, a stream without keys is work as well
};

// Tiles [first, last) of a stream, its part `part` of num_parts, whose partials lie from `slot` on of its kv head's.
struct Fragment {
    Stream stream;
    int32_t batch, kv_head, first, last;
    uint32_t part, num_parts, slot;
    uint32_t begin, length, rest; // of a share, in positions: before the stream; its own; behind the fragment
    bool found, shares;           // shares: streams without keys are no part of any; see write_empty
};

struct Row {
    int32_t begin, end, sink_end; // it sees [0, sink_end) and [begin, end)
};

// Blocks of 8 warps and of 1 meet no streams so different that there are more parts than blocks; see launch_width.
template <int kThreads> constexpr bool kHasShares = kThreads == 128;

template <int kThreads> struct Smem {
    Fragment fragment;
    union {
        uint2 sums[kThreads / 32];
        unsigned long long counted; // what the stream's counter holds, when its part has been found
    };
    Row rows[kThreads / 32][kTileQ]; // each warp's own
    float s_aux[kTileQ];
    bool is_last;
};

// Of a cluster's block: what the others leave for it, the quads that it adds up, part by part; see run_bits.
template <int kThreads> struct ClusterSmem : Smem<kThreads> {
    static constexpr int kMost = 2 * kTileQ * 16; // at head_dim 64
    float4 o[kMost];
    float2 stats[kMost];
};

// Of a sequence whose length is this in cache_seqlens, or anything else.
__device__ __forceinline__ Stream stream_of(const Params &params, int32_t length, int32_t row_tile) {
    Stream stream;
    stream.row_begin = row_tile * kTileQ;
    stream.num_rows = min(kTileQ, params.num_rows - stream.row_begin);
    stream.band = sa_band_with_keys(params.band, max(0, min(length, params.band.k_len)));
    const sa_range tokens = {static_cast<int32_t>(sa_divide(stream.row_begin, params.by_group)),
                             static_cast<int32_t>(sa_divide(stream.row_begin + stream.num_rows - 1, params.by_group)) + 1};
    stream.tiles = sa_key_tiles_of(&stream.band, tokens, kTileK);
    stream.num_tiles = max(1, sa_key_tile_count(&stream.tiles));
    return stream;
}

// What the stream takes of the positions that are cut into shares.
__device__ __forceinline__ uint32_t positions_of(const Params &params, const Stream &stream) {
    return sa_key_tile_count(&stream.tiles) ? stream.num_tiles + params.cut.begin : 0;
}

__device__ __forceinline__ void check_length(const Params &params, int32_t length) {
    if (static_cast<uint32_t>(length) > static_cast<uint32_t>(params.band.k_len)) atomicOr(params.error_word, kBadCacheSeqlens);
}

// A thread's run of sequences; the first warp's alone where it has threads enough, which saves the barriers.
struct Run {
    int32_t first, past;
    bool by_warp;
};

template <int kThreads> __device__ __forceinline__ Run run_of(const Params &params) {
    const bool by_warp = params.batch <= 32;
    const int32_t each = by_warp ? 1 : (params.batch + kThreads - 1) / kThreads;
    const int32_t first = min(static_cast<int32_t>(threadIdx.x) * each, params.batch);
    return {first, min(first + each, params.batch), by_warp};
}

// Speculation: lengths and pages are read while the preceding kernel may still write them, and again after it ends. If they differ, the
// block starts again before it has written anything. Holds a thread's length, where it needs only one.
struct Guess {
    int32_t batch, length; // the sequence, negative: none
    bool open;             // the kernel in front has not been waited for

    __device__ __forceinline__ void wait() {
        if (!open) return;
        wait_for_previous_kernel();
        open = false;
    }

    __device__ __forceinline__ int32_t look(const Params &params) const {
        return batch >= 0 && params.cache_seqlens ? load_relaxed(params.cache_seqlens + batch) : params.band.k_len;
    }

    // With what look() says after the wait. True where it is another.
    __device__ __forceinline__ bool settle(const Params &params, int32_t now) {
        const bool changed = length != now;
        length = now;
        check_length(params, now);
        return changed;
    }
};

template <int kThreads> __device__ __forceinline__ Guess guess_of(const Params &params, uint32_t number, bool open) {
    Guess guess = {-1, 0, open};
    if (params.num_splits) {
        const uint32_t stream = sa_divide(sa_divide(number, params.by_heads), params.by_splits);
        if (threadIdx.x == 0) guess.batch = static_cast<int32_t>(sa_divide(stream, params.by_row_tiles));
    } else if (params.batch <= kThreads) {
        if (static_cast<int32_t>(threadIdx.x) < params.batch) guess.batch = static_cast<int32_t>(threadIdx.x);
    } else {
        guess.wait();
    }
    guess.length = guess.look(params);
    return guess;
}

__device__ __forceinline__ int32_t length_of(const Params &params, const Guess &guess, int32_t b) {
    return b == guess.batch ? guess.length : params.cache_seqlens ? params.cache_seqlens[b] : params.band.k_len;
}

// Where the parts, or positions, of a thread's sequences begin and end among those of one kv head, and the length of a part, or share.
struct Cut {
    uint32_t begin, end, length;
    bool shares; // and positions
};

// Counts all tiles, which gives the length of a part, and then the parts, both of one kv head.
template <int kThreads> __device__ __forceinline__ Cut cut_streams(Smem<kThreads> &smem, const Params &params, const Guess &guess) {
    const Run run = run_of<kThreads>(params);
    const bool one_stream = run.past - run.first <= 1 && params.row_tiles == 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (run.by_warp && warp > 0) return {0, 0, 1, false};
    uint32_t tiles = 0, positions = 0, parts = 0, length = 0, total;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        if (pass && one_stream) {
            parts = (tiles + length - 1) / length;
        } else {
#pragma unroll 1
            for (int32_t b = run.first; b < run.past; b++) {
                const int32_t its_length = length_of(params, guess, b);
                if (!guess.open && blockIdx.x == 0) check_length(params, its_length);
#pragma unroll 1
                for (int32_t row_tile = 0; row_tile < params.row_tiles; row_tile++) {
                    const Stream stream = stream_of(params, its_length, row_tile);
                    const uint32_t its_tiles = stream.num_tiles;
                    if (pass) {
                        parts += (its_tiles + length - 1) / length;
                    } else if (kHasShares<kThreads>) {
                        tiles += its_tiles;
                        positions += positions_of(params, stream);
                    } else {
                        tiles = max(tiles, its_tiles * params.row_tiles); // so that none has more parts than blocks
                    }
                }
            }
        }
        if (pass) break;
        total = __reduce_add_sync(0xffffffffu, tiles);
        if (!run.by_warp) {
            if (lane == 0) smem.sums[warp].x = total;
            __syncthreads();
            total = 0;
#pragma unroll
            for (int w = 0; w < kThreads / 32; w++) total += smem.sums[w].x;
        }
        length = sa_part_length(&params.cut, total * params.num_heads);
    }
    uint32_t positions_upto = positions, upto = parts;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t other_positions = __shfl_up_sync(0xffffffffu, positions_upto, step), other = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane < step) continue;
        positions_upto += other_positions;
        upto += other;
    }
    if constexpr (!kHasShares<kThreads>) return {upto - parts, upto, length, false};
    uint32_t all_positions = __shfl_sync(0xffffffffu, positions_upto, 31), all_parts = __shfl_sync(0xffffffffu, upto, 31);
    if (!run.by_warp) {
        __syncthreads();
        if (lane == 31) smem.sums[warp] = {positions_upto, upto};
        __syncthreads();
        all_positions = all_parts = 0;
#pragma unroll
        for (int w = 0; w < kThreads / 32; w++) {
            all_positions += smem.sums[w].x;
            all_parts += smem.sums[w].y;
            if (w >= warp) continue;
            positions_upto += smem.sums[w].x;
            upto += smem.sums[w].y;
        }
    }
    if (all_parts * params.num_heads <= gridDim.x) return {upto - parts, upto, length, false};
    const uint32_t share = sa_share_length(&params.cut, all_positions * params.num_heads);
    return {positions_upto - positions, positions_upto, max(share, params.cut.begin + params.cut.step), true};
}

__device__ __forceinline__ bool is_sound(const Fragment &fragment, const Params &params) {
    return fragment.part < fragment.num_parts && (fragment.num_parts == 1 || fragment.slot + fragment.num_parts <= params.head_slots);
}

// What share `share` holds of the stream, of which `at` positions lie before it.
__device__ __forceinline__ void take_share(Fragment &fragment, const Params &params, uint32_t share, uint32_t begin, uint32_t at,
                                           uint32_t room) {
    const sa_share of = sa_share_of(fragment.stream.num_tiles, params.cut.begin, fragment.length, share, begin, at, room);
    fragment.first = static_cast<int32_t>(of.first);
    fragment.last = static_cast<int32_t>(of.last);
    fragment.part = of.part;
    fragment.num_parts = of.num_parts;
    fragment.slot = of.slot;
    fragment.begin = begin;
    fragment.rest = of.rest;
}

// Part or share `number`. False where there is none. Lengths that change under the kernel lead to no access outside, whatever else they do.
template <int kThreads>
__device__ __forceinline__ bool take_part(Smem<kThreads> &smem, const Params &params, uint32_t number, const Cut &cut, const Guess &guess) {
    Fragment &fragment = smem.fragment;
    const uint32_t of_heads = sa_divide(number, params.by_heads), head = number - of_heads * params.num_heads;
    const uint32_t wanted = cut.shares ? of_heads * cut.length : of_heads;
    uint32_t at = wanted - cut.begin, room = cut.end - cut.begin, length = cut.length; // from sequence b on
    int32_t b = run_of<kThreads>(params).first, row_tile = 0;
    bool mine = at < room;
    if (params.num_splits) {
        const uint32_t stream = sa_divide(of_heads, params.by_splits);
        at = of_heads - stream * params.num_splits;
        b = static_cast<int32_t>(sa_divide(stream, params.by_row_tiles));
        room = params.num_splits;
        row_tile = static_cast<int32_t>(stream) - b * params.row_tiles;
        mine = threadIdx.x == 0;
    }
    if (mine) {
        Stream stream;
        uint32_t num_parts;
#pragma unroll 1
        for (;;) {
            stream = stream_of(params, length_of(params, guess, b), row_tile);
            if (params.num_splits) length = sa_divide(stream.num_tiles + params.num_splits - 1, params.by_splits);
            num_parts = (stream.num_tiles + length - 1) / length;
            const uint32_t size = cut.shares ? positions_of(params, stream) : num_parts;
            if (at < size || size >= room || params.num_splits) break;
            at -= size;
            room -= size;
            if (++row_tile < params.row_tiles) continue;
            row_tile = 0;
            if (++b == params.batch) b = 0, room = 0; // lengths have changed
        }
        fragment.stream = stream;
        fragment.batch = b;
        fragment.kv_head = static_cast<int32_t>(head);
        if (cut.shares) {
            fragment.length = length;
            take_share(fragment, params, of_heads, wanted - at, at, length);
        } else {
            fragment.first = static_cast<int32_t>(at * length);
            fragment.last = static_cast<int32_t>(min(at * length + length, stream.num_tiles));
            fragment.rest = 0;
            fragment.part = at;
            fragment.num_parts = num_parts;
            fragment.slot = of_heads - at;
        }
        fragment.found = is_sound(fragment, params);
    }
    if (threadIdx.x == 0) fragment.shares = cut.shares;
    __syncthreads();
    return fragment.found;
}

// What the block's share holds of the next stream. False where it holds no more.
template <int kThreads> __device__ __forceinline__ bool take_next(Smem<kThreads> &smem, const Params &params) {
    Fragment &fragment = smem.fragment;
    if (fragment.rest == 0) return false;
    __syncthreads(); // the fragment before is done with
    if (threadIdx.x < 32) {
        const uint32_t share = fragment.slot / 2 + fragment.part, room = fragment.rest;
        const uint32_t begin = fragment.begin + fragment.stream.num_tiles + params.cut.begin;
        const uint32_t num_streams = params.batch * params.row_tiles;
        uint32_t next = fragment.batch * params.row_tiles + fragment.stream.row_begin / kTileQ + 1, with_keys = 0;
        __syncwarp();
        if (threadIdx.x == 0) fragment.found = false;
        __syncwarp();
#pragma unroll 1
        for (; next < num_streams && !with_keys; next += 32) { // a lane looks at one
            const uint32_t stream = min(next + threadIdx.x, num_streams - 1);
            const int32_t b = static_cast<int32_t>(sa_divide(stream, params.by_row_tiles));
            const Guess here = {b, 0, false};
            const Stream found = stream_of(params, here.look(params), static_cast<int32_t>(stream) - b * params.row_tiles);
            with_keys = __ballot_sync(0xffffffffu, sa_key_tile_count(&found.tiles) > 0);
            if (static_cast<int>(threadIdx.x) != __ffs(static_cast<int>(with_keys)) - 1) continue;
            fragment.batch = b;
            fragment.stream = found;
            take_share(fragment, params, share, begin, 0, room);
            fragment.found = is_sound(fragment, params);
        }
    }
    __syncthreads();
    return fragment.found;
}

__device__ __forceinline__ float *slot_of(const Fragment &fragment, const Params &params, uint32_t part) {
    return params.slots + static_cast<int64_t>(fragment.kv_head * params.head_slots + fragment.slot + part) * params.slot_floats;
}

} // namespace sa::decode
