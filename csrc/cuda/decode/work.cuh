// SPDX-License-Identifier: Apache-2.0
//
// The work of a decode block: a part, contiguous key tiles of one stream of rows. There are three ways to split the streams:
//
//     num_splits   every stream into the same number of parts, a block each
//     by length    all streams into parts of one length, a block each; the length follows from the sequences' lengths
//     shares       where parts of one length would outnumber the blocks: a block takes an equal share of all tiles, which may end inside a
//                  stream, and works on one part of each stream in it
//
// Parts and shares are numbered by sequence, row tile and part, the kv head running fastest, so that blocks that run at the same time read
// neighbouring memory.
#pragma once

#include "cuda/ptx/sm80.cuh"
#include "cuda/work/items.cuh"

namespace sa::decode {

constexpr int kTileQ = sa_decode_cuda_sm80_d64_tile_q, kTileK = sa_decode_cuda_sm80_d64_tile_k, kMaxStages = 4;
static_assert(kTileQ == 16 && kTileK == 16, "one mma.sync tile of rows, and one step of P V");

constexpr uint32_t kCluster = 8;           // blocks of a cluster; each has a part of the same stream
constexpr int64_t kMostClusterKeys = 4096; // of a sequence: at 8192, twice as many blocks without clusters are faster
constexpr int64_t kLeastPairKeys = 4096;   // least capacity at which two kv heads are processed as one; slower at 2048

// The launcher's arguments in the order of their use: the kernel's parameters come from memory a line at a time. Strides count elements.
struct Params {
    const int32_t *cache_seqlens, *block_table;
    int64_t block_table_stride;
    sa_band band;                              // over a full cache
    int32_t batch, num_rows, row_tiles, group; // num_rows, row_tiles: of a sequence and kv head; group: q heads of a kv head
    uint32_t num_heads, num_splits;            // num_heads: kv heads, or pairs of them; num_splits: 0 for parts by length
    sa_divisor by_group, by_heads, by_splits, by_row_tiles;
    sa_cut cut;
    uint32_t head_slots; // slots of a kv head

    const uint16_t *k, *v;
    int64_t k_page, v_page; // strides of a page; of a sequence in a contiguous cache
    int32_t k_head, v_head, k_row, v_row, head_dim, num_pages, page_size, stages;
    sa_divisor by_page_size;
    bool whole_tiles; // no tile spans two pages
    float scale_log2;

    const uint16_t *q;
    int64_t q_batch;
    int32_t q_row, q_head;
    const void *s_aux;
    sinkattn_dtype s_aux_dtype;
    uint32_t slot_floats;
    float *slots; // in the workspace: a slot holds the partial of one part
    unsigned long long tag;
    uint16_t *out;
    int64_t out_batch;
    int32_t out_row, out_head;
    float *lse, *lse_raw; // lse_raw: NULL if not requested
    unsigned *error_word;
    bool two_pass; // reduce_kernel merges the parts
    bool fills;    // the grid takes more than half of the SMs' room: blocks of the next launch find none beside it
    int32_t head_dim_v;

    __device__ __forceinline__ int32_t page_index(int32_t key) const { return static_cast<int32_t>(sa_divide(key, by_page_size)); }
    __device__ __forceinline__ bool has_page(int32_t page) const { return static_cast<uint32_t>(page) < static_cast<uint32_t>(num_pages); }
};

// Rare features, compiled into instances of their own.
struct Extras : Params {
    int64_t k_gap, v_gap;                 // sa_tier_gap
    int32_t first_host_page;              // pages from this one on lie in host memory
    uint8_t *nvfp4_values, *nvfp4_scales; // NULL if not requested
    float global_scale;
};

// Whether some row sees the key. & and | for a predicate without a branch.
__device__ __forceinline__ bool is_seen(const sa_key_tiles &tiles, int32_t key) {
    return (key < tiles.sink_keys) | ((key >= tiles.band.begin) & (key < tiles.band.end));
}

// A tile of the rows of one sequence and kv head; row r = token * group + head within the group.
struct Stream {
    sa_band band;
    sa_key_tiles tiles;
    int32_t row_begin, num_rows;
    uint32_t num_tiles; // at least 1: without shares, a stream without keys has a part as well
};

// Key tiles [first, last) of a stream: part `index` of num_parts. The partials of the stream lie from `slot` on in its kv head's slots.
struct Part {
    Stream stream;
    int32_t batch, kv_head, first, last;
    uint32_t index, num_parts, slot;
    uint32_t begin, length, rest; // of a share, in positions: where the stream begins, the share's length, what follows this part
    bool found, shares;           // shares: streams without keys belong to none; see write_empty
};

// Where the part's tiles end: a stream without keys has a part of none.
__device__ __forceinline__ int32_t last_step(const Part &part) { return min(part.last, sa_key_tile_count(&part.stream.tiles)); }

// The keys that a row sees: [0, sink_end) and [begin, end).
struct Row {
    int32_t begin, end, sink_end;
};

// launch_width gives blocks of other than 4 warps only to streams that never need shares.
template <int kThreads> constexpr bool kHasShares = kThreads > 64 && kThreads != 256;

template <int kThreads> struct PartSmem {
    Part part;
    union {
        uint2 sums[kThreads / 32];
        unsigned long long counted; // the stream's counter as found, once the part is known
    };
};

template <int kThreads> struct Smem : PartSmem<kThreads> {
    Row rows[kThreads / 32][kTileQ]; // each warp has its own
    float s_aux[kTileQ];
    bool is_last;
};

// In a cluster, the other blocks write here the quads that this block adds up, part by part; see exchange_bits.
template <int kThreads> struct ClusterSmem : Smem<kThreads> {
    static constexpr int kMost = 2 * kTileQ * 16; // at head_dim 64
    float4 o[kMost];
    float2 stats[kMost];
};

// Row tile row_tile, of kRows rows, of a sequence with `length` keys, which is clamped to the cache.
template <int kRows = kTileQ> __device__ __forceinline__ Stream stream_of(const Params &params, int32_t length, int32_t row_tile) {
    Stream stream;
    stream.row_begin = row_tile * kRows;
    stream.num_rows = min(kRows, params.num_rows - stream.row_begin);
    stream.band = sa_band_with_keys(params.band, max(0, min(length, params.band.k_len)));
    const sa_range tokens = {static_cast<int32_t>(sa_divide(stream.row_begin, params.by_group)),
            static_cast<int32_t>(sa_divide(stream.row_begin + stream.num_rows - 1, params.by_group)) + 1};
    stream.tiles = sa_key_tiles_of(&stream.band, tokens, kTileK);
    stream.num_tiles = max(1, sa_key_tile_count(&stream.tiles));
    return stream;
}

// A sequence's length, past the SM's caches; the capacity if the cache has no lengths, or for a batch of -1.
__device__ __forceinline__ int32_t read_length(const Params &params, int32_t batch) {
    return batch >= 0 && params.cache_seqlens ? load_relaxed(params.cache_seqlens + batch) : params.band.k_len;
}

// Stream `number` of a kv head, numbered by sequence and row tile, at its sequence's current length. batch: its sequence.
template <int kRows = kTileQ> __device__ __forceinline__ Stream stream_at(const Params &params, uint32_t number, int32_t &batch) {
    batch = static_cast<int32_t>(sa_divide(number, params.by_row_tiles));
    return stream_of<kRows>(params, read_length(params, batch), static_cast<int32_t>(number) - batch * params.row_tiles);
}

// How many of the positions that are cut into shares the stream takes; see sa_share.
__device__ __forceinline__ uint32_t positions_of(const Params &params, const Stream &stream) {
    return sa_key_tile_count(&stream.tiles) ? stream.num_tiles + params.cut.begin : 0;
}

__device__ __forceinline__ void check_length(const Params &params, int32_t length) {
    if (static_cast<uint32_t>(length) > static_cast<uint32_t>(params.band.k_len)) atomicOr(params.error_word, kBadCacheSeqlens);
}

// A thread's sequences [first, past). by_warp: the first warp has threads enough, and no barrier is needed.
struct ThreadSequences {
    int32_t first, past;
    bool by_warp;
};

template <int kThreads> __device__ __forceinline__ ThreadSequences thread_sequences(const Params &params) {
    const bool by_warp = params.batch <= 32;
    const int32_t each = by_warp ? 1 : (params.batch + kThreads - 1) / kThreads;
    const int32_t first = min(static_cast<int32_t>(threadIdx.x) * each, params.batch);
    return {first, min(first + each, params.batch), by_warp};
}

// Speculation: lengths and pages are read while the preceding kernel may still write them, and again after it ends. If they differ, the
// block starts again before it has written anything. Holds a thread's length, where it needs only one.
struct Speculation {
    int32_t batch, length; // batch: the sequence whose length this thread holds, negative for none
    bool before_wait;      // the preceding kernel may still run

    __device__ __forceinline__ void wait() {
        if (!before_wait) return;
        wait_for_previous_kernel();
        before_wait = false;
    }

    // now: the length read after the wait. True if the one before was stale.
    __device__ __forceinline__ bool replace_length(const Params &params, int32_t now) {
        const bool stale = length != now;
        length = now;
        check_length(params, now);
        return stale;
    }
};

template <int kThreads> __device__ __forceinline__ Speculation speculate(const Params &params, uint32_t number, bool before_wait) {
    Speculation speculation = {-1, 0, before_wait};
    if (params.num_splits) {
        const uint32_t stream = sa_divide(sa_divide(number, params.by_heads), params.by_splits);
        if (threadIdx.x == 0) speculation.batch = static_cast<int32_t>(sa_divide(stream, params.by_row_tiles));
    } else if (params.batch <= kThreads) {
        if (static_cast<int32_t>(threadIdx.x) < params.batch) speculation.batch = static_cast<int32_t>(threadIdx.x);
    } else {
        speculation.wait();
    }
    speculation.length = read_length(params, speculation.batch);
    return speculation;
}

__device__ __forceinline__ int32_t length_of(const Params &params, const Speculation &speculation, int32_t b) {
    return b == speculation.batch ? speculation.length : params.cache_seqlens ? params.cache_seqlens[b] : params.band.k_len;
}

// A thread's sequences hold parts [begin, end) of a kv head, each of `length` tiles; with shares, positions instead, and `length` is a
// share's.
struct Split {
    uint32_t begin, end, length;
    bool shares;
};

// Counts the tiles of a kv head, which by `cut`, or else params.cut, give the length of a part, then its parts.
template <int kThreads, int kRows = kTileQ, class... Cut>
__device__ __forceinline__ Split split_streams(
        PartSmem<kThreads> &smem, const Params &params, const Speculation &speculation, const Cut &...cut) {
    const ThreadSequences range = thread_sequences<kThreads>(params);
    const bool one_stream = range.past - range.first <= 1 && params.row_tiles == 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (range.by_warp && warp > 0) return {0, 0, 1, false};
    uint32_t tiles = 0, positions = 0, parts = 0, length = 0, total;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        if (pass && one_stream) {
            parts = (tiles + length - 1) / length;
        } else {
#pragma unroll 1
            for (int32_t b = range.first; b < range.past; b++) {
                const int32_t its_length = length_of(params, speculation, b);
                if (!speculation.before_wait && blockIdx.x == 0) check_length(params, its_length);
#pragma unroll 1
                for (int32_t row_tile = 0; row_tile < params.row_tiles; row_tile++) {
                    const Stream stream = stream_of<kRows>(params, its_length, row_tile);
                    const uint32_t its_tiles = stream.num_tiles;
                    if (pass) {
                        parts += (its_tiles + length - 1) / length;
                    } else if (kHasShares<kThreads>) {
                        tiles += its_tiles;
                        positions += positions_of(params, stream);
                    } else {
                        tiles = max(tiles, its_tiles * params.row_tiles); // so that no stream has more parts than blocks
                    }
                }
            }
        }
        if (pass) break;
        total = __reduce_add_sync(0xffffffffu, tiles);
        if (!range.by_warp) {
            if (lane == 0) smem.sums[warp].x = total;
            __syncthreads();
            total = 0;
#pragma unroll
            for (int w = 0; w < kThreads / 32; w++) total += smem.sums[w].x;
        }
        if constexpr (sizeof...(Cut))
            length = sa_part_length(&cut..., total * params.num_heads);
        else
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
    if (!range.by_warp) {
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

__device__ __forceinline__ bool is_sound(const Part &part, const Params &params) {
    return part.index < part.num_parts && (part.num_parts == 1 || part.slot + part.num_parts <= params.head_slots);
}

// The part of share `share` in the stream that begins at position `begin`: from the stream's position `at` on, at most `room` of them.
__device__ __forceinline__ void take_share(Part &part, const Params &params, uint32_t share, uint32_t begin, uint32_t at, uint32_t room) {
    const sa_share of = sa_share_of(part.stream.num_tiles, params.cut.begin, part.length, share, begin, at, room);
    part.first = static_cast<int32_t>(of.first);
    part.last = static_cast<int32_t>(of.last);
    part.index = of.part;
    part.num_parts = of.num_parts;
    part.slot = of.slot;
    part.begin = begin;
    part.rest = of.rest;
}

// Finds part `number`, or the first part of share `number`. False if there is none. Even lengths that change under the kernel lead to no
// access outside the tensors.
template <int kThreads, int kRows = kTileQ>
__device__ __forceinline__ bool take_part(
        PartSmem<kThreads> &smem, const Params &params, uint32_t number, const Split &split, const Speculation &speculation) {
    Part &part = smem.part;
    const uint32_t of_heads = sa_divide(number, params.by_heads), head = number - of_heads * params.num_heads;
    const uint32_t wanted = split.shares ? of_heads * split.length : of_heads;
    uint32_t at = wanted - split.begin, room = split.end - split.begin, length = split.length; // counted from sequence b on
    int32_t b = thread_sequences<kThreads>(params).first, row_tile = 0;
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
            stream = stream_of<kRows>(params, length_of(params, speculation, b), row_tile);
            if (params.num_splits) length = sa_divide(stream.num_tiles + params.num_splits - 1, params.by_splits);
            num_parts = (stream.num_tiles + length - 1) / length;
            const uint32_t size = split.shares ? positions_of(params, stream) : num_parts;
            if (at < size || size >= room || params.num_splits) break;
            at -= size;
            room -= size;
            if (++row_tile < params.row_tiles) continue;
            row_tile = 0;
            if (++b == params.batch) b = 0, room = 0; // lengths have changed
        }
        part.stream = stream;
        part.batch = b;
        part.kv_head = static_cast<int32_t>(head);
        if (split.shares) {
            part.length = length;
            take_share(part, params, of_heads, wanted - at, at, length);
        } else {
            part.first = static_cast<int32_t>(at * length);
            part.last = static_cast<int32_t>(min(at * length + length, stream.num_tiles));
            part.rest = 0;
            part.index = at;
            part.num_parts = num_parts;
            part.slot = of_heads - at;
        }
        part.found = is_sound(part, params);
    }
    if (threadIdx.x == 0) part.shares = split.shares;
    __syncthreads();
    return part.found;
}

// The next part of the block's share. False if the share ends here.
template <int kThreads, int kRows = kTileQ> __device__ __forceinline__ bool take_next(PartSmem<kThreads> &smem, const Params &params) {
    Part &part = smem.part;
    if (part.rest == 0) return false;
    __syncthreads(); // no thread reads the previous part any more
    if (threadIdx.x < 32) {
        const uint32_t share = part.slot / 2 + part.index, room = part.rest;
        const uint32_t begin = part.begin + part.stream.num_tiles + params.cut.begin;
        const uint32_t num_streams = params.batch * params.row_tiles;
        uint32_t next = part.batch * params.row_tiles + sa_tile_of(part.stream.row_begin, kRows) + 1, with_keys = 0;
        __syncwarp();
        if (threadIdx.x == 0) part.found = false;
        __syncwarp();
#pragma unroll 1
        for (; next < num_streams && !with_keys; next += 32) { // a stream a lane
            int32_t batch;
            const Stream found = stream_at<kRows>(params, min(next + threadIdx.x, num_streams - 1), batch);
            with_keys = __ballot_sync(0xffffffffu, sa_key_tile_count(&found.tiles) > 0);
            if (static_cast<int>(threadIdx.x) != __ffs(static_cast<int>(with_keys)) - 1) continue;
            part.batch = batch;
            part.stream = found;
            take_share(part, params, share, begin, 0, room);
            part.found = is_sound(part, params);
        }
    }
    __syncthreads();
    return part.found;
}

__device__ __forceinline__ float *slot_of(const Part &part, const Params &params, uint32_t index) {
    return params.slots + static_cast<int64_t>(part.kv_head * params.head_slots + part.slot + index) * params.slot_floats;
}

} // namespace sa::decode
