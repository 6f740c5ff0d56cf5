// SPDX-License-Identifier: Apache-2.0
//
// The backward's workspace: of each row, lse and g - delta for the blocks that own keys, and its term of ds_aux for the sink kernel.
#pragma once

#include "cuda/work/items.cuh"
#include "cuda/work/sink_terms.cuh"

namespace sa::bwd_sm80 {

struct Stats {
    float lse, bias; // lse: in log2 units, 0 for a row without keys and sink; bias: g - delta
};

// stats: [batch, num_kv_heads, q_len * group], packed [num_kv_heads, total_q * group]. terms: shaped as lse; NULL without ds_aux.
struct Workspace {
    Stats *stats;
    float *terms;
};

static inline int64_t num_stats(const sinkattn_problem &problem) {
    return (problem.packed ? 1 : problem.batch) * problem.num_q_heads * problem.q_len;
}

constexpr int kStatsAlignment = 8; // each is copied in one piece

static inline int64_t bwd_workspace_bytes(const sinkattn_problem &problem) {
    const int64_t term_bytes = problem.s_aux_dtype ? sizeof(float) : 0;
    return num_stats(problem) * (static_cast<int64_t>(sizeof(Stats)) + term_bytes) + kStatsAlignment - 1;
}

static inline Workspace workspace_of(const sinkattn_bwd_args &args, const sinkattn_context &context) {
    const uintptr_t end = reinterpret_cast<uintptr_t>(context.workspace) + kStatsAlignment - 1;
    auto *stats = reinterpret_cast<Stats *>(end / kStatsAlignment * kStatsAlignment);
    return {stats, args.ds_aux ? reinterpret_cast<float *>(stats + num_stats(args.fwd.problem)) : nullptr};
}

__device__ __forceinline__ int64_t stats_index(const sinkattn_problem &problem, const Work &work, int64_t r) {
    return ((work.sequence.batch * problem.num_kv_heads + work.kv_head) * problem.q_len + work.sequence.q_begin) * work.group + r;
}

// A block owns a head.
static __global__ __launch_bounds__(kSinkThreads) void add_sink_terms(const __grid_constant__ sinkattn_bwd_args args, const float *terms,
                                                                      int64_t num_streams, int64_t length) {
    __shared__ double sums[kSinkThreads / 32];
    add_sink_terms_of<kSinkThreads>(args, terms, num_streams, length, blockIdx.x, sums);
}

} // namespace sa::bwd_sm80
