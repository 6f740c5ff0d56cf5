// SPDX-License-Identifier: Apache-2.0
//
// The end of a softmax row: the sink joins the sum over keys as the partial (LSE s_aux, sum 1, out 0). In double: sa_end_row of
// core/numerics.h.
#pragma once

#include "cuda/ptx/sm80.cuh"

namespace sa {

// The LSE over the keys alone, from their pivot, in log2 units, and sum. Never contracted: LSE and raw LSE
// of a row without a sink have the same bits.
__device__ __forceinline__ float raw_lse(float pivot, float sum) {
    return sum == 0.0f ? -INFINITY : __fadd_rn(__fmul_rn(pivot, kLn2), __logf(sum));
}

// From the pivot, in log2 units, and the sum of a row's keys, and the row's s_aux: -inf for none.
struct RowEnd {
    float s_aux, top, kept, total; // top: the larger of pivot and sink, in log2 units; kept: what the keys' sum is scaled by

    __device__ __forceinline__ RowEnd(float pivot, float sum, float s_aux) : s_aux(s_aux) {
        const float sink = s_aux * kLog2e;
        top = pivot > sink ? pivot : sink; // a NaN in s_aux stays
        const float from = top == -INFINITY ? 0.0f : top;
        kept = pivot == from ? 1.0f : exp2_approx(pivot - from); // both may be inf
        total = fmaf(sum, kept, sink == from ? 1.0f : exp2_approx(sink - from));
    }

    // What the row of out is multiplied by.
    __device__ __forceinline__ float factor() const { return total == 0.0f ? 0.0f : kept * reciprocal_approx(total); }

    // A row without keys gets s_aux itself.
    __device__ __forceinline__ float lse() const {
        return total == 0.0f ? -INFINITY : top == s_aux * kLog2e ? s_aux + __logf(total) : raw_lse(top, total);
    }
};

} // namespace sa
