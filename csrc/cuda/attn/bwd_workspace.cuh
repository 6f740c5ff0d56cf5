// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of a backward leave for each other: a row's lse and g - delta for those that own keys, its term of ds_aux for the last.
#pragma once

#include "cuda/attn/work.cuh"

namespace sa {

struct Stats {
    float lse, bias; // lse in log2 units, 0 where there is nothing to normalise; bias: g - delta
};

// Stats in the order of rows: [batch][num_kv_heads][q_len * group], packed [num_kv_heads][total_q * group]. Terms as lse; NULL without
// ds_aux.
struct Workspace {
    Stats *stats;
    float *terms;
};

static inline int64_t num_stats(const sinkattn_problem &problem) {
    return (problem.packed ? 1 : problem.batch) * problem.num_q_heads * problem.q_len;
}

constexpr int kStatsAlignment = 8; // they are copied in one piece

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

constexpr int kSinkThreads = 1024;

// ds_aux of a head, by a block that adds its terms, [num_streams][num_q_heads][length], in an order that sizes alone decide.
template <int kThreads>
__device__ __forceinline__ void add_sink_terms_of(const sinkattn_bwd_args &args, const float *terms, int64_t num_streams, int64_t length,
                                                  int64_t head, double (&sums)[kThreads / 32]) {
    const sinkattn_problem &problem = args.fwd.problem;
    double sum = 0.0;
    for (int64_t b = 0; b < num_streams; b++) {
        const float *stream = terms + (b * problem.num_q_heads + head) * length;
        for (int64_t i = threadIdx.x; i < length; i += kThreads) sum += stream[i];
    }
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = threadIdx.x < kThreads / 32 ? sums[threadIdx.x] : 0.0;
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
    if (threadIdx.x == 0) sa_store(args.ds_aux, problem.s_aux_dtype, head, sum);
}

// A block owns a head.
static __global__ __launch_bounds__(kSinkThreads) void add_sink_terms(const __grid_constant__ sinkattn_bwd_args args, const float *terms,
                                                                      int64_t num_streams, int64_t length) {
    __shared__ double sums[kSinkThreads / 32];
    add_sink_terms_of<kSinkThreads>(args, terms, num_streams, length, blockIdx.x, sums);
}

} // namespace sa
