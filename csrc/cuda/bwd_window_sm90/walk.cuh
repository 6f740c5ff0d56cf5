// SPDX-License-Identifier: Apache-2.0
//
// The steps of a thread block of the windowed backward.
//
// Positions of a sequence are cut into tiles of 64 from key 0; the tokens of tile a see keys of the tiles a - 2, a - 1 and a only. The
// tiles of all sequences of the first kv head, then of the next, are cut into shares, one a thread block, without regard to sequences. A
// share has whole tiles and as many steps as the others: a tile without rows, as before the rows of a chunk, takes one. A segment is the
// part of a share in one sequence and kv head. The block owns dQ, dK and dV of its tiles. It also visits up to two tiles after a segment,
// whose rows see its last keys, and loads the keys of up to two tiles before it, which its first rows see. Where tiles are so few that
// there are two blocks for each, every share has two: the one owns dK and dV, the other dQ.
//
// A step is 64 rows of a tile: the heads of a GQA group in parts of a power of two, times tokens.
#pragma once

#include "cuda/work/items.cuh"

namespace sa::bwd_window_sm90 {

constexpr int kSeenTiles = 3; // key tiles that a token may see
constexpr int kRows = sa_bwd_cuda_sm90_window_tile_q, kKeys = sa_bwd_cuda_sm90_window_tile_k;
static_assert(kRows == 64 && kKeys == 64, "rows and keys of a wgmma");

struct WalkShape {
    int max_distance;      // a row sees its own position's key and this many before
    int tiles_before;      // key tiles before its own that a row may see
    int group, head_shift; // q heads of a kv head; a step has 1 << head_shift of them, and 64 >> head_shift tokens
    int owners;            // thread blocks of a share: 1, or with kShared 2, the first for dK and dV, the second for dQ

    template <bool kShared> __device__ __forceinline__ bool owns_keys() const { return !kShared || owners == 1 || blockIdx.x % 2 == 0; }
    template <bool kShared> __device__ __forceinline__ bool owns_rows() const { return !kShared || owners == 1 || blockIdx.x % 2 == 1; }

    // Whether a row sees the key `distance` before its own position's.
    __device__ __forceinline__ bool sees(int distance) const {
        return static_cast<uint32_t>(distance) <= static_cast<uint32_t>(max_distance);
    }
};

enum : int {
    kExists = 1,
    kTileBegin = 2,    // the tile's first step
    kTileEnd = 4,      // the tile's last step
    kOwnsRows = 8,     // dQ and ds_aux of the rows are this block's
    kHeadsEnd = 16,    // the next step has other heads, or is of another tile
    kSegmentEnd = 32,  // the segment's last step
    kKvHeadBegin = 64, // the block's first step of a kv head
    kEdge = 128,       // some of the step's rows lie outside the sequence
    kHasSink = 256
};

// Key tiles are numbered in the order in which the block meets them. A tile's age is the newest tile's number less its own; in a set of
// key tiles bit `age` stands for it.
struct alignas(16) Step {
    int flags, newest, tiles;      // tiles: three sets
    int token, begin, end;         // of the tile's 64 positions: the step's first, and those [begin, end) that have tokens
    int row, batch, kv_head, head; // coordinates of the first row in tensors like q
    int head_in_group;
    int key, num_keys;          // coordinate of the newest tile's first key; keys of the sequence from there on
    int last_token, last_flags; // the heads' last step ends at this position; flags of that step alone

    __device__ __forceinline__ int seen() const { return tiles & 7; }        // by the rows
    __device__ __forceinline__ int owned() const { return tiles >> 4 & 7; }  // dK and dV are this block's
    __device__ __forceinline__ int loaded() const { return tiles >> 8 & 7; } // with this step
};

// The state from which the next step follows. One thread updates it, in shared memory.
struct ShareWalk {
    int64_t remaining;      // steps of the share after this segment
    int64_t index, kv_head; // index: of the sequence
    sa_sequence sequence;
    int64_t first;                  // first key tile that a row may see
    int64_t tile, begin, end, last; // the segment owns tiles [begin, end) and visits [begin, last)
    int newest, token_begin, token_end;
    int first_token, last_token, heads, num_heads; // positions of the tile's steps; parts of its heads: taken, all
    bool new_kv_head;
};

// A packed batch has one more, the rows past cu_seqlens_q[batch], without keys.
__device__ __forceinline__ int64_t num_sequences(const sinkattn_problem &problem) { return problem.batch + problem.packed; }

// The first tile with rows; below 0 where rows come before all keys.
__device__ __forceinline__ int64_t first_row_tile(const sa_sequence &sequence) {
    const int64_t shift = sequence.k_len - sequence.q_len;
    return shift >= 0 ? sa_tile_of(static_cast<sa_position_t>(shift), kKeys) : -sa_ceil_div(-shift, kKeys);
}

// The sequence's tiles, without those before every row's window, as chunks with long caches have: the second launch zeroes their dK and dV.
__device__ __forceinline__ sa_range tiles_of(const sa_sequence &sequence, const WalkShape &p) {
    const auto first = static_cast<sa_position_t>(first_row_tile(sequence)),
               end = static_cast<sa_position_t>(sa_ceil_div(sequence.k_len, kKeys));
    if (!sequence.q_len) return {end, end};
    return {first < 0 ? first : sa_last(first - p.tiles_before, 0), end};
}

// Leading tiles without rows have one step each; the others have one a head of the GQA group.
__device__ __forceinline__ int64_t num_rowless(const sa_sequence &sequence, const sa_range &tiles) {
    return sequence.q_len ? first_row_tile(sequence) - tiles.begin : 0;
}

__device__ __forceinline__ int64_t num_steps(const sa_sequence &sequence, const WalkShape &p) {
    const sa_range tiles = tiles_of(sequence, p);
    const int64_t rowless = num_rowless(sequence, tiles);
    return rowless + (tiles.end - tiles.begin - rowless) * p.group;
}

// The tile of the sequence's step n.
__device__ __forceinline__ int64_t tile_of_step(const sa_sequence &sequence, const sa_range &tiles, int64_t n, const WalkShape &p) {
    const int64_t rowless = num_rowless(sequence, tiles);
    return tiles.begin + (n <= rowless ? n : rowless + (n - rowless) / p.group);
}

__device__ __forceinline__ void open_tile(ShareWalk &walk, const WalkShape &p) {
    const int tokens = kRows >> p.head_shift;
    const int64_t first = kKeys * walk.tile, shift = walk.sequence.k_len - walk.sequence.q_len;
    walk.token_begin = static_cast<int>(sa_clamp(shift - first, 0, kKeys));
    walk.token_end = static_cast<int>(sa_clamp(walk.sequence.k_len - first, 0, kKeys));
    const bool has_rows = walk.token_begin < walk.token_end; // else one step without rows stands for the tile
    walk.first_token = has_rows ? walk.token_begin & -tokens : 0;
    walk.last_token = has_rows ? walk.token_end : tokens;
    walk.num_heads = has_rows ? p.group >> p.head_shift : 1;
    walk.heads = 0;
}

// From the sequence's step n on. False where the share ends in that step's tile, which is the next share's.
template <bool kShared> __device__ __forceinline__ bool open_segment(ShareWalk &walk, const WalkShape &p, int64_t n) {
    const sa_range tiles = tiles_of(walk.sequence, p);
    const int64_t steps = num_steps(walk.sequence, p) - n;
    walk.first = sa_max(tiles.begin, 0);
    walk.begin = walk.tile = n ? tile_of_step(walk.sequence, tiles, n, p) : tiles.begin;
    walk.end = walk.remaining < steps ? tile_of_step(walk.sequence, tiles, n + walk.remaining, p) : tiles.end;
    walk.remaining -= sa_min(walk.remaining, steps);
    walk.last = walk.end > 0 && p.owns_keys<kShared>() ? sa_min(walk.end + p.tiles_before, tiles.end) : walk.end;
    if (walk.begin == walk.end) {
        walk.heads = walk.num_heads = 0;
        walk.last = walk.tile;
        return false;
    }
    open_tile(walk, p);
    return true;
}

__device__ __forceinline__ bool is_tile_done(const ShareWalk &walk) { return walk.heads == walk.num_heads; }

// The number of the newest key tile of the step that next_heads would give.
__device__ __forceinline__ int next_newest(const ShareWalk &walk) { return walk.newest + is_tile_done(walk); }

// The flags that depend on a step's tokens.
__device__ __forceinline__ int token_flags(const Step &step, int tokens) {
    const bool edge = step.token < step.begin || step.token + tokens > step.end;
    return (edge ? kEdge : 0) | (step.token + tokens >= step.last_token ? step.last_flags : 0);
}

// The first step of the next part of the heads, or of the next tile; flags 0 at the end of the share.
template <bool kShared>
__device__ __forceinline__ void next_heads(Step &step, ShareWalk &walk, const sinkattn_fwd_args &args, const WalkShape &p) {
    step.flags = 0;
    if (is_tile_done(walk)) {
        if (walk.tile + 1 < walk.last) {
            walk.tile++;
            open_tile(walk, p);
        } else {
            sa_range tiles;
            do {
                if (walk.remaining <= 0) return;
                if (++walk.index == num_sequences(args.problem)) {
                    walk.index = 0;
                    walk.kv_head++;
                    walk.new_kv_head = true;
                }
                walk.sequence = sequence_or_tail(args, walk.index);
                tiles = tiles_of(walk.sequence, p);
            } while (tiles.begin == tiles.end);
            if (!open_segment<kShared>(walk, p, 0)) return;
        }
        walk.newest++;
    }
    const bool begins = walk.heads == 0, owns_rows = p.owns_rows<kShared>() && walk.tile < walk.end;
    int seen = 0, owned = 0;
    for (int age = 0; age < kSeenTiles; age++) {
        const int64_t tile = walk.tile - age;
        const bool own = p.owns_keys<kShared>() && tile >= sa_max(walk.begin, 0) && tile < walk.end;
        owned |= own << age;
        seen |= (tile >= walk.first && age <= p.tiles_before && (owns_rows || own)) << age;
    }
    const int64_t first = kKeys * walk.tile, shift = walk.sequence.k_len - walk.sequence.q_len;
    step.newest = walk.newest;
    step.tiles = seen | owned << 4 | (!begins ? 0 : walk.tile == walk.begin ? seen : seen & 1) << 8;
    step.token = walk.first_token;
    step.begin = walk.token_begin;
    step.end = walk.token_end;
    step.row = static_cast<int>(walk.sequence.q_begin + first + walk.first_token - shift);
    step.batch = static_cast<int>(walk.sequence.batch);
    step.kv_head = static_cast<int>(walk.kv_head);
    step.head_in_group = walk.heads << p.head_shift;
    step.head = step.kv_head * p.group + step.head_in_group;
    step.key = static_cast<int>(walk.sequence.k_begin + first);
    step.num_keys = static_cast<int>(walk.sequence.k_len - first);
    step.last_token = walk.last_token;
    step.last_flags = kHeadsEnd;
    if (++walk.heads == walk.num_heads) step.last_flags |= walk.tile + 1 == walk.last ? kTileEnd | kSegmentEnd : kTileEnd;
    int flags = kExists | token_flags(step, kRows >> p.head_shift);
    if (begins) flags |= kTileBegin;
    if (owns_rows) flags |= kOwnsRows;
    if (walk.new_kv_head) flags |= kKvHeadBegin;
    if (args.s_aux && walk.index < args.problem.batch) flags |= kHasSink;
    walk.new_kv_head = false;
    step.flags = flags;
}

// The step after `before`, of the same heads. False where there is none.
__device__ __forceinline__ bool next_tokens(Step &step, const Step &before, const WalkShape &p) {
    const int tokens = kRows >> p.head_shift;
    step = before;
    step.token += tokens;
    step.row += tokens;
    step.tiles &= 0xff;
    step.flags = (before.flags & (kExists | kOwnsRows | kHasSink)) | token_flags(step, tokens);
    return step.token < step.last_token;
}

// Starts at the first tile of the block's share. All threads sum up steps; the one whose sequences hold the first writes the walk.
template <int kThreads, bool kShared>
__device__ __forceinline__ void start_walk(
        ShareWalk &walk, int64_t (&scan)[kThreads / 32], const sinkattn_fwd_args &args, const WalkShape &p) {
    const int64_t count = num_sequences(args.problem), each = sa_ceil_div(count, kThreads);
    const auto size = [&](int64_t b) { return num_steps(sequence_or_tail(args, b), p); };
    const int64_t first = sa_min(threadIdx.x * each, count), end = sa_min(first + each, count);
    int64_t own = 0;
    for (int64_t b = first; b < end; b++) own += size(b);
    int64_t before = own;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t lower = __shfl_up_sync(0xffffffffu, before, distance);
        if (static_cast<int>(threadIdx.x % 32) >= distance) before += lower;
    }
    if (threadIdx.x % 32 == 31) scan[threadIdx.x / 32] = before;
    __syncthreads();
    int64_t total = 0;
    before -= own;
#pragma unroll 1
    for (int warp = 0; warp < kThreads / 32; warp++) {
        if (warp < static_cast<int>(threadIdx.x / 32)) before += scan[warp];
        total += scan[warp];
    }
    const unsigned owners = kShared ? p.owners : 1, share = blockIdx.x / owners, shares = gridDim.x / owners;
    const int64_t all = total * args.problem.num_kv_heads, begin = all * share / shares, share_end = all * (share + 1) / shares;
    if (begin == share_end) {
        if (threadIdx.x == 0) {
            walk.remaining = 0;
            walk.heads = walk.num_heads = 0;
            walk.tile = walk.last = 0;
            walk.newest = kSeenTiles - 1;
        }
        return;
    }
    const int64_t kv_head = begin / total;
    int64_t at = begin - kv_head * total;
    if (at < before || at >= before + own) return;
    at -= before;
    int64_t b = first;
    for (; at >= size(b); b++) at -= size(b);
    walk.remaining = share_end - begin;
    walk.index = b;
    walk.kv_head = kv_head;
    walk.sequence = sequence_or_tail(args, b);
    walk.newest = kSeenTiles - 1; // the number of its first tile: two older ones may be loaded with it
    walk.new_kv_head = true;
    open_segment<kShared>(walk, p, at);
}

} // namespace sa::bwd_window_sm90
