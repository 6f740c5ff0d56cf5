// SPDX-License-Identifier: Apache-2.0
//
// The launcher's arguments as the kernels take them.
#pragma once

#include "cuda/decode/work.cuh"

namespace sa::decode {

inline sa_divisor divisor_of(int64_t size) { return sa_divisor_of(static_cast<uint32_t>(sa_clamp(size, 1, INT32_MAX))); }

// The tensors and the mask, where `heads` kv heads form a stream, of at most row_tile rows a tile; not what depends on parts.
inline void set_tensors(Params &params, const sinkattn_decode_args &args, int heads, int row_tile) {
    const sinkattn_problem &problem = args.fwd.problem;
    params.cache_seqlens = args.cache_seqlens;
    params.block_table = args.block_table;
    params.block_table_stride = args.block_table_stride;
    params.band = sa_band_of(&problem.mask, static_cast<int32_t>(problem.q_len), static_cast<int32_t>(problem.k_len));
    params.batch = static_cast<int32_t>(problem.batch);
    params.row_tiles = static_cast<int32_t>(sa_ceil_div(problem.q_len * (problem.num_q_heads / problem.num_kv_heads), row_tile));
    params.group = static_cast<int32_t>(problem.num_q_heads / problem.num_kv_heads) * heads;
    params.num_rows = static_cast<int32_t>(problem.q_len) * params.group;
    params.num_heads = static_cast<uint32_t>(problem.num_kv_heads) / heads;
    params.by_group = divisor_of(params.group);
    params.by_heads = divisor_of(params.num_heads);
    params.by_row_tiles = divisor_of(params.row_tiles);
    params.k = static_cast<const uint16_t *>(args.fwd.k.data);
    params.v = static_cast<const uint16_t *>(args.fwd.v.data);
    params.k_page = args.fwd.k.batch_stride;
    params.v_page = args.fwd.v.batch_stride;
    params.k_head = static_cast<int32_t>(args.fwd.k.head_stride) * heads;
    params.v_head = static_cast<int32_t>(args.fwd.v.head_stride) * heads;
    params.k_row = static_cast<int32_t>(args.fwd.k.row_stride);
    params.v_row = static_cast<int32_t>(args.fwd.v.row_stride);
    params.head_dim = static_cast<int32_t>(problem.head_dim);
    const bool paged = args.block_table != nullptr;
    params.num_pages = static_cast<int32_t>(sa_min(paged ? sa_num_pages(&args) : problem.batch, INT32_MAX));
    params.page_size = paged ? static_cast<int32_t>(sa_min(problem.page_size, INT32_MAX)) : INT32_MAX;
    params.by_page_size = divisor_of(params.page_size);
    params.whole_tiles = !paged || problem.page_size % kTileK == 0;
    params.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    params.q = static_cast<const uint16_t *>(args.fwd.q.data);
    params.q_batch = args.fwd.q.batch_stride;
    params.q_row = static_cast<int32_t>(args.fwd.q.row_stride);
    params.q_head = static_cast<int32_t>(args.fwd.q.head_stride);
    params.s_aux = args.fwd.s_aux;
    params.s_aux_dtype = problem.s_aux_dtype;
    params.out = static_cast<uint16_t *>(args.fwd.out.data);
    params.out_batch = args.fwd.out.batch_stride;
    params.out_row = static_cast<int32_t>(args.fwd.out.row_stride);
    params.out_head = static_cast<int32_t>(args.fwd.out.head_stride);
    params.lse = static_cast<float *>(args.fwd.lse);
    params.lse_raw = static_cast<float *>(args.fwd.lse_raw);
}

} // namespace sa::decode
