// SPDX-License-Identifier: Apache-2.0
//
// When a row's pivot moves. Kernels that give a row the same bits share these numbers.
#pragma once

#include "cuda/ptx/sm80.cuh"

namespace sa {

// In log2 units: a pivot follows its row's maximum only where that exceeds it by more, so O is seldom rescaled.
constexpr float kLazy = 8.0f;

// On 9.0, where later key tiles are not searched for maxima, it may move only where a sum of weights exceeds this. P can still hold it.
template <class Element> constexpr float kLarge = 0x1p24f;
template <> constexpr float kLarge<Fp16> = 0x1p14f;

// What a partial is scaled by; its_pivot and top may be the same infinity.
__device__ __forceinline__ float weight(float its_pivot, float top) { return its_pivot == top ? 1.0f : exp2_approx(its_pivot - top); }

// Two chunks of a row join, the earlier one first. A later one without keys, zeros with a pivot of -inf, adds -0, which leaves all bits.
struct Joint {
    float top, before, now; // the larger pivot, and the factors

    Joint() = default;
    __device__ __forceinline__ Joint(float earlier, float later)
        : top(fmaxf(earlier, later)), before(weight(earlier, top)), now(later == -INFINITY ? -0.0f : weight(later, top)) {}

    // Never contracted otherwise.
    __device__ __forceinline__ float of(float earlier, float later) const { return __fmaf_rn(earlier, before, __fmul_rn(later, now)); }
};

} // namespace sa
