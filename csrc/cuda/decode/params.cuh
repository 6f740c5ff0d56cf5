// SPDX-License-Identifier: Apache-2.0
//
// The launcher's arguments as the kernels take them.
#pragma once

#include "cuda/decode/work.cuh"
#include "cuda/host/backend.h"
#include "cuda/work/decode_params.cuh"
#include "cuda/work/launch_counter.cuh"

namespace sa::decode {

// Row tiles of a sequence and kv head.
inline int64_t row_tiles_of(const sinkattn_problem &problem, int row_tile) { return sa_ceil_div(sa_kv_head_rows(&problem), row_tile); }

// Sizes that the kernels count in 32 bits or less.
inline sinkattn_status check_sizes(const sinkattn_decode_args &args, const sinkattn_plan &plan, int row_tile) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t group = problem.num_q_heads / problem.num_kv_heads, row_tiles = row_tiles_of(problem, row_tile);
    int64_t tiles;
    if (__builtin_mul_overflow(problem.batch * problem.num_kv_heads, row_tiles * sa_max(1, sa_ceil_div(problem.k_len, kTileK)), &tiles))
        tiles = INT64_MAX;
    int64_t row_stride = 0, head_stride = 0;
    for (const sinkattn_tensor *tensor : {&args.fwd.q, &args.fwd.k, &args.fwd.v, &args.fwd.out}) {
        row_stride = sa_max(row_stride, tensor->row_stride);
        head_stride = sa_max(head_stride, tensor->head_stride);
    }
    const struct {
        const char *name;
        int64_t size, most;
    } limits[] = {{"batch", problem.batch, INT32_MAX}, {"num_kv_heads", problem.num_kv_heads, INT32_MAX},
            {"q_len * group", problem.q_len * group, INT32_MAX - row_tile},
            {"the number of tiles of 16 keys, of all sequences and kv heads,", tiles, 1 << 30},
            {"num_splits", plan.num_splits, (1 << kCountBits) - 1}, {"num_items", plan.num_items, INT32_MAX},
            {"the number of streams of rows, where they are cut by their lengths,",
                    sa_is_balanced(&problem, &plan) ? problem.batch * problem.num_kv_heads * row_tiles : 0, 1 << (kCountBits - 1)},
            {"a row stride", row_stride, INT32_MAX}, {"a head stride", head_stride, INT32_MAX}};
    for (const auto &limit : limits)
        if (limit.size > limit.most)
            return sa_status(SINKATTN_UNSUPPORTED, "%s is %lld; a CUDA decode takes at most %lld", limit.name,
                    static_cast<long long>(limit.size), static_cast<long long>(limit.most));
    return sa_ok();
}

// set_cache, where `heads` kv heads form a stream, of at most row_tile rows a tile; not what depends on parts.
inline void set_tensors(Params &params, const sinkattn_decode_args &args, int heads, int row_tile) {
    const sinkattn_problem &problem = args.fwd.problem;
    const auto group = static_cast<int32_t>(problem.num_q_heads / problem.num_kv_heads);
    set_cache(params, args);
    params.batch = static_cast<int32_t>(problem.batch);
    params.row_tiles = static_cast<int32_t>(sa_ceil_div(problem.q_len * group, row_tile));
    params.group = group * heads;
    params.num_rows = static_cast<int32_t>(problem.q_len) * params.group;
    params.num_heads = static_cast<uint32_t>(problem.num_kv_heads) / heads;
    params.by_group = divisor_of(params.group);
    params.by_heads = divisor_of(params.num_heads);
    params.by_row_tiles = divisor_of(params.row_tiles);
    params.k_head *= heads;
    params.v_head *= heads;
    params.head_dim_v = static_cast<int32_t>(sa_head_dim_v(&problem));
    params.whole_tiles = !args.block_table || problem.page_size % kTileK == 0;
}

} // namespace sa::decode
