// SPDX-License-Identifier: Apache-2.0
//
// A decode's arguments as its kernels take them: the fields that the parameters of every decode have, by the same names.
#pragma once

#include "core/layout.h"
#include "core/split.h"
#include "cuda/ptx/sm80.cuh"
#include "cuda/work/items.cuh"

namespace sa {

// The tensors and the mask; not what depends on how rows are cut into streams.
template <class Params> void set_cache(Params &params, const sinkattn_decode_args &args) {
    const sinkattn_problem &problem = args.fwd.problem;
    params.cache_seqlens = args.cache_seqlens;
    params.block_table = args.block_table;
    params.block_table_stride = args.block_table_stride;
    params.band = sa_band_of(&problem.mask, static_cast<int32_t>(problem.q_len), static_cast<int32_t>(problem.k_len));
    params.k = static_cast<const uint16_t *>(args.fwd.k.data);
    params.v = static_cast<const uint16_t *>(args.fwd.v.data);
    params.k_page = args.fwd.k.batch_stride;
    params.v_page = args.fwd.v.batch_stride;
    params.k_head = static_cast<int32_t>(args.fwd.k.head_stride);
    params.v_head = static_cast<int32_t>(args.fwd.v.head_stride);
    params.k_row = static_cast<int32_t>(args.fwd.k.row_stride);
    params.v_row = static_cast<int32_t>(args.fwd.v.row_stride);
    params.head_dim = static_cast<int32_t>(problem.head_dim);
    const bool paged = args.block_table != nullptr;
    params.num_pages = static_cast<int32_t>(sa_min(paged ? sa_num_pages(&args) : problem.batch, INT32_MAX));
    params.page_size = paged ? static_cast<int32_t>(sa_min(problem.page_size, INT32_MAX)) : INT32_MAX;
    params.by_page_size = divisor_of(params.page_size);
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

// Pages in host memory, and out in NVFP4.
template <class Params> void set_extras(Params &params, const sinkattn_decode_args &args) {
    const int64_t num_pages = args.fwd.problem.num_pages;
    params.first_host_page = INT32_MAX;
    if (args.host.num_pages && num_pages < INT32_MAX) {
        params.first_host_page = static_cast<int32_t>(num_pages);
        params.k_gap = sa_tier_gap(&args.fwd.k, &args.host.k, num_pages, sizeof(uint16_t));
        params.v_gap = sa_tier_gap(&args.fwd.v, &args.host.v, num_pages, sizeof(uint16_t));
    }
    params.nvfp4_values = args.nvfp4.values;
    params.nvfp4_scales = args.nvfp4.scales;
    params.global_scale = args.nvfp4.global_scale != 0.0 ? static_cast<float>(args.nvfp4.global_scale) : 1.0f;
}

} // namespace sa
