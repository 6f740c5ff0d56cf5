// SPDX-License-Identifier: Apache-2.0
//
// ds_aux of a head: the sum of the terms that the backward's other kernels wrote.
#pragma once

#include "core/numerics.h"

namespace sa {

constexpr int kSinkThreads = 1024;

// By a block. terms: [num_batches][num_q_heads][length], added in an order that depends on sizes alone.
template <int kThreads>
__device__ __forceinline__ void add_sink_terms_of(const sinkattn_bwd_args &args, const float *terms, int64_t num_batches, int64_t length,
        int64_t head, double (&sums)[kThreads / 32]) {
    const sinkattn_problem &problem = args.fwd.problem;
    double sum = 0.0;
    for (int64_t b = 0; b < num_batches; b++) {
        const float *of_head = terms + (b * problem.num_q_heads + head) * length;
        for (int64_t i = threadIdx.x; i < length; i += kThreads) sum += of_head[i];
    }
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = threadIdx.x < kThreads / 32 ? sums[threadIdx.x] : 0.0;
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
    if (threadIdx.x == 0) sa_store(args.ds_aux, problem.s_aux_dtype, head, sum);
}

} // namespace sa
