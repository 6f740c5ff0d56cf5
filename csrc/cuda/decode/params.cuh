// SPDX-License-Identifier: Apache-2.0
//
// The launcher's arguments as the kernels take them.
#pragma once

#include "cuda/decode/work.cuh"
#include "cuda/work/decode_params.cuh"

namespace sa::decode {

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
