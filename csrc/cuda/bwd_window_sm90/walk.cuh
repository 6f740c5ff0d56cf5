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
    int owners;            // thread blocks of a share: 1, or 2, the first for dK and dV, the second for dQ
    int64_t steps;         // of a sequence of a dense batch

    __host__ __device__ int heads() const { return 1 << head_shift; }
    __host__ __device__ int tokens() const { return kRows >> head_shift; }
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
    int head_in_group, end_head;   // the tile's heads end before end_head of the group
    int key, num_keys;             // coordinate of the newest tile's first key; keys of the sequence from there on
    int last_token, last_flags;    // every head's last step ends at this position; flags of the tile's last step alone

    __device__ __forceinline__ int seen() const { return tiles & 7; }        // by the rows
    __device__ __forceinline__ int owned() const { return tiles >> 4 & 7; }  // dK and dV are this block's
    __device__ __forceinline__ int loaded() const { return tiles >> 8 & 7; } // with this step
};

// The state from which the next tile follows. One thread updates it, in shared memory.
struct ShareWalk {
    int64_t remaining;      // steps of the share after this segment
    int64_t index, kv_head; // index: of the sequence
    sa_sequence sequence;
    int first;                  // first key tile that a row may see
    int tile, begin, end, last; // the segment owns tiles [begin, end) and visits [begin, last)
    int newest;
    bool new_kv_head;
    bool owns_keys, owns_rows; // dK and dV; dQ
};

// A packed batch has one more, the rows past cu_seqlens_q[batch], without keys.
__device__ __forceinline__ int64_t num_sequences(const sinkattn_problem &problem) { return problem.batch + problem.packed; }

// The first tile with rows; below 0 where rows come before all keys.
__host__ __device__ __forceinline__ int first_row_tile(const sa_sequence &sequence) {
    return static_cast<int>(sequence.k_len - sequence.q_len) >> 6;
}

// Tiles [begin, end) of a sequence; those from first_row on have rows. Without those before every row's window, as chunks with long caches
// have: the second launch zeroes their dK and dV.
struct Tiles {
    int begin, first_row, end;
};

__host__ __device__ __forceinline__ Tiles tiles_of(const sa_sequence &sequence, const WalkShape &p) {
    const int end = sa_tile_from(static_cast<int>(sequence.k_len), kKeys), first = first_row_tile(sequence);
    if (!sequence.q_len) return {end, end, end};
    return {first < 0 ? first : sa_last(first - p.tiles_before, 0), first, end};
}

// Leading tiles without rows have one step each; the others have one a head of the GQA group.
__host__ __device__ __forceinline__ int num_steps(const sa_sequence &sequence, const WalkShape &p) {
    const Tiles tiles = tiles_of(sequence, p);
    return tiles.first_row - tiles.begin + (tiles.end - tiles.first_row) * p.group;
}

// The tile of the sequence's step n.
__device__ __forceinline__ int tile_of_step(const Tiles &tiles, int n, const WalkShape &p) {
    const int rowless = tiles.first_row - tiles.begin;
    return n <= rowless ? tiles.begin + n : tiles.first_row + (n - rowless) / p.group;
}

// From the sequence's step n on. False where the share ends in that step's tile, which is the next share's.
__device__ __forceinline__ bool open_segment(ShareWalk &walk, const WalkShape &p, int n) {
    const Tiles tiles = tiles_of(walk.sequence, p);
    const int steps = static_cast<int>(sa_min(walk.remaining, num_steps(walk.sequence, p) - n));
    walk.remaining -= steps;
    walk.first = sa_last(tiles.begin, 0);
    walk.begin = tile_of_step(tiles, n, p);
    walk.end = walk.remaining ? tiles.end : tile_of_step(tiles, n + steps, p);
    walk.last = walk.end > 0 && walk.owns_keys ? sa_first(walk.end + p.tiles_before, tiles.end) : walk.end;
    walk.tile = walk.begin - 1;
    if (walk.begin < walk.end) return true;
    walk.last = walk.begin;
    return false;
}

// The flags that depend on a step's tokens and heads.
__device__ __forceinline__ int edge_flags(const Step &step, const WalkShape &p) {
    int flags = step.token < step.begin || step.token + p.tokens() > step.end ? kEdge : 0;
    if (step.token + p.tokens() >= step.last_token)
        flags |= kHeadsEnd | (step.head_in_group + p.heads() >= step.end_head ? step.last_flags : 0);
    return flags;
}

// The first step of the next tile; flags 0 at the end of the share.
__device__ __forceinline__ void next_tile(Step &step, ShareWalk &walk, const sinkattn_fwd_args &args, const WalkShape &p) {
    step.flags = 0;
    if (walk.tile + 1 >= walk.last) {
        Tiles tiles;
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
        if (!open_segment(walk, p, 0)) return;
    }
    const int tile = ++walk.tile, newest = ++walk.newest, first = kKeys * tile;
    const int k_len = static_cast<int>(walk.sequence.k_len), shift = k_len - static_cast<int>(walk.sequence.q_len);
    const bool owns_rows = walk.owns_rows && tile < walk.end;
    int seen = 0, owned = 0;
    for (int age = 0; age < kSeenTiles; age++) {
        const bool own = walk.owns_keys && tile - age >= sa_last(walk.begin, 0) && tile - age < walk.end;
        owned |= own << age;
        seen |= (tile - age >= walk.first && age <= p.tiles_before && (owns_rows || own)) << age;
    }
    step.begin = sa_within(shift - first, 0, kKeys);
    step.end = sa_within(k_len - first, 0, kKeys);
    const bool has_rows = step.begin < step.end; // else one step without rows stands for the tile
    step.token = has_rows ? step.begin & -p.tokens() : 0;
    step.last_token = has_rows ? step.end : p.tokens();
    step.head_in_group = 0;
    step.end_head = has_rows ? p.group : p.heads();
    step.newest = newest;
    step.tiles = seen | owned << 4 | (tile == walk.begin ? seen : seen & 1) << 8;
    step.row = static_cast<int>(walk.sequence.q_begin) + first + step.token - shift;
    step.batch = static_cast<int>(walk.sequence.batch);
    step.kv_head = static_cast<int>(walk.kv_head);
    step.head = step.kv_head * p.group;
    step.key = static_cast<int>(walk.sequence.k_begin) + first;
    step.num_keys = k_len - first;
    step.last_flags = tile + 1 == walk.last ? kTileEnd | kSegmentEnd : kTileEnd;
    int flags = kExists | kTileBegin | edge_flags(step, p);
    if (owns_rows) flags |= kOwnsRows;
    if (walk.new_kv_head) flags |= kKvHeadBegin;
    if (args.s_aux && walk.index < args.problem.batch) flags |= kHasSink;
    walk.new_kv_head = false;
    step.flags = flags;
}

// The step after `before` in its tile. False where there is none.
__device__ __forceinline__ bool next_in_tile(Step &step, const Step &before, const WalkShape &p) {
    step = before;
    step.token += p.tokens();
    step.row += p.tokens();
    if (step.token >= step.last_token) { // the next part of the heads, from the tile's first step on
        const int back = step.token - (step.begin & -p.tokens());
        step.token -= back;
        step.row -= back;
        step.head += p.heads();
        step.head_in_group += p.heads();
    }
    step.tiles &= 0xff;
    step.flags = (before.flags & (kExists | kOwnsRows | kHasSink)) | edge_flags(step, p);
    return step.head_in_group < step.end_head;
}

// Starts at the first tile of the block's share. Of a packed batch all threads sum up steps; the one whose sequences hold the first step
// writes the walk.
template <int kThreads>
__device__ __forceinline__ void start_walk(
        ShareWalk &walk, int64_t (&scan)[kThreads / 32], const sinkattn_fwd_args &args, const WalkShape &p) {
    const auto size = [&](int64_t b) { return num_steps(sequence_or_tail(args, b), p); };
    int64_t first = 0, before = 0, total = p.steps * args.problem.batch, own = total;
    if (args.problem.packed) {
        const int64_t count = num_sequences(args.problem), each = sa_ceil_div(count, kThreads),
                      end = sa_min((threadIdx.x + 1) * each, count);
        first = sa_min(threadIdx.x * each, count);
        own = total = 0;
        for (int64_t b = first; b < end; b++) own += size(b);
        before = own;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int64_t lower = __shfl_up_sync(0xffffffffu, before, distance);
            if (static_cast<int>(threadIdx.x % 32) >= distance) before += lower;
        }
        if (threadIdx.x % 32 == 31) scan[threadIdx.x / 32] = before;
        __syncthreads();
        before -= own;
#pragma unroll 1
        for (int warp = 0; warp < kThreads / 32; warp++) {
            if (warp < static_cast<int>(threadIdx.x / 32)) before += scan[warp];
            total += scan[warp];
        }
    } else if (threadIdx.x > 0) {
        return;
    }
    const unsigned share = blockIdx.x / p.owners, shares = gridDim.x / p.owners;
    const int64_t all = total * args.problem.num_kv_heads, each = all / shares;
    const auto longer = static_cast<unsigned>(all - each * shares); // so many shares have one step more
    const int64_t begin = each * share + longer * share / shares, length = each * (share + 1) + longer * (share + 1) / shares - begin;
    if (length == 0) {
        if (threadIdx.x == 0) {
            walk.remaining = 0;
            walk.tile = walk.last = walk.newest = 0;
        }
        return;
    }
    const int64_t kv_head = begin / total;
    int64_t at = begin - kv_head * total, b = first;
    if (at < before || at >= before + own) return;
    if (args.problem.packed) {
        at -= before;
        for (; at >= size(b); b++) at -= size(b);
    } else {
        b = at / p.steps;
        at -= b * p.steps;
    }
    walk.remaining = length;
    walk.index = b;
    walk.kv_head = kv_head;
    walk.sequence = sequence_or_tail(args, b);
    walk.newest = kSeenTiles - 2; // its first tile is the next: two older ones may be loaded with it
    walk.new_kv_head = true;
    walk.owns_keys = share * p.owners == blockIdx.x;
    walk.owns_rows = p.owners == 1 || !walk.owns_keys;
    open_segment(walk, p, static_cast<int>(at));
}

} // namespace sa::bwd_window_sm90
