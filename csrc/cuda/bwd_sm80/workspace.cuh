// SPDX-License-Identifier: Apache-2.0
//
// The backward's workspace: of each row, lse and g - delta for the blocks that own keys, and its term of ds_aux for the sink kernel.
#pragma once

#include "core/workspace.h"
#include "cuda/work/items.cuh"
#include "cuda/work/sink_terms.cuh"

namespace sa::bwd_sm80 {

struct Stats {
    float lse, bias; // lse: in log2 units, 0 for a row without keys and sink; bias: g - delta
};
constexpr int kStatsAlignment = SA_BWD_SM80_STATS_BYTES; // each is copied in one piece
static_assert(sizeof(Stats) == SA_BWD_SM80_STATS_BYTES, "as the planner counts them");

// stats: [batch, num_kv_heads, q_len * group], packed [num_kv_heads, total_q * group]. terms: shaped as lse; NULL without ds_aux.
struct Workspace {
    Stats *stats;
    float *terms;
};

static inline Workspace workspace_of(const sinkattn_bwd_args &args, const sinkattn_context &context) {
    const uintptr_t end = reinterpret_cast<uintptr_t>(context.workspace) + kStatsAlignment - 1;
    auto *stats = reinterpret_cast<Stats *>(end / kStatsAlignment * kStatsAlignment);
    return {stats, args.ds_aux ? reinterpret_cast<float *>(stats + sa_bwd_sm80_num_stats(&args.fwd.problem)) : nullptr};
}

__device__ __forceinline__ int64_t stats_index(const sinkattn_problem &problem, const Work &work, int64_t r) {
    return ((work.sequence.batch * problem.num_kv_heads + work.kv_head) * problem.q_len + work.sequence.q_begin) * work.group + r;
}

// A block owns a head.
static __global__ __launch_bounds__(kSinkThreads) void add_sink_terms(
        const __grid_constant__ sinkattn_bwd_args args, const float *terms, int64_t num_batches, int64_t length) {
    __shared__ double sums[kSinkThreads / 32];
    add_sink_terms_of<kSinkThreads>(args, terms, num_batches, length, blockIdx.x, sums);
}

} // namespace sa::bwd_sm80
