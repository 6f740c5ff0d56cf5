// SPDX-License-Identifier: Apache-2.0
//
// What a decode block works on: fragments, runs of the key tiles of one stream of rows. Either every stream is cut into the same number of
// parts, one block each, or all tiles of all streams, end to end, are cut into shares of equal size, one block each, by the lengths found.
#pragma once

#include "cuda/attn/work.cuh"

namespace sa {

constexpr int kTileQ = sa_decode_cuda_sm80_d64_tile_q, kTileK = sa_decode_cuda_sm80_d64_tile_k, kMaxStages = 4;
static_assert(kTileQ == 16 && kTileK == 16, "one mma.sync tile of rows, and one step of P V");

// What the launcher knows. counters and slots lie in the workspace.
struct Schedule {
    unsigned long long *counters, tag;
    float *slots;
    int64_t slot_floats;
    unsigned *error_word;
    int32_t num_streams;
    int32_t num_splits; // 0: shares of equal size, at most most_shares
    int32_t workers, most_shares;
    int32_t num_rows, row_tiles, group; // of a sequence and kv head
    int32_t stages;
    uint32_t page_factor, page_shift;
    bool whole_tiles; // no tile lies in two pages
    float scale_log2;
};

// Keys are divided by the page size as in (key * factor) >> shift, which is right for keys below 2^31 and sizes up to there: with
// factor * size = 2^shift + e, 0 <= e < size <= 2^(shift - 31), key * e stays below 2^shift.
static inline void set_page_size(Schedule &schedule, int64_t page_size) {
    const uint64_t size = static_cast<uint64_t>(sa_clamp(page_size, 1, INT32_MAX));
    schedule.page_shift = 31;
    while (size > 1ull << (schedule.page_shift - 31)) schedule.page_shift++;
    schedule.page_factor = static_cast<uint32_t>(((1ull << schedule.page_shift) + size - 1) / size);
    schedule.whole_tiles = page_size % kTileK == 0; // so is a cache without pages
}

// One stream of rows: rows r = token * group + head within the group.
struct Stream {
    sa_band band;
    sa_key_tiles tiles;
    int32_t row_begin, num_rows;
    int32_t num_tiles; // at least 1: a stream without keys is work as well
};

// Tiles [first, last) of a stream, its part `part` of num_parts.
struct Fragment {
    Stream stream;
    int64_t batch, kv_head, counter, slots;
    int32_t first, last, part, num_parts;
};

// Where a block is in its share [position, end) of all tiles; sequence b begins at b_begin.
struct Cursor {
    int64_t b;
    uint32_t b_begin, position, end, num_tiles, num_shares;
};

struct Smem {
    Cursor cursor;
    Fragment fragment;
    uint32_t sums[8];
    int32_t begin[kTileQ], end[kTileQ], sink_end[kTileQ]; // what each row sees: [0, sink_end) and [begin, end)
    float s_aux[kTileQ];
    bool alive, is_last;
};

__device__ __forceinline__ Stream stream_of(const sinkattn_decode_args &args, const Schedule &schedule, int64_t b, int32_t row_tile) {
    Stream stream;
    stream.row_begin = row_tile * kTileQ;
    stream.num_rows = min(kTileQ, schedule.num_rows - stream.row_begin);
    stream.band = sa_band_of(&args.fwd.problem.mask, args.fwd.problem.q_len, sa_cache_len(&args, b));
    const sa_range tokens = {stream.row_begin / schedule.group, (stream.row_begin + stream.num_rows - 1) / schedule.group + 1};
    stream.tiles = sa_key_tiles_of(&stream.band, tokens, kTileK);
    stream.num_tiles = max(1, sa_key_tile_count(&stream.tiles));
    return stream;
}

__device__ __forceinline__ uint32_t sequence_tiles(const sinkattn_decode_args &args, const Schedule &schedule, int64_t b) {
    uint32_t tiles = 0;
#pragma unroll 1
    for (int32_t row_tile = 0; row_tile < schedule.row_tiles; row_tile++) tiles += stream_of(args, schedule, b, row_tile).num_tiles;
    return tiles * static_cast<uint32_t>(args.fwd.problem.num_kv_heads);
}

__device__ __forceinline__ void check_length(const sinkattn_decode_args &args, int64_t b, unsigned *error_word) {
    const int64_t length = args.cache_seqlens ? args.cache_seqlens[b] : 0;
    if (length < 0 || length > args.fwd.problem.k_len) atomicOr(error_word, kBadCacheSeqlens);
}

// The block's share of all sequences' tiles, by a prefix sum over their lengths. Ends with the cursor written, not yet visible.
template <class C> __device__ __forceinline__ void take_share(Smem &smem, const sinkattn_decode_args &args, const Schedule &schedule) {
    const int64_t batch = args.fwd.problem.batch, each = sa_ceil_div(batch, C::kThreads); // a shift
    const int64_t first = sa_min(threadIdx.x * each, batch), past = sa_min(first + each, batch);
    uint32_t tiles = 0;
#pragma unroll 1
    for (int64_t b = first; b < past; b++) {
        tiles += sequence_tiles(args, schedule, b);
        if (blockIdx.x == 0) check_length(args, b, schedule.error_word);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t before = tiles;
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) smem.sums[warp] = before;
    if (threadIdx.x == 0) smem.cursor.position = smem.cursor.end = 0; // a block without a share
    __syncthreads();
    before -= tiles;
    uint32_t total = 0;
    for (int w = 0; w < C::kThreads / 32; w++) {
        before += w < warp ? smem.sums[w] : 0;
        total += smem.sums[w];
    }
    const uint32_t num_shares = sa_balanced_shares(total, schedule.num_streams, C::kStep, schedule.workers, schedule.most_shares);
    if (blockIdx.x >= num_shares) return; // the others have it all
    const uint32_t begin = sa_share_begin(total, num_shares, blockIdx.x);
    if (begin < before || begin >= before + tiles) return;
    int64_t b = first;
#pragma unroll 1
    for (uint32_t size; b + 1 < past && begin >= before + (size = sequence_tiles(args, schedule, b)); b++) before += size;
    smem.cursor = {b, before, begin, sa_share_begin(total, num_shares, blockIdx.x + 1), total, num_shares};
}

// The next fragment of the block's share. Lengths that change under the kernel lead to no access outside, whatever else they do.
__device__ __forceinline__ bool next_share(Smem &smem, const sinkattn_decode_args &args, const Schedule &schedule) {
    Cursor &cursor = smem.cursor;
    Fragment &fragment = smem.fragment;
    const uint32_t num_heads = static_cast<uint32_t>(args.fwd.problem.num_kv_heads);
    if (cursor.position >= cursor.end) return false;
#pragma unroll 1
    for (uint32_t begin = cursor.b_begin; cursor.b < args.fwd.problem.batch; cursor.b++, cursor.b_begin = begin)
#pragma unroll 1
        for (int32_t row_tile = 0; row_tile < schedule.row_tiles; row_tile++) {
            fragment.stream = stream_of(args, schedule, cursor.b, row_tile);
            const uint32_t n = fragment.stream.num_tiles, within = cursor.position - begin;
            begin += n * num_heads;
            if (cursor.position >= begin) continue;
            const uint32_t first = within % n, last = min(n, first + cursor.end - cursor.position), start = cursor.position - first;
            const uint32_t first_block = sa_share_of(cursor.num_tiles, cursor.num_shares, start);
            const uint32_t last_block = sa_share_of(cursor.num_tiles, cursor.num_shares, min(start + n, cursor.num_tiles) - 1);
            fragment.batch = cursor.b;
            fragment.kv_head = within / n;
            fragment.first = static_cast<int32_t>(first);
            fragment.last = static_cast<int32_t>(last);
            fragment.part = static_cast<int32_t>(blockIdx.x - first_block);
            fragment.num_parts = static_cast<int32_t>(last_block - first_block) + 1;
            fragment.counter = first_block; // in a block at most one stream begins that goes on after it
            fragment.slots = 2ll * first_block;
            cursor.position += last - first;
            return true;
        }
    return false;
}

// The one fragment of a block where every sequence is cut into num_splits parts.
__device__ __forceinline__ bool take_part(Smem &smem, const sinkattn_decode_args &args, const Schedule &schedule) {
    Fragment &fragment = smem.fragment;
    const unsigned num_splits = schedule.num_splits, row_tiles = schedule.row_tiles, num_heads = args.fwd.problem.num_kv_heads;
    const unsigned item = blockIdx.x / num_splits, part = blockIdx.x % num_splits, head = item / row_tiles;
    fragment.batch = head / num_heads;
    fragment.kv_head = head % num_heads;
    fragment.stream = stream_of(args, schedule, fragment.batch, item % row_tiles);
    const int32_t num_parts = min(schedule.num_splits, fragment.stream.num_tiles);
    if (part == 0 && fragment.kv_head == 0 && fragment.stream.row_begin == 0) check_length(args, fragment.batch, schedule.error_word);
    if (static_cast<int32_t>(part) >= num_parts) return false;
    const sa_range tiles = sa_split_part(fragment.stream.num_tiles, num_parts, part);
    fragment.first = static_cast<int32_t>(tiles.begin);
    fragment.last = static_cast<int32_t>(tiles.end);
    fragment.part = static_cast<int32_t>(part);
    fragment.num_parts = num_parts;
    fragment.counter = item;
    fragment.slots = static_cast<int64_t>(item) * num_splits;
    return true;
}

// A block leaves up to two partials of its share: of a stream that began before it, and of one that goes on after it.
__device__ __forceinline__ float *slot_of(const Fragment &fragment, const Schedule &schedule, int32_t part) {
    const int64_t slot = schedule.num_splits ? part : 2 * static_cast<int64_t>(part) + (part == 0);
    return schedule.slots + (fragment.slots + slot) * schedule.slot_floats;
}

} // namespace sa
