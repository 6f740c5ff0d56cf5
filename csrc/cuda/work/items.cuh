// SPDX-License-Identifier: Apache-2.0
//
// Items: tiles of the rows of one kv head of one sequence. Rows are numbered r = i * group + (h - first head of the GQA group), so the
// heads of a group share a read of K and V. Lengths are read on the device, clamped, and checked by one block.
#pragma once

#include "core/layout.h"
#include "core/numerics.h"
#include "core/split.h"

namespace sa {

// The tile sizes of variants.def, as constants for the kernels' Config.
#define SA_VARIANT(op, backend, arch, needs, dtypes, max_head_dim, tile_q, tile_k, workspace, serves) \
    constexpr int sa_##op##_##backend##_##arch##_tile_q = tile_q, sa_##op##_##backend##_##arch##_tile_k = tile_k;
#include "core/variants.def"

// 1 for 0: then there is nothing to divide.
inline sa_divisor divisor_of(int64_t size) { return sa_divisor_of(static_cast<uint32_t>(sa_clamp(size, 1, INT32_MAX))); }

// One item. Rows past cu_seqlens[batch] are one more sequence, without keys and without a sink: out 0, lse -inf.
struct Work {
    sa_sequence sequence;
    sa_band band;
    int64_t kv_head;
    sa_position_t group; // heads of the GQA group
    sa_range rows, tokens;
    sa_key_tiles tiles; // that the rows see
    bool has_sink;
};

// The sequence of a packed batch that item n belongs to: the last one whose first item is at most n. Sequence `batch` is the tail.
template <class FirstItem> __device__ __forceinline__ int64_t find_sequence(int64_t batch, int64_t n, const FirstItem &first_item) {
    int64_t low = 0, high = batch + 1;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (first_item(middle) <= n)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ __forceinline__ int64_t rows_before(const sinkattn_fwd_args &args, int64_t b) {
    return sa_packed_begin(args.cu_seqlens_q, b, args.problem.q_len);
}

// A forward finds its keys in its tensors k and v. work/keys.cuh has those of a cache.
struct TensorKeys {
    static constexpr bool kCached = false, kByThreads = false;

    __device__ __forceinline__ sa_sequence sequence(const sinkattn_fwd_args &args, int64_t b) const { return sa_sequence_at(&args, b); }
};

template <class Keys = TensorKeys>
__device__ __forceinline__ sa_sequence sequence_or_tail(const sinkattn_fwd_args &args, int64_t b, const Keys &keys = {}) {
    if (b < args.problem.batch) return keys.sequence(args, b);
    const int64_t begin = rows_before(args, b);
    return {0, begin, args.problem.q_len - begin, 0, 0};
}

// Sequence b of a backward's keys: number `batch` of a packed batch is the keys past cu_seqlens_k[batch], which no row sees.
__device__ __forceinline__ sa_sequence keys_or_tail(const sinkattn_fwd_args &args, int64_t b) {
    if (b < args.problem.batch) return sa_sequence_at(&args, b);
    const int64_t begin = sa_packed_begin(args.cu_seqlens_k, args.problem.batch, args.problem.k_len);
    return {0, 0, 0, begin, args.problem.k_len - begin};
}

// The first tile of sequence b in a packed batch with tiles of `tokens` whole tokens, each sequence's its own.
__device__ __forceinline__ unsigned packed_first_tile(const sinkattn_fwd_args &args, int tokens, unsigned b) {
    return static_cast<unsigned>(rows_before(args, b)) / static_cast<unsigned>(tokens) + b;
}

// The last sequence of a packed batch whose first tile is at most n. Searched by the lanes of a warp, a sequence each.
__device__ __forceinline__ unsigned packed_sequence_of_tile(const sinkattn_fwd_args &args, int tokens, unsigned n) {
    unsigned low = 0, high = static_cast<unsigned>(args.problem.batch) + 1;
    while (high - low > 1) {
        const unsigned step = (high - low + 31) / 32, b = low + threadIdx.x % 32 * step;
        const bool begun = b < high && rows_before(args, b) < (static_cast<int64_t>(n) - b + 1) * tokens;
        low += (31 - __clz(__ballot_sync(0xffffffffu, begun) | 1)) * step;
        high = min(high, low + step);
    }
    return low;
}

static inline int64_t num_row_tiles(const sinkattn_problem &problem, int64_t tile_rows) {
    const int64_t group = problem.num_q_heads / problem.num_kv_heads;
    if (problem.packed) return sa_packed_tiles(problem.q_len * group, tile_rows, problem.batch + 1);
    return problem.batch * sa_ceil_div(problem.q_len * group, tile_rows);
}

// False when the tile has no rows. Later tiles of a causal sequence see more keys, so they come first.
template <class Keys = TensorKeys>
__device__ __forceinline__ bool find_work(const sinkattn_fwd_args &args, int64_t tile_rows, int64_t tile_k, int64_t num_tiles, int64_t item,
        Work &work, const Keys &keys = {}) {
    const sinkattn_problem &problem = args.problem;
    const auto heads = static_cast<uint32_t>(problem.num_kv_heads), n = static_cast<uint32_t>(item); // 64-bit divisions are slow
    work.group = static_cast<sa_position_t>(static_cast<uint32_t>(problem.num_q_heads) / heads);
    work.kv_head = n % heads;
    const auto tile = static_cast<uint32_t>(num_tiles - 1) - n / heads;
    int64_t b;
    int32_t within;
    if (problem.packed) {
        const auto first_tile = [&](int64_t x) {
            return static_cast<uint32_t>(rows_before(args, x)) * work.group / static_cast<uint32_t>(tile_rows) + static_cast<uint32_t>(x);
        };
        b = find_sequence(problem.batch, tile, first_tile);
        within = static_cast<int32_t>(tile - first_tile(b));
    } else {
        const auto batch = static_cast<uint32_t>(problem.batch);
        b = tile % batch;
        within = static_cast<int32_t>(tile / batch);
    }
    work.has_sink = args.s_aux && b < problem.batch;
    work.sequence = sequence_or_tail(args, b, keys);
    work.band = sa_band_of(&problem.mask, work.sequence.q_len, work.sequence.k_len);
    const auto rows = static_cast<int32_t>(tile_rows), all = static_cast<int32_t>(work.sequence.q_len) * work.group;
    work.rows.begin = within * rows;
    if (within < 0 || work.rows.begin >= all) return false;
    work.rows.end = work.rows.begin + sa_first(rows, all - work.rows.begin);
    work.tokens = {work.rows.begin / work.group, (work.rows.end - 1) / work.group + 1};
    work.tiles = sa_key_tiles_of(&work.band, work.tokens, tile_k);
    return true;
}

__device__ __forceinline__ int64_t query_offset(const Work &work, const sinkattn_tensor &tensor, sa_position_t r) {
    return sa_offset(&tensor, work.sequence.batch, work.sequence.q_begin + r / work.group, work.kv_head * work.group + r % work.group);
}

__device__ __forceinline__ int64_t key_offset(const Work &work, const sinkattn_tensor &tensor, int64_t j) {
    return sa_offset(&tensor, work.sequence.batch, work.sequence.k_begin + j, work.kv_head);
}

__device__ __forceinline__ int64_t stat_index(const Work &work, const sinkattn_problem &problem, sa_position_t r) {
    return sa_row_index(&problem, &work.sequence, work.kv_head * work.group + r % work.group, r / work.group);
}

// Bits of a device's error word.
enum : unsigned { kBadCuSeqlens = 1, kBadCacheSeqlens = 2, kBadBlockTable = 4, kBadSlotMapping = 8 };

// By one block: reports offsets that do not start at 0, that decrease or that end outside the tensor. *error_word is sticky.
__device__ __forceinline__ void check_cu_seqlens(const int32_t *cu_seqlens, int64_t batch, int64_t total, unsigned *error_word) {
    bool bad = threadIdx.x == 0 && cu_seqlens[0] != 0;
    for (int64_t b = threadIdx.x; b < batch; b += blockDim.x) bad |= cu_seqlens[b + 1] < cu_seqlens[b] || cu_seqlens[b + 1] > total;
    if (bad) atomicOr(error_word, kBadCuSeqlens);
}

__device__ __forceinline__ void check_lengths(const sinkattn_fwd_args &args, unsigned *error_word) {
    if (!args.problem.packed) return;
    check_cu_seqlens(args.cu_seqlens_q, args.problem.batch, args.problem.q_len, error_word);
    check_cu_seqlens(args.cu_seqlens_k, args.problem.batch, args.problem.k_len, error_word);
}

} // namespace sa
