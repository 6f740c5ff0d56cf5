// SPDX-License-Identifier: Apache-2.0
//
// How a block that owns rows and keys walks down a causal window: groups of 64 positions, counted from key 0, of the sequences of one kv
// head after another, in steps of 64 rows. Rows of token group a see keys of groups a - 2, a - 1 and a only.
#pragma once

#include "cuda/work/items.cuh"

namespace sa::bwd_window_sm90 {

constexpr int kGroups = 3; // of keys that a token group may see
constexpr int kRows = sa_bwd_cuda_sm90_window_tile_q, kKeys = sa_bwd_cuda_sm90_window_tile_k;
static_assert(kRows == 64 && kKeys == 64, "rows and keys of a wgmma");

struct WalkShape {
    int behind, reach;     // keys before a row's own; groups before a row's own
    int group, head_shift; // heads of a group; 1 << head_shift heads, and 64 >> head_shift tokens a step
};

enum : int {
    kExists = 1,
    kOpens = 2,     // the first step of its token group
    kCloses = 4,    // the last one
    kOwnsRows = 8,  // dQ and ds_aux of its rows are this block's
    kHeadsEnd = 16, // the next step has other heads, or is of another token group
    kSpanEnd = 32,  // the last step of a sequence and kv head in this block
    kNewHead = 64,  // the first step of a kv head in this block
    kEdge = 128,    // some rows are no rows of the sequence
    kHasSink = 256
};

// 64 rows. Groups of keys are counted as the block meets them; r is how far before the newest one a group lies, and bit r stands for it.
struct alignas(16) Step {
    int flags, newest, groups;
    int token, begin, end;         // the first token, and those that exist, of the 64 positions of the group
    int row, batch, kv_head, head; // where the first row lies in the tensors of rows
    int head_in_group;
    int key, num_keys;          // where the first key of the newest group lies, and the keys of the sequence from there on
    int last_token, last_flags; // behind the last step of the same heads, and what that step's flags have besides

    __device__ __forceinline__ int seen() const { return groups & 7; }        // by the rows
    __device__ __forceinline__ int owned() const { return groups >> 4 & 7; }  // dK and dV are this block's
    __device__ __forceinline__ int loaded() const { return groups >> 8 & 7; } // with this step
};

// Where the next step is. Kept by one thread.
struct Walk {
    int64_t remaining; // groups behind this span
    int64_t index, kv_head;
    sa_sequence sequence;
    int64_t group, begin, end, last; // token group; the span owns groups [begin, end) and visits those before last
    int newest, token_begin, token_end;
    int first_token, last_token, heads, num_heads; // of the group's steps; blocks of heads
    bool new_head;
};

__device__ __forceinline__ int64_t num_sequences(const sinkattn_problem &problem) {
    return problem.packed ? problem.batch + 2 : problem.batch;
}

// Packed, what lies past the last sequence is two more: rows without keys, and keys without rows.
__device__ __forceinline__ sa_sequence sequence_or_tails(const sinkattn_fwd_args &args, int64_t b) {
    const sinkattn_problem &problem = args.problem;
    if (b <= problem.batch) return sequence_or_tail(args, b);
    const int64_t begin = sa_packed_begin(args.cu_seqlens_k, problem.batch, problem.k_len);
    return {0, 0, 0, begin, problem.k_len - begin};
}

// Groups of 64 positions; those below 0 are of rows that come before all keys.
__device__ __forceinline__ sa_range groups_of(const sa_sequence &sequence) {
    const int64_t before = sequence.q_len ? sa_max(sequence.q_len - sequence.k_len, 0) : 0;
    return {static_cast<sa_position_t>(-sa_ceil_div(before, kKeys)), static_cast<sa_position_t>(sa_ceil_div(sequence.k_len, kKeys))};
}

__device__ __forceinline__ void open_group(Walk &walk, const WalkShape &p) {
    const int tokens = kRows >> p.head_shift;
    const int64_t first = kKeys * walk.group, shift = walk.sequence.k_len - walk.sequence.q_len;
    walk.token_begin = static_cast<int>(sa_clamp(shift - first, 0, kKeys));
    walk.token_end = static_cast<int>(sa_clamp(walk.sequence.k_len - first, 0, kKeys));
    const bool has_rows = walk.token_begin < walk.token_end; // else one step without rows stands for the group
    walk.first_token = has_rows ? walk.token_begin & -tokens : 0;
    walk.last_token = has_rows ? walk.token_end : tokens;
    walk.num_heads = has_rows ? p.group >> p.head_shift : 1;
    walk.heads = 0;
}

__device__ __forceinline__ void open_span(Walk &walk, const WalkShape &p, int64_t begin, int64_t groups_end) {
    walk.begin = walk.group = begin;
    walk.end = sa_min(groups_end, begin + walk.remaining);
    walk.remaining -= walk.end - begin;
    walk.last = walk.end > 0 ? sa_min(walk.end + p.reach, groups_end) : walk.end;
    open_group(walk, p);
}

__device__ __forceinline__ bool is_group_done(const Walk &walk) { return walk.heads == walk.num_heads; }

// The next step's newest key group, were there such a step.
__device__ __forceinline__ int next_newest(const Walk &walk) { return walk.newest + is_group_done(walk); }

// Flags of a step that depend on its tokens.
__device__ __forceinline__ int token_flags(const Step &step, int tokens) {
    const bool edge = step.token < step.begin || step.token + tokens > step.end;
    return (edge ? kEdge : 0) | (step.token + tokens >= step.last_token ? step.last_flags : 0);
}

// The first step of the next block of heads.
__device__ __forceinline__ void next_heads(Step &step, Walk &walk, const sinkattn_fwd_args &args, const WalkShape &p) {
    step.flags = 0;
    if (is_group_done(walk)) {
        if (walk.group + 1 < walk.last) {
            walk.group++;
            open_group(walk, p);
        } else {
            sa_range groups;
            do {
                if (walk.remaining <= 0) return;
                if (++walk.index == num_sequences(args.problem)) {
                    walk.index = 0;
                    walk.kv_head++;
                    walk.new_head = true;
                }
                walk.sequence = sequence_or_tails(args, walk.index);
                groups = groups_of(walk.sequence);
            } while (groups.begin == groups.end);
            open_span(walk, p, groups.begin, groups.end);
        }
        walk.newest++;
    }
    const bool opens = walk.heads == 0, owns_rows = walk.group < walk.end;
    int seen = 0, owned = 0;
    for (int r = 0; r < kGroups; r++) {
        const int64_t group = walk.group - r;
        const bool own = group >= sa_max(walk.begin, 0) && group < walk.end;
        owned |= own << r;
        seen |= (group >= 0 && r <= p.reach && (owns_rows || own)) << r;
    }
    const int64_t first = kKeys * walk.group, shift = walk.sequence.k_len - walk.sequence.q_len;
    step.newest = walk.newest;
    step.groups = seen | owned << 4 | (!opens ? 0 : walk.group == walk.begin ? seen : seen & 1) << 8;
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
    if (++walk.heads == walk.num_heads) step.last_flags |= walk.group + 1 == walk.last ? kCloses | kSpanEnd : kCloses;
    int flags = kExists | token_flags(step, kRows >> p.head_shift);
    if (opens) flags |= kOpens;
    if (owns_rows) flags |= kOwnsRows;
    if (walk.new_head) flags |= kNewHead;
    if (args.s_aux && walk.index < args.problem.batch) flags |= kHasSink;
    walk.new_head = false;
    step.flags = flags;
}

// The step after `before`, of the same heads. False if there is none.
__device__ __forceinline__ bool next_tokens(Step &step, const Step &before, const WalkShape &p) {
    const int tokens = kRows >> p.head_shift;
    step = before;
    step.token += tokens;
    step.row += tokens;
    step.groups &= 0xff;
    step.flags = (before.flags & (kExists | kOwnsRows | kHasSink)) | token_flags(step, tokens);
    return step.token < step.last_token;
}

// The block's range of groups, of all sequences of the first kv head, then of the next: all threads count, one sets out. `scan` is theirs.
template <int kThreads>
__device__ __forceinline__ void start_walk(Walk &walk, int64_t (&scan)[kThreads / 32], const sinkattn_fwd_args &args, const WalkShape &p) {
    const int64_t count = num_sequences(args.problem), each = sa_ceil_div(count, kThreads);
    const auto size = [&](int64_t b) {
        const sa_range groups = groups_of(sequence_or_tails(args, b));
        return groups.end - groups.begin;
    };
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
    const int64_t all = total * args.problem.num_kv_heads, begin = all * blockIdx.x / gridDim.x,
                  range_end = all * (blockIdx.x + 1) / gridDim.x;
    if (begin == range_end) {
        if (threadIdx.x == 0) {
            walk.remaining = 0;
            walk.heads = walk.num_heads = 0;
            walk.group = walk.last = 0;
            walk.newest = kGroups - 1;
        }
        return;
    }
    const int64_t kv_head = begin / total;
    int64_t at = begin - kv_head * total;
    if (at < before || at >= before + own) return;
    at -= before;
    int64_t b = first;
    for (; at >= size(b); b++) at -= size(b);
    walk.remaining = range_end - begin;
    walk.index = b;
    walk.kv_head = kv_head;
    walk.sequence = sequence_or_tails(args, b);
    walk.newest = kGroups - 1; // two groups may be before it
    walk.new_head = true;
    const sa_range groups = groups_of(walk.sequence);
    open_span(walk, p, groups.begin + at, groups.end);
}

} // namespace sa::bwd_window_sm90
