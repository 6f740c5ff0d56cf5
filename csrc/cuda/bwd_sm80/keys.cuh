// SPDX-License-Identifier: Apache-2.0
//
// The work of a block that owns keys: a tile of the keys of one kv head, and the rows of its GQA group that see some of them. And steps
// from row to row, all heads of a token before the next token.
#pragma once

#include "cuda/work/items.cuh"

namespace sa::bwd_sm80 {

// Tiles of packed sequence b begin at (keys before b) / tile_keys + b, as tiles of rows do.
static inline int64_t num_key_tiles(const sinkattn_problem &problem, int64_t tile_keys) {
    if (problem.packed) return problem.k_len / tile_keys + problem.batch + 1;
    return problem.batch * sa_ceil_div(problem.k_len, tile_keys);
}

// False if the tile has no keys. work's rows, tokens and tiles are those that see some key; tiles have tile_rows rows, from row 0 of the
// sequence on. Keys past cu_seqlens[batch] are one more sequence, which no row sees.
__device__ __forceinline__ bool find_key_work(
        const sinkattn_fwd_args &args, int64_t tile_keys, int64_t tile_rows, int64_t item, Work &work, sa_range &keys) {
    const sinkattn_problem &problem = args.problem;
    work.group = problem.num_q_heads / problem.num_kv_heads;
    work.kv_head = item % problem.num_kv_heads;
    work.has_sink = false;
    const int64_t tile = item / problem.num_kv_heads; // the first keys of a causal sequence are seen by the most rows
    if (problem.packed) {
        const auto keys_before = [&](int64_t b) { return sa_packed_begin(args.cu_seqlens_k, b, problem.k_len); };
        const auto first_tile = [&](int64_t b) { return keys_before(b) / tile_keys + b; };
        const int64_t b = find_sequence(problem.batch, tile, first_tile);
        keys.begin = (tile - first_tile(b)) * tile_keys;
        if (b < problem.batch)
            work.sequence = sa_sequence_at(&args, b);
        else
            work.sequence = {0, 0, 0, keys_before(b), problem.k_len - keys_before(b)};
    } else {
        const int64_t tiles = sa_ceil_div(problem.k_len, tile_keys);
        keys.begin = tile % tiles * tile_keys;
        work.sequence = sa_sequence_at(&args, tile / tiles);
    }
    keys.end = sa_min(keys.begin + tile_keys, work.sequence.k_len);
    if (keys.begin < 0 || keys.begin >= keys.end) return false;
    work.band = sa_band_of(&problem.mask, work.sequence.q_len, work.sequence.k_len);
    work.tokens = sa_keys_rows(&work.band, keys);
    work.rows = {work.tokens.begin * work.group, work.tokens.end * work.group};
    work.tiles = {};
    work.tiles.tile_k = tile_rows;
    work.tiles.band = work.rows;
    work.tiles.begin = static_cast<int32_t>(work.rows.begin / tile_rows);
    work.tiles.end = work.rows.begin < work.rows.end ? static_cast<int32_t>(sa_ceil_div(work.rows.end, tile_rows)) : work.tiles.begin;
    return true;
}

// Offset of row r from row 0 of the group's first head. The launcher refuses more rows of a sequence and kv head than int32 holds.
__device__ __forceinline__ int64_t row_offset(const sinkattn_tensor &tensor, const Work &work, int32_t r) {
    const uint32_t group = static_cast<uint32_t>(work.group), token = static_cast<uint32_t>(r) / group;
    return token * tensor.row_stride + (static_cast<uint32_t>(r) - token * group) * tensor.head_stride;
}

// From a row of q and of dout to the row `step` below, without a division: add `head` heads and q, dout elements; past the group's last
// head, go on to the next token by q_token, dout_token.
struct RowSteps {
    uint32_t head;
    int64_t q, q_token, dout, dout_token;
};

__device__ __forceinline__ RowSteps row_steps(const sinkattn_tensor &q, const sinkattn_tensor &dout, const Work &work, int32_t step) {
    return {static_cast<uint32_t>(step) % static_cast<uint32_t>(work.group), row_offset(q, work, step),
            q.row_stride - work.group * q.head_stride, row_offset(dout, work, step), dout.row_stride - work.group * dout.head_stride};
}

} // namespace sa::bwd_sm80
